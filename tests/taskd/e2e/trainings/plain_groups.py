"""A training on torch's own groups, with DDP and a DataLoader; of MindIO it has what pauses it, of TaskD the worker."""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import gate  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from mindio_ttp import framework_ttp as tft
from taskd.api import destroy_taskd_worker, init_taskd_worker, start_taskd_worker


@tft.tft_exception_handler
def train(model: nn.Module, pair: dist.ProcessGroup | None, options: argparse.Namespace) -> None:
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    seeds = [torch.Generator().manual_seed(step * 10 + rank) for step in range(1, options.steps + 1)]
    batches = DataLoader([torch.randn(6, 16, generator=seed) for seed in seeds], batch_size=None)
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach(), group=pair)
        tft.tft_start_updating_os()
        optimizer.step()
        tft.tft_end_updating_os(step)
        with open(Path(options.dir) / f"steps.{rank}", "a") as file:
            file.write(json.dumps([step, loss.item()]) + "\n")
        tft.tft_pause_train(step)
        time.sleep(options.pace)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pace", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with open(Path(options.dir) / f"events.{rank}", "a") as file:
        file.write(f"begun {os.getpid()}\n")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    tft.tft_init_processor(rank, size, False, False, "", True, True, True)
    tft.tft_start_processor(os.environ["MASTER_ADDR"], int(os.environ["TTP_PORT"]))
    tft.tft_set_optimizer_replica(rank, [{"rank_list": list(range(size)), "replica_cnt": size, "replica_shift": 0}])
    assert init_taskd_worker(rank) and start_taskd_worker()
    train(model, pairs[rank // 2], options)
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    result = {"rank": rank, "step": options.steps, "weights": hashlib.sha256(weights).hexdigest()}
    print(json.dumps(result) + "\n", end="", flush=True)  # one write, so that lines of several ranks can't mix
    dist.barrier()
    destroy_taskd_worker()


if __name__ == "__main__":
    main()
