"""Repair bandwidth: a state of many tensors from rank to rank, against a bare send and receive of as many bytes.

Both take turns over the same guarded group. Started by `bench.recovery`, once for each of two ranks.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.jobs import ROOT, environment

MEGABYTES = 126


def ratios(runs: int) -> tuple[list[float], float]:
    """Bandwidth of a repair as a share of the bare one beside it, in percent; and the repair's median in GB/s."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.bandwidth", folder, str(runs)]
        ranks = [subprocess.Popen([*command, rank], env=environment(), cwd=ROOT) for rank in ("0", "1")]
        try:
            if any(process.wait(120) for process in ranks):
                raise RuntimeError("the bandwidth could not be measured")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        times = json.loads((Path(folder) / "result").read_text())
    shares = [100 * bare / own for bare, own in zip(times["bare"], times["repair"], strict=True)]
    return shares, MEGABYTES / 1000 / statistics.median(times["repair"])


def main(folder: str, runs: int, rank: int) -> None:
    import gc

    import torch
    import torch.distributed as dist

    from evertrain.torch import backends, codec, groups, repair

    store = dist.FileStore(f"{folder}/store", 2)
    group = groups.build(1, rank, 2, store, backends.pick("cpu"), 60.0, threading.Event())
    many = {f"small{i}": torch.ones(200 + i) for i in range(60)} | {f"middle{i}": torch.ones(16_000) for i in range(20)}
    left = MEGABYTES * 1_000_000 - sum(tensor.nbytes for tensor in many.values())
    many |= {f"big{i}": torch.ones(left // 4 // 40) for i in range(40)}
    packed = codec.pack(many)
    flat = torch.ones(packed.nbytes // 4)
    gc.freeze()
    times: dict[str, list[float]] = {"bare": [], "repair": []}
    for number in range(runs + 2):
        for kind in times:
            group.barrier().wait()
            begin = time.monotonic()
            if kind == "bare":
                (group.send([flat], 1, 7) if rank == 0 else group.recv([flat], 0, 7)).wait()
            elif rank == 0:
                repair.send_state(group, packed, [1])
            else:
                repair.receive_state(group, 0, packed)
            if number >= 2:
                times[kind].append(time.monotonic() - begin)
            group.barrier().wait()
    if rank == 1:
        Path(folder, "result").write_text(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
