"""`evertrain down`: end the cluster that runs on a data directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from evertrain.cli import running
from evertrain.embedded import instance


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="evertrain down",
        description="End the embedded cluster and its pods, in order, and wait until it is gone. Its objects stay in "
        "the data directory: the next `evertrain up` has them again. Remove the directory to begin anew.",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=instance.default_folder(),
        metavar="DIR",
        help="as given to `evertrain up` (default: $EVERTRAIN_DATA_DIR, else ~/.evertrain/cluster)",
    )
    parser.add_argument(
        "--timeout", type=running.seconds, default=60.0, metavar="S", help="how long to wait (default 60)"
    )
    arguments = parser.parse_args(argv)
    folder = arguments.data_dir.expanduser().absolute()
    try:
        stopped = instance.stop(folder, arguments.timeout)
    except TimeoutError as error:
        return running.complain("down", str(error), running.FAILED)
    except PermissionError:
        return running.complain("down", f"the cluster on {folder} is somebody else's", running.FAILED)
    except KeyboardInterrupt:
        return running.INTERRUPTED
    if stopped is None:
        print(f"evertrain: no cluster runs on {folder}", file=sys.stderr)
    else:
        print(f"evertrain: the cluster on {folder} has ended")
    return 0
