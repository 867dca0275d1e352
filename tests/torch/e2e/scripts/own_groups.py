"""A training script with process groups of its own, made in all the ways that scripts make them.

The even and the odd ranks each have a group from before training, and so has a device mesh; one group is made at each
call of the training function, and one only at its first. All of them take part in every step, so that a group that is
not connected to the right peers shows in the hash at the end.
"""

import hashlib
import json
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evertrain.torch import Training

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
groups = [dist.new_group(list(range(first, world_size, 2))) for first in (0, 1)]
half = groups[rank % 2]
mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("outer", "inner"))
dist.all_reduce(size := torch.tensor([4]), group=half)  # a replacement reads this from its predecessor's notes
first_calls_group = []

torch.manual_seed(1)
model = nn.Linear(int(size.item()), 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.arange(256.0).view(32, 8) / 256)
sampler = DistributedSampler(data, world_size, rank, drop_last=True)
training = Training(model=model, optimizer=optimizer, sampler=sampler)
loader = DataLoader(data, 2, sampler=sampler)


@training.resilient
def train() -> None:
    neighbours = dist.new_group([0, world_size - 1])
    if not first_calls_group:
        first_calls_group.append(dist.new_group(list(range(1, world_size))))
    for _, (batch,) in training.steps(loader, until=9):
        loss = training.model(batch).square().mean()
        shares = loss.detach().repeat(4)
        dist.all_reduce(shares[:1], group=half)
        dist.broadcast(shares[1:2], src=dist.get_global_rank(mesh.get_group("inner"), 0), group=mesh.get_group("inner"))
        shares[2:] = functional.all_reduce(shares[2:], "sum", mesh["outer"])  # finds its group by name, from C++
        if rank in (0, world_size - 1):
            dist.all_reduce(shares[3:], group=neighbours)
        if rank:
            dist.all_reduce(shares[3:], group=first_calls_group[0])
        (loss * (1 + shares.mean())).backward()
        optimizer.step()
        optimizer.zero_grad()


train()
sha = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(json.dumps({"rank": rank, "step": training.step, "sha256": sha, "samples_sha256": ""}) + "\n", end="", flush=True)
