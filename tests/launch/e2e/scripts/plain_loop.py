"""An ordinary loop with everything that could go wrong when a rank does the work of another: dropout, batch norm, a
scheduler that builds on its last value, clipping, gradients cleared at the beginning, a collective in the body.

At its end each rank prints what went into every step and what came out. With --slow-when-smaller the steps of a smaller
job take a while, so that a replacement finds it still training."""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from evertrain.torch import Training


class Numbers(Dataset):
    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> dict:
        # Augmentation: random, but the same wherever and whenever this sample is read in this epoch.
        noise = 0.1 * torch.randn(16)
        return {"x": torch.sin(torch.arange(16) * (index + 1) / 7) + noise, "y": torch.tensor(index % 5), "id": index}


class Record:
    """What went into every step; rolls back with the model."""

    def __init__(self) -> None:
        self.lines: list = []

    def state_dict(self) -> dict:
        return {"lines": list(self.lines)}

    def load_state_dict(self, state: dict) -> None:
        self.lines = list(state["lines"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--slow-when-smaller", type=float, default=0.0)
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(7)
    first = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(*first, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5, enabled=args.amp)
    dataset, record = Numbers(), Record()
    sampler = DistributedSampler(dataset, world_size, rank, seed=3, drop_last=True)
    loader = DataLoader(dataset, 8, sampler=sampler, num_workers=args.workers, drop_last=True)
    training = Training(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, scaler=scaler, extra={"record": record}
    )

    @training.resilient
    def train() -> None:
        for step, batches in training.steps(loader, until=args.steps, accumulate=args.accumulate):
            optimizer.zero_grad()
            ids, total = [], torch.zeros(())
            for batch in training.micro(batches):
                loss = nn.functional.cross_entropy(training.model(batch["x"]), batch["y"]) / args.accumulate
                scaler.scale(loss).backward()
                ids.append(batch["id"])
                total += loss.detach()
            everywhere = total.clone()
            dist.all_reduce(everywhere)
            consumed, losses = training.gather(torch.cat(ids)), training.gather(total)
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if args.slow_when_smaller and dist.get_world_size() < world_size and step > 10:
                time.sleep(args.slow_when_smaller)
            if training.completes_step:
                assert consumed is not None and losses is not None
                lr = scheduler.get_last_lr()[0]
                record.lines.append([step, consumed.tolist(), losses.tolist(), norm.item(), lr, scaler.get_scale()])

    train()
    weights = [value.double().abs().sum().item() for value in model.state_dict().values()]
    print(json.dumps({"rank": rank, "steps": record.lines, "weights": weights}) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
