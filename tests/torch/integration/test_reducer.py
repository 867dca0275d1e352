"""The reducer in real processes: the gradients of DDP and of one process with the whole batch, always the same bits.

At least three ranks everywhere: with two, a + b = b + a hides every change in the order of addition.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evertrain.torch import backends, groups
from evertrain.torch.default_group import install_default, uninstall_default
from evertrain.torch.interrupt import Interrupted
from evertrain.torch.reducer import Reducer, Replica
from tests.torch.teams import Member, team

SMALL = 4096  # bytes: many buckets
BATCH = 8
LIMIT = 200.0


class Net(nn.Module):
    """Tied weights, a frozen layer, a layer that only some ranks use and one that nobody uses, BatchNorm."""

    def __init__(self, norm: bool = True, style: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.sometimes = nn.Linear(32, 32)
        self.never = nn.Linear(32, 32)
        self.middle = nn.Linear(32, 32)
        self.last = nn.Linear(32, 32)
        self.last.weight = self.middle.weight
        self.style = style

    def forward(self, x: torch.Tensor, sometimes: bool = True) -> torch.Tensor:
        x = torch.relu(self.frozen(self.norm(self.first(x))))
        if sometimes and self.style == "reentrant":
            x = x + checkpoint(self.sometimes, x, use_reentrant=True)
        elif sometimes:
            x = x + self.sometimes(x)
        if self.style == "checkpoint":
            return self.last(checkpoint(lambda y: torch.relu(self.middle(y)), x, use_reentrant=False))
        return self.last(torch.relu(self.middle(x)))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def digest(*tensors: torch.Tensor | None) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(b"none" if tensor is None else tensor.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


def come(me: Member, name: str) -> None:
    Path(me.directory, f"{name}-{me.rank}").touch()


def wait_for_all(me: Member, name: str) -> None:
    while not all(Path(me.directory, f"{name}-{rank}").exists() for rank in range(me.size)):
        time.sleep(0.002)


def meet(me: Member, name: str) -> None:
    """Nobody leaves a group in which another one may still be in a collective."""
    come(me, name)
    wait_for_all(me, name)


class Trainer:
    def __init__(self, me: Member, faults: Callable[[str], None] | None = None, **options: Any) -> None:
        torch.manual_seed(7)
        self.me = me
        self.net = Net(**options)
        self.reducer = Reducer(self.net, bucket_bytes=SMALL, faults=faults)
        self.model = Replica(self.net, self.reducer)
        self.optimizer = torch.optim.Adam([p for p in self.net.parameters() if p.requires_grad], lr=0.01)
        self.step = 0

    def join(self, generation: int) -> None:
        me = self.me
        self.group = groups.build(
            generation, me.rank, me.size, me.store(generation), backends.pick("cpu"), LIMIT, threading.Event()
        )
        self.reducer.attach(self.group)

    def train(self, steps: int, sometimes: Callable[[int, int], bool] = lambda step, rank: True) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(batch(self.step, self.me.rank), sometimes(self.step, self.me.rank)).square().mean().backward()
            self.optimizer.step()
            self.step += 1

    def digest(self) -> str:
        return digest(*self.net.parameters(), *self.net.buffers())


# --- the right gradients ---------------------------------------------------------------------------------------------


def distance(net: nn.Module, expected: list[torch.Tensor | None]) -> float:
    pairs = zip(net.parameters(), expected, strict=True)
    return max((p.grad - e).abs().max().item() for p, e in pairs if e is not None)


def compare_with_ddp(me: Member) -> dict[str, float]:
    ours = Trainer(me)
    ours.join(0)
    install_default(ours.group)
    torch.manual_seed(7)
    theirs = Net()
    ddp = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True, broadcast_buffers=False)
    for i in range(3):
        use = (me.rank + i) % 2 == 0
        for model, net in ((ours.model, ours.net), (ddp, theirs)):
            net.zero_grad()
            model(batch(i, me.rank), use).square().mean().backward()
    worst = 0.0
    for (name, a), b in zip(ours.net.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            worst = max(worst, (a.grad - b.grad).abs().max().item())
    assert ours.net.never.weight.grad is None
    assert ours.net.sometimes.weight.grad is not None
    assert ours.net.frozen.weight.grad is None
    # One process with everybody's batch, without the norm, whose statistics would differ.
    del ddp
    uninstall_default()
    meet(me, "compared")
    ours.group.stop()
    plain = Trainer(me, norm=False)
    plain.join(1)
    plain.model(batch(5, me.rank)).square().mean().backward()
    torch.manual_seed(7)
    alone = Net(norm=False)
    alone(torch.cat([batch(5, rank) for rank in range(me.size)])).square().mean().backward()
    whole = distance(plain.net, [p.grad for p in alone.parameters()])
    meet(me, "compared with one")
    return {"ddp": worst, "alone": whole, "buckets": len(plain.reducer.buckets)}


def accumulate(me: Member) -> dict[str, float]:
    """Three passes of which the last one is synchronized equal one pass over all three batches, in several ways."""
    seen = {}
    reference = Trainer(me, norm=False)
    reference.join(10)
    sum(reference.model(batch(i, me.rank), i == 0).square().mean() for i in range(3)).backward()
    expected = [None if p.grad is None else p.grad.clone() for p in reference.net.parameters()]
    for name, context in (("no_sync", reference.model.no_sync), ("every pass", contextlib.nullcontext)):
        # Gradients set to zero keep their place in the bucket, gradients set to None lose it.
        for to_none in (True, False):
            reference.optimizer.zero_grad(set_to_none=to_none)
            for i in range(3):
                with context() if i < 2 else contextlib.nullcontext():
                    reference.model(batch(i, me.rank), i == 0).square().mean().backward()
            seen[f"{name}, set to none {to_none}"] = distance(reference.net, expected)
    # Two losses of one forward, one backward each.
    reference.optimizer.zero_grad()
    out = reference.model(batch(0, me.rank))
    out.square().mean().backward(retain_graph=True)
    out.sum().backward()
    two = [None if p.grad is None else p.grad.clone() for p in reference.net.parameters()]
    reference.optimizer.zero_grad()
    out = reference.model(batch(0, me.rank))
    (out.square().mean() + out.sum()).backward()
    seen["two losses"] = distance(reference.net, two)
    # autograd.grad leaves the parameters alone and must not communicate.
    before = [digest(p.grad) for p in reference.net.parameters()]
    if me.rank == 0:
        x = batch(0, 0).requires_grad_()
        torch.autograd.grad(reference.model(x).sum(), x)
    assert before == [digest(p.grad) for p in reference.net.parameters()]
    meet(me, "accumulated")
    return seen


def styles(me: Member) -> dict[str, str]:
    """Activation checkpointing, create_graph, a scaler and clipping give what plain training gives."""
    seen = {}
    for generation, style in enumerate(("", "checkpoint", "reentrant"), start=20):
        trainer = Trainer(me, norm=False, style=style)
        trainer.join(generation)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for step in range(3):
            trainer.optimizer.zero_grad()
            loss = trainer.model(batch(step, me.rank)).square().mean()
            scaler.scale(loss).backward(create_graph=style == "" and step == 1)
            scaler.unscale_(trainer.optimizer)
            nn.utils.clip_grad_norm_(trainer.net.parameters(), 0.1)
            scaler.step(trainer.optimizer)
            scaler.update()
        meet(me, f"style-{generation}")
        trainer.group.stop()
        seen[style or "plain"] = trainer.digest()
        if style == "":
            trainer = Trainer(me, norm=False)
            trainer.join(generation + 100)
            for step in range(3):
                trainer.optimizer.zero_grad()
                trainer.model(batch(step, me.rank)).square().mean().backward()
                nn.utils.clip_grad_norm_(trainer.net.parameters(), 0.1)
                trainer.optimizer.step()
            meet(me, "without scaler")
            seen["without scaler"] = trainer.digest()
    return seen


def test_gradients_equal_those_of_ddp_and_of_one_process(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 3) as ranks:
        for seen in ranks.call(compare_with_ddp):
            assert seen["ddp"] < 1e-6
            assert seen["alone"] < 1e-6
            assert seen["buckets"] > 3
        for seen in ranks.call(accumulate):
            assert len(seen) == 5
            assert max(seen.values()) < 1e-5, seen
        seen = ranks.call(styles)
        assert seen[0] == seen[1] == seen[2]
        # Powers of two as scale: the bits are those without a scaler. Recomputing gives the same bits, too.
        assert len(set(seen[0].values())) == 1, seen[0]


# --- the same bits ---------------------------------------------------------------------------------------------------


def run_undisturbed(me: Member, generation: int) -> list[str]:
    trainer = Trainer(me)
    trainer.join(generation)
    digests = []
    for _ in range(6):
        trainer.train(1, lambda step, rank: step % 3 != 0 or rank == 1)
        digests.append(trainer.digest())
    meet(me, f"done-{generation}")
    trainer.group.stop()
    return digests


class Fall(Exception):
    pass


def run_with_falls(me: Member, generation: int, phase: str, victim: int) -> list[str]:
    """In steps 2 and 4 the victim leaves backward half-way; all get a new generation and do the step again."""
    falls = {2, 4}
    begun = f"begun-{generation}"

    def fall(where: str) -> None:
        if where == phase and me.rank == victim and trainer.step in falls:
            falls.discard(trainer.step)
            wait_for_all(me, f"{begun}-{trainer.step}")  # a rank still in the step before would do that one again
            raise Fall

    def tell(generation: int) -> Path:
        """What the controller does in a job: who is in a collective of gloo does not always notice by itself."""
        return Path(me.directory) / f"fall-{generation}"

    def stop_when_told(group: groups.GuardedGroup, over: threading.Event) -> None:
        while not tell(group.generation).exists() and not over.wait(0.002):
            pass
        if not over.is_set():
            group.stop()

    trainer = Trainer(me, faults=fall)
    digests = []
    over = threading.Event()

    def join() -> None:
        trainer.join(generation)
        threading.Thread(target=stop_when_told, args=(trainer.group, over), daemon=True).start()

    join()
    while trainer.step < 6:
        come(me, f"{begun}-{trainer.step}")
        state = [b.clone() for b in trainer.net.buffers()]
        try:
            trainer.train(1, lambda step, rank: step % 3 != 0 or rank == 1)
        except (Fall, Interrupted):
            tell(generation).touch()
            trainer.group.stop()
            generation += 1
            for buffer, value in zip(trainer.net.buffers(), state, strict=True):
                buffer.copy_(value)
            join()
            continue
        digests.append(trainer.digest())
    meet(me, f"done-{generation}")
    over.set()
    trainer.group.stop()
    assert not falls or me.rank != victim
    return digests


def run_without_reattaching(me: Member, generation: int, at: int) -> list[str]:
    trainer = Trainer(me)
    trainer.join(generation)
    digests = []
    for step in range(6):
        if step == at:
            meet(me, f"left-{generation}")
            trainer.group.stop()
            trainer.join(generation + 1)
        trainer.train(1, lambda step, rank: step % 3 != 0 or rank == 1)
        digests.append(trainer.digest())
    meet(me, f"done-{generation}")
    trainer.group.stop()
    return digests


def test_bits_do_not_depend_on_generations_or_interruptions(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 4) as ranks:
        first = ranks.call(run_undisturbed, 0)
        # Weights and BatchNorm's buffers are the same on all ranks after every step.
        assert first[0] == first[1] == first[2] == first[3]
        assert len(set(first[0])) == 6
        assert ranks.call(run_undisturbed, 1) == first
        assert ranks.call(run_without_reattaching, 10, 3) == first
        generation = 20
        for phase in ("backward", "allreduce"):
            for victim in (0, 3):
                assert ranks.call(run_with_falls, generation, phase, victim) == first, (phase, victim)
                generation += 10


# --- one process -----------------------------------------------------------------------------------------------------


def test_without_a_group_gradients_are_untouched() -> None:
    torch.manual_seed(1)
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    fired: list[str] = []
    reducer = Reducer(net, faults=fired.append)
    reducer.attach(None)
    model = Replica(net, reducer, faults=fired.append)
    model(batch(0, 0)).sum().backward()
    other(batch(0, 0)).sum().backward()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert digest(a.grad) == digest(b.grad)
    assert fired == ["forward", "backward"]


def test_a_replica_looks_like_the_model() -> None:
    net = Net()
    net.note = "mine"
    model = Replica(net, Reducer(net))
    assert model.note == "mine"
    assert model.first is net.first
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    model.eval()
    assert not net.norm.training
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018
    model.load_state_dict(net.state_dict())


def test_the_layout_follows_from_the_model() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).double(), nn.Linear(64, 64), nn.Linear(64, 64))
    layout = [(b.dtype, b.members, b.numel) for b in Reducer(net, bucket_bytes=32 * 1024).buckets]
    assert layout == [
        (torch.float32, [7, 6, 5, 4], 2 * (64 + 64 * 64)),
        (torch.float64, [3, 2], 64 + 64 * 64),
        (torch.float32, [1, 0], 64 + 64 * 64),
    ]
    # The first bucket is on its way while the others still fill: the last layer's bias waits for its weight.
    assert [b.members for b in Reducer(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))).buckets] == [
        [7, 6],
        [5, 4, 3, 2, 1, 0],
    ]
    assert [p for b in Reducer(net).buckets for p in b.members] == [7, 6, 5, 4, 1, 0, 3, 2]


def test_a_model_without_real_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        Reducer(nn.Linear(2, 2, device="meta"))


def refuse(me: Member) -> list[str]:
    """What can't be reduced is said, in the same way on every rank."""
    texts = []
    group = groups.build(0, me.rank, me.size, me.store(0), backends.pick("cpu"), LIMIT, threading.Event())
    embedding = nn.Embedding(10, 4, sparse=True)
    Reducer(embedding).attach(group)
    frozen = Net().train()
    reducer = Reducer(frozen)
    reducer.attach(group)
    frozen.frozen.requires_grad_(True)
    for loss in (embedding(torch.tensor([1])).sum(), frozen(batch(0, me.rank)).sum()):
        try:
            loss.backward()
        except RuntimeError as error:
            texts.append(str(error))
    return texts


@pytest.mark.matrix
def test_what_cannot_be_reduced_is_refused(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 3) as ranks:
        for sparse, thawed in ranks.call(refuse):
            assert "'weight' has a sparse gradient" in sparse
            assert "'frozen.weight' did not require gradients" in thawed
