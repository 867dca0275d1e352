"""Plain DDP and Evertrain in turns, within the same processes: blocks of steps of the toy workload with either.

A machine's speed drifts by more than what is to be measured here, and differently from run to run. Blocks of a tenth of
a second that follow each other see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WARM_UP = 6  # blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, required=True, help="where rank 0 writes milliseconds per step")
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--block", type=int, default=5, help="steps in a block")
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)

    def parts() -> tuple[nn.Module, torch.optim.Optimizer, DistributedSampler, DataLoader]:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        data = TensorDataset(torch.randn(args.blocks * args.block * args.batch * world_size, 512))
        sampler = DistributedSampler(data, world_size, rank, drop_last=True)
        loader = DataLoader(data, args.batch, sampler=sampler, drop_last=True)
        return model, torch.optim.Adam(model.parameters(), lr=1e-4), sampler, loader

    # The plain one first: once Training is imported, process groups are Evertrain's business.
    dist.init_process_group("gloo")
    model, plain_optimizer, _, loader = parts()
    replica = nn.parallel.DistributedDataParallel(model)

    def plain_block(batches) -> None:
        for _ in range(args.block):
            (batch,) = next(batches)
            replica(batch).pow(2).mean().backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()

    from evertrain.torch import Training

    own_model, optimizer, sampler, own_loader = parts()
    training = Training(model=own_model, optimizer=optimizer, sampler=sampler)
    times: dict[str, list[float]] = {"plain": [], "evertrain": []}

    @training.resilient
    def train() -> None:
        batches = iter(loader)
        begun = 0.0
        for step, (batch,) in training.steps(own_loader, until=args.blocks * args.block):
            if step % args.block == 0:
                now = time.perf_counter()
                if step:
                    times["evertrain"].append(now - begun)
                plain_block(batches)
                begun = time.perf_counter()
                times["plain"].append(begun - now)
            training.model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    if rank == 0:
        per_step = {name: [1000 * t / args.block for t in block[WARM_UP:]] for name, block in times.items()}
        args.result.write_text(json.dumps(per_step))


if __name__ == "__main__":
    main()
