"""The workload of all measurements: 4 x Linear(512), batch 32, Adam, gloo. With Evertrain or with plain DDP.

Each rank appends one line a step to a log: pid, completed steps, CLOCK_MONOTONIC. Whoever measures reads the logs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="DDP, with a checkpoint of its own every 20 steps")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the step logs")
    parser.add_argument("--checkpoint", type=Path, help="with --plain: file to save to and to resume from")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    return parser.parse_args()


class Trouble:
    """Does to the highest rank what a file in the log folder asks for: `raise` or `gil`; notes when it did."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._file = folder / "trouble" if rank == world_size - 1 else None

    def __call__(self) -> None:
        if self._file is None or not self._file.exists():
            return
        kind = self._file.read_text()
        self._file.unlink()
        self._file.with_name("troubled").write_text(str(time.monotonic()))
        if kind == "raise":
            raise RuntimeError("asked to raise")
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the GIL for ever


def main() -> None:
    args = arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
    data = TensorDataset(torch.randn(4096, args.width))
    sampler = DistributedSampler(data, world_size, rank, drop_last=True)
    loader = DataLoader(data, args.batch, sampler=sampler, drop_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    log = os.open(args.folder / f"rank{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    trouble = Trouble(args.folder, rank, world_size)

    def completed(step: int) -> None:
        os.write(log, b"%d %d %.6f\n" % (os.getpid(), step, time.monotonic()))

    if args.plain:
        train_plain(args, rank, model, optimizer, sampler, loader, trouble, completed)
    else:
        train_protected(args, model, optimizer, sampler, loader, trouble, completed)
    sha = hashlib.sha256()
    for param in model.parameters():
        sha.update(param.detach().numpy().tobytes())
    print(json.dumps({"rank": rank, "sha256": sha.hexdigest()}), flush=True)


def train_protected(args, model, optimizer, sampler, loader, trouble, completed) -> None:
    from evertrain.torch import Training

    training = Training(model=model, optimizer=optimizer, sampler=sampler)

    @training.resilient
    def train() -> None:
        for step, (batch,) in training.steps(loader, until=args.steps):
            trouble()
            loss = training.model(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if training.completes_step:
                completed(step + 1)

    train()


def train_plain(args, rank, model, optimizer, sampler, loader, trouble, completed) -> None:
    dist.init_process_group("gloo")
    replica = nn.parallel.DistributedDataParallel(model)
    step = 0
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < args.steps:
        sampler.set_epoch(step // len(loader))
        for (batch,) in loader:
            trouble()
            loss = replica(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            completed(step)
            if args.checkpoint and rank == 0 and step % 20 == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(saved, args.checkpoint.with_suffix(".tmp"))
                args.checkpoint.with_suffix(".tmp").replace(args.checkpoint)
            if step >= args.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
