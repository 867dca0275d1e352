"""Repair bandwidth for states of many sizes, against bare gloo and against reading a checkpoint.

    python -m bench.repair [--quick | --full] [--json FILE]

Two ranks, two processes; for sharded state two pairs of them at once, each with half of the bytes. A repair, a bare
send and receive of as many bytes and the reading of the same state from a checkpoint take turns in the same run, so
that what else the machine does hits all three. The budget is for 100 MB and more: below that, fixed costs decide.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.jobs import ROOT, environment
from bench.report import Row, show

BUDGET = 100.0
BUDGET_FROM = 100
SHARDED = 126
SIZES = {"quick": (1, 16, 126), "usual": (1, 4, 16, 64, 126, 256, 512), "full": (1, 16, 126, 512, 4000)}
"""Megabytes."""
KINDS = ("bare", "repair", "checkpoint")


def measure(megabytes: int, runs: int, pairs: int) -> dict[str, list[float]]:
    """Seconds of each kind, by turn."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.repair", "--rank", folder, str(megabytes), str(runs), str(pairs)]
        ranks = [subprocess.Popen([*command, str(rank)], env=environment(), cwd=ROOT) for rank in range(2 * pairs)]
        try:
            if any(process.wait(60 + megabytes * runs / 10) for process in ranks):
                raise RuntimeError(f"{megabytes} MB could not be measured")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return json.loads((Path(folder) / "result").read_text())


def state_of(nbytes: int) -> dict[str, Any]:
    """Tensors as a model has them: most are small, most bytes are in big ones."""
    import torch

    small = {f"small{i}": torch.ones(200 + i) for i in range(60)} | {f"middle{i}": torch.ones(3_000) for i in range(20)}
    left = nbytes - sum(tensor.nbytes for tensor in small.values())
    return small | {f"big{i}": torch.ones(left // 4 // 40) for i in range(40)}


def run_rank(folder: str, megabytes: int, runs: int, pairs: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from evertrain.torch import backends, codec, groups, repair
    from evertrain.torch.checkpoint import Checkpoints

    store = dist.FileStore(f"{folder}/store", 2 * pairs)
    group = groups.build(1, rank, 2 * pairs, store, backends.pick("cpu"), 300.0, threading.Event())
    packed = codec.pack(state_of(megabytes * 1_000_000 // pairs))
    flat = torch.ones(packed.nbytes // 4)
    sends, peer = rank % 2 == 0, rank ^ 1
    saved = Checkpoints(f"{folder}/{rank}").save(1, packed) if not sends else Path()
    gc.freeze()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(runs + 1):
        for kind in KINDS:
            if kind == "checkpoint" and not sends:
                forget(saved)
            group.barrier().wait()
            begin = time.monotonic()
            match kind, sends:
                case "bare", True:
                    group.send([flat], peer, 7).wait()
                case "bare", False:
                    group.recv([flat], peer, 7).wait()
                case "repair", True:
                    repair.send_state(group, packed, [peer])
                case "repair", False:
                    repair.receive_state(group, peer, packed)
                case "checkpoint", False:
                    Checkpoints.load(saved)
            # Until the last of the pairs is done.
            group.barrier().wait()
            if number:
                times[kind].append(time.monotonic() - begin)
    if rank == 1:
        Path(folder, "result").write_text(json.dumps(times))


def forget(file: Path) -> None:
    """Have the next reading come from the disk and not from memory."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows(megabytes: int, runs: int, pairs: int) -> list[Row]:
    times = measure(megabytes, runs, pairs)
    name = f"{megabytes} MB{', sharded' if pairs > 1 else ''}: "
    speed = {kind: f"{megabytes / 1000 / statistics.median(values):.2f} GB/s" for kind, values in times.items()}
    shares = {
        kind: [100 * other / own for other, own in zip(times[kind], times["repair"], strict=True)]
        for kind in ("bare", "checkpoint")
    }
    budget = BUDGET if megabytes >= BUDGET_FROM and pairs == 1 else None
    return [
        Row(
            name + "repair of bare gloo", shares["bare"], "%", budget, judged="p50", at_least=True,
            notes=f"{speed['repair']} against {speed['bare']}", extra={"seconds": times},
        ),
        Row(
            name + "repair of a checkpoint's reading", shares["checkpoint"], "%", None, at_least=True,
            notes=f"{speed['repair']} against {speed['checkpoint']}",
        ),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.repair", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three sizes, under a minute")
    parser.add_argument("--full", action="store_true", help="up to 4 GB; takes 16 GB of memory and 4 GB of disk")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        folder, *numbers = options.rank
        run_rank(folder, *map(int, numbers))
        return 0
    which = "quick" if options.quick else "full" if options.full else "usual"
    measured: list[Row] = []
    for megabytes in SIZES[which]:
        turns = 5 if options.quick or megabytes > 1000 else 40
        measured += rows(megabytes, turns, 1)
    measured += rows(SHARDED, 5 if options.quick else 40, 2)
    return 0 if show("Repair bandwidth", measured, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
