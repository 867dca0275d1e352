"""A training that knows nothing of MindIO: torch.distributed, and a checkpoint now and then. Its numbers are exact."""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path)
parser.add_argument("--steps", type=int)
parser.add_argument("--checkpoint-every", type=int, default=1000)
parser.add_argument("--fault", default="")
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoint, happened = options.dir / "checkpoint.pt", options.dir / "happened"
step, weights = torch.load(checkpoint) if checkpoint.exists() else (0, torch.ones(4, dtype=torch.int64))
while step < options.steps:
    gradient = (weights + step) * (rank + 1) % 1009
    if options.fault == f"{step}:{rank}:kill" and not happened.exists():
        happened.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(gradient)
    weights = (weights * 3 + gradient) % 10007
    step += 1
    with open(options.dir / f"steps.{rank}", "a") as file:
        file.write(json.dumps([step]) + "\n")
    if step % options.checkpoint_every == 0:
        if rank == 0:
            torch.save((step, weights), checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
        dist.barrier()
result = {"rank": rank, "step": step, "weights": weights.tolist()}
print(json.dumps(result) + "\n", end="", flush=True)  # one write, so that lines of several ranks can't mix
dist.destroy_process_group()
