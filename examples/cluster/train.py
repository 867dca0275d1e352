"""A data-parallel job on several pods, with nothing but torch.

The operator tells every pod by environment variables where the first pod is, how large the job is and which part of it
this pod is; each pod starts one process per device. The processes fit a small network to a function and average their
gradients over gloo, so that all end with the same weights.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import sys
from datetime import timedelta
from pathlib import Path

SAMPLES = 1024
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="made up by the script itself; named to show where yours would be")
    parser.add_argument("--output", type=Path, required=True, help="where rank 0 leaves the weights")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    print(
        f"pod {os.environ['RANK']}: {processes} of {os.environ['WORLD_SIZE']} processes, "
        f"devices {os.environ.get('ASCEND_VISIBLE_DEVICES', 'none')}, "
        f"first pod at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        flush=True,
    )
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train, args=(local, processes, arguments)) for local in range(processes)]
    for rank in ranks:
        rank.start()
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode:  # the others would wait for it until their timeout
                for rank in running.values():
                    rank.kill()
                sys.exit(f"{ended.name} has failed with {ended.exitcode}; the others of this pod are ended")


def train(local_rank: int, processes: int, arguments: argparse.Namespace) -> None:
    # Here and not above: the process that only starts the others doesn't need it.
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    faulthandler.enable()  # a crash says where it was

    # In a job of several pods RANK is the number of the pod.
    rank = int(os.environ["RANK"]) * processes + local_rank
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.rand(SAMPLES, 2)
    targets = torch.sin(3 * inputs[:, :1]) * inputs[:, 1:]
    for epoch in range(1, arguments.epochs + 1):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))[rank::world_size]
        total = torch.zeros(1)
        for batch in order.split(BATCH):
            loss = torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(batch)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}/{arguments.epochs}  loss {total.item() / SAMPLES:.4f}", flush=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(f"rank {rank}/{world_size} done, weights {digest}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), arguments.output / "weights.pt")
    dist.barrier()  # nobody's connections end while another one still writes
    dist.destroy_process_group()
    # DistributedDataParallel never lets go of its group, so gloo's threads live on, and one of them may still have a
    # tensor to drop. It needs the interpreter for that and would abort the process if that were ending.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
