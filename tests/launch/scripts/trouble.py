"""A tiny training script with a mistake of the user in it, chosen by its argument."""

import contextlib
import os
import resource
import runpy
import socket
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evertrain.mindio import framing
from evertrain.torch import Training

trouble, *rest = sys.argv[1:]
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

if trouble == "full-disk":
    # Every file that grows beyond 100 kB fails, as on a full disk; the checkpoint is larger.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    sys.argv = rest
    runpy.run_path(rest[0], run_name="__main__")
    sys.exit()

width = 8
if trouble == "own-group":
    # What a script for torchrun does: it makes its group first thing and agrees on something with it.
    torch.distributed.init_process_group("gloo")
    told = [rank + 8]
    torch.distributed.broadcast_object_list(told, src=0)
    width = told[0]
    torch.distributed.barrier()
if trouble == "different-models" and rank == 2:
    width = 9
device = "meta" if trouble == "meta" else "cpu"
torch.manual_seed(rank if trouble == "different-seeds" else 1)
model = nn.Sequential(nn.Linear(4, width, device=device), nn.Linear(width, 1, device=device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.arange(64 * 4, dtype=torch.float32).view(64, 4) / 256)
sampler = None if trouble == "no-sampler" else DistributedSampler(data, world_size, rank)
loader = DataLoader(data, 4, sampler=sampler)
if trouble == "generator":
    loader = (batch for batch in loader)
if trouble == "ddp":
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
if trouble == "before-training" and rank == 1:
    raise RuntimeError("the data set is not where it should be")
if trouble == "bad-directory":
    rest = ["/dev/null"]
extra = {}
if trouble == "bad-extra":
    extra = {"thing": nn.Identity(), "function": lambda: None}
training = Training(
    model=model, optimizer=optimizer, sampler=sampler, extra=extra,
    checkpoint_dir=rest[0] if rest and trouble != "behind" else None,
    checkpoint_every=5 if rest and trouble != "behind" else 0,
)  # fmt: skip


def lose_everything(*_):
    marker = f"{rest[0]}/lost-{rank}"
    if training.step == 12 and not os.path.exists(marker):
        open(marker, "w").close()
        training._checkpoints.wait()  # that of step 10 is on the disk, however slow the disk is
        torch.distributed.barrier()  # everybody is in the update, where nobody can be sent back from
        raise RuntimeError("UCE ERROR: all state is gone")


if trouble == "lost-everywhere":
    optimizer.register_step_pre_hook(lose_everything)


def meet(name, reads):
    """Two ranks wait for each other, without a word to the third: one reads, the other writes."""
    pipe = f"{rest[0]}/{name}.pipe"
    with contextlib.suppress(FileExistsError):
        os.mkfifo(pipe)
    with training.slow("another rank"), open(pipe, "rb" if reads else "wb"):
        pass


def knock(data: bytes) -> bytes:
    """Say something to the controller as a stranger would; returns its answer."""
    host, _, port = os.environ["EVERTRAIN_CONTROLLER"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := link.recv(65536):
            answer += piece
        return answer


@training.resilient
def train():
    for step, (batch,) in training.steps(loader, until=30):
        if trouble == "strangers" and rank == 0 and step == 5:
            from evertrain.mindio import protocol

            token = "0" * len(os.environ["EVERTRAIN_TOKEN"])
            knock(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            knock(os.urandom(4096))
            knock(b"\xff\xff\xff\xff" + b"x" * 100)
            hello = protocol.Hello(version=protocol.VERSION, token=token, role="rank", rank=1)
            print("answer:", protocol.FrameReader().feed(knock(framing.FrameWriter().frame(hello))), flush=True)
        if trouble == "slow-step" and rank == 1 and step == 8:
            with training.slow("evaluate"):
                time.sleep(3)
        if trouble == "busy-step" and rank == 1 and step == 8:
            end = time.monotonic() + 3  # an evaluation that nobody announced: it computes
            while time.monotonic() < end:
                torch.randn(64, 64) @ torch.randn(64, 64)
        if trouble == "own-group":
            shared = torch.tensor([float(step + rank)])
            torch.distributed.all_reduce(shared)
            assert shared.item() == 3 * step + 3, shared
        if trouble == "behind" and rank > 0 and step == 9 and not os.path.exists(f"{rest[0]}/met"):
            if rank == 1:
                meet("asleep", reads=True)  # rank 0 is where it has to be
            meet("met", reads=rank == 1)  # nobody fails before both have step 8 behind them
            open(f"{rest[0]}/met", "w").close()
        loss = training.model(batch).pow(2).mean()
        loss.backward()
        if trouble == "behind" and rank == 0 and step == 8 and not os.path.exists(f"{rest[0]}/behind"):
            # The others have its gradients and go on; it is a step behind them until somebody interrupts it.
            open(f"{rest[0]}/behind", "w").close()
            meet("asleep", reads=False)
            with training.slow("a look at something"):
                time.sleep(60)
        optimizer.step()
        optimizer.zero_grad()
        if trouble == "endless" and step == 10:
            time.sleep(0.01)


@training.resilient
def train_without_steps():
    for (batch,) in loader:
        training.model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if trouble == "not-resilient":
    train.__wrapped__()
if trouble == "not-resilient-no-steps":
    train_without_steps.__wrapped__()
if trouble == "no-steps":
    train_without_steps()
if trouble == "evaluates-outside":
    with torch.no_grad():
        training.model(data[:4][0])
    training.model.eval()(data[:4][0])
    training.model.train()
if trouble == "never-called":
    sys.exit()
train()
if trouble == "evaluates-outside":
    training.model.eval()(data[:4][0])
if trouble == "own-group":
    torch.distributed.destroy_process_group()
print("weights", round(sum(p.abs().sum().item() for p in model.parameters()), 6), flush=True)
