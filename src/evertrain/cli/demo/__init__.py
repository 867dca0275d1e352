"""`evertrain demo [FEATURE]`: a job on a cluster, something happens to it, and the proof that it made no difference."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evertrain.cli import running

LAUNCH = "launch"


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == LAUNCH:
        from evertrain.cli.demo import launched

        return launched.main(argv[1:])
    from evertrain.cli.demo.features import DEFAULT, FEATURES

    parser = argparse.ArgumentParser(
        prog="evertrain demo",
        description="Run a training job on a cluster made for it, undisturbed and then with a fault, and compare.",
        epilog="features:\n"
        + "\n".join(f"  {feature.name:<22}{feature.title}" for feature in FEATURES.values())
        + f"\n  {LAUNCH:<22}without a cluster: `evertrain launch`, and a process is killed\n\n"
        "exit codes: 0 all that was promised is true; 1 it is not; 2 the demo can't be run; 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "feature", nargs="?", default=DEFAULT, choices=[*FEATURES, LAUNCH], metavar="FEATURE", help=f"default {DEFAULT}"
    )
    parser.add_argument("--steps", type=int, default=0, help="steps of each run (default: 60, or what it takes)")
    parser.add_argument(
        "--timeout", type=running.seconds, default=180.0, metavar="S", help="for each thing waited for (default 180)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave all files and logs in this new folder")
    parser.add_argument(
        "--shared-network",
        dest="own_network",
        action="store_false",
        default=None,
        help="pods are in the network of this machine (default: in networks of their own where the kernel allows it)",
    )
    arguments = parser.parse_args(argv)
    if arguments.steps and arguments.steps < 30:
        parser.error("--steps is at least 30: something has to happen in between")

    async def work() -> int:
        from evertrain.cli.demo import play

        return await play.show(
            FEATURES[arguments.feature], arguments.steps, arguments.timeout, arguments.keep, arguments.own_network
        )

    return running.run("demo", work)
