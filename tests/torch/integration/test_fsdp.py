"""The update of a sharded model: made by all or by none, late if need be; and what fully_shard can't be used with."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from evertrain.mindio.protocol import STATE
from evertrain.torch import codec
from evertrain.torch.errors import UsageError
from evertrain.torch.fsdp import FullySharded, StepAside, is_fully_sharded
from evertrain.torch.interrupt import Interrupted
from evertrain.torch.state import TrainingState


class Broken:
    """A group whose other members don't come."""

    def size(self) -> int:
        return 4

    def rank(self) -> int:
        return 0

    def allreduce(self, *_: Any) -> Broken:
        return self

    def wait(self) -> None:
        raise Interrupted("a peer was lost")


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one rank: FSDP2 communicates nothing, but everything else is as always."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()


class Sharded:
    """A model, its optimizer and its shard, always with the same first values."""

    def __init__(self, mesh: Any, kind: Any = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
        fully_shard(self.model[0], mesh=mesh, **options)
        fully_shard(self.model, mesh=mesh, **options)
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.aside = StepAside(self.model)
        self.aside.prepare()
        self.shard = FullySharded(self.model, [self.optimizer], self.aside)

        def begin(*_: Any) -> None:
            if not self.shard.catching_up:
                self.shard.begin(self.step)

        self.optimizer.register_step_pre_hook(begin)
        self.optimizer.register_step_post_hook(lambda *_: self.shard.finish())
        self.step = 0

    def backward(self) -> None:
        torch.manual_seed(self.step)
        self.model(torch.randn(4, 5)).square().mean().backward()

    def train(self, until: int) -> str:
        while self.step < until:
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return self.digest()

    def digest(self) -> str:
        return codec.digest(self.shard.core())


def test_an_update_that_others_made_is_made_late(mesh: Any) -> None:
    expected = Sharded(mesh).train(4)
    late = Sharded(mesh)
    before = late.train(3)
    late.aside.attach(Broken())
    late.backward()
    with pytest.raises(Interrupted):
        late.optimizer.step()
    assert late.shard.abandon(3) == {STATE: 3, "shard:0": 3}
    late.aside.attach(None)
    assert late.digest() == before, "the old step is still there"
    assert late.shard.others() == [("shard:0", 4)]
    assert not late.shard.switch("shard:0", 5)
    assert late.shard.switch("shard:0", 4)
    assert late.digest() == expected
    assert late.shard.others() == []
    late.step = 4
    assert late.train(6) == Sharded(mesh).train(6)


def test_what_an_update_left_half_way_is_worth(mesh: Any) -> None:
    run = Sharded(mesh)
    run.train(2)
    run.backward()
    run.shard.begin(2)
    assert run.shard.abandon(2) == {}, "the optimizer may have changed some of the weights"
    run.shard.finish()
    assert run.shard.abandon(2) == {"shard:0": 3}, "the shard is whole, the rest of the state is not"


def test_a_step_left_half_way_leaves_nothing_behind(mesh: Any) -> None:
    expected = Sharded(mesh).train(3)
    run = Sharded(mesh)
    run.train(2)

    def fail(_: torch.Tensor) -> None:
        raise Interrupted("in backward")

    hook = run.model[2].register_forward_hook(lambda *_: _[2].register_hook(fail) and None)
    with pytest.raises(Interrupted):
        run.backward()
    hook.remove()
    with run.aside.no_sync():
        run.aside.attach(None)
    run.aside.attach(None)
    assert run.train(3) == expected


def test_gradients_that_are_accumulated_in_another_precision_are_forgotten(mesh: Any) -> None:
    """Those are kept beside the parameters, and torch's own way back after an error leaves them."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = Sharded(mesh, mp_policy=policy).train(3)
    run = Sharded(mesh, mp_policy=policy)
    run.train(2)
    with run.aside.no_sync():
        run.backward()
    run.aside.attach(None)
    assert run.train(3) == expected


def test_a_shard_goes_from_rank_to_rank(mesh: Any) -> None:
    source, target = Sharded(mesh), Sharded(mesh)
    source.train(3)
    packed = codec.pack(source.shard.tree())
    tree = codec.unpack(packed.skeleton, [tensor.clone() for tensor in packed.tensors])
    assert codec.digest(target.shard.core_of(tree)) == source.digest(), "it can be judged before it is loaded"
    target.shard.load(tree)
    assert target.digest() == source.digest()
    source.step = target.step = 3
    assert target.train(5) == source.train(5)


def test_what_is_not_supported_is_said(mesh: Any) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not is_fully_sharded(copy.deepcopy(plain))
    fully_shard(plain[0], mesh=mesh)
    with pytest.raises(UsageError, match="not the model itself"):
        is_fully_sharded(plain)
    fully_shard(plain, mesh=mesh)
    assert is_fully_sharded(plain)
    two = [torch.optim.SGD([p], lr=0.1) for p in plain.parameters()]
    with pytest.raises(UsageError, match="one optimizer"):
        FullySharded(plain, two, StepAside(plain))


def test_an_interrupt_anywhere_in_a_step_leaves_nothing_behind(mesh: Any) -> None:
    """A signal handler that raises, as the interrupter's does, at places all over forward and backward."""
    expected = Sharded(mesh).train(6)
    run = Sharded(mesh)
    run.train(3)
    armed = False

    def on_signal(*_: Any) -> None:
        if armed:
            raise Interrupted("anywhere")

    previous = signal.signal(signal.SIGALRM, on_signal)
    hit = 0
    try:
        for attempt in range(300):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 0.00002 * (attempt % 150 + 1))
                if attempt % 2:
                    with run.aside.no_sync():
                        run.backward()
                run.backward()
                armed = False
            except Interrupted:
                hit += 1
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            run.aside.attach(None)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert hit > 30, "the signals came too late to prove anything"
    assert run.train(6) == expected


class OtherRank:
    """A group in which rank 0 has other buffers than this rank."""

    def __init__(self, theirs: nn.Module) -> None:
        self._theirs = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in theirs.buffers()])

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> OtherRank:
        assert options.rootRank == 0
        tensors[0].copy_(self._theirs)
        return self

    def allreduce(self, *_: Any) -> OtherRank:
        return self

    def wait(self) -> None:
        pass


def test_all_ranks_have_the_same_buffers_after_a_step(mesh: Any) -> None:
    mine, theirs = (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))
    theirs(torch.randn(8, 3))
    fully_shard(mine, mesh=mesh)
    aside = StepAside(mine)
    aside.prepare()
    aside.attach(OtherRank(theirs))
    FullySharded(mine, [torch.optim.SGD(mine.parameters())], aside).begin(0)
    for buffer, other in zip(mine.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(buffer, other)


def test_a_late_update_is_made_with_the_learning_rate_that_the_loop_has_set(mesh: Any) -> None:
    """The loop sets it before the update; going back to the step's beginning takes it back as well."""

    def train(run: Sharded, until: int) -> str:
        while run.step < until:
            run.optimizer.param_groups[0]["lr"] = 0.1 / (run.step + 1)
            run.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.step += 1
        return run.digest()

    expected = train(Sharded(mesh), 4)
    late = Sharded(mesh)
    state = TrainingState(late.model, late.optimizer)
    state.shard(late.shard)
    train(late, 3)
    state.step = 3
    state.snapshot()
    late.aside.attach(Broken())
    with pytest.raises(Interrupted):
        train(late, 4)
    state.abandon_update()
    late.aside.attach(None)
    assert late.optimizer.param_groups[0]["lr"] == 0.1 / 3
    assert state.switch("shard:0", 4)
    assert late.digest() == expected
    assert late.optimizer.param_groups[0]["lr"] == 0.1 / 3, "the rest of the state is still that of the old step"


def test_a_second_update_in_one_step_is_refused(mesh: Any) -> None:
    run = Sharded(mesh)
    run.train(1)
    run.backward()
    run.optimizer.step()
    with pytest.raises(UsageError, match="once in each step"):
        run.optimizer.step()


def test_an_optimizer_that_extends_another_has_one_update(mesh: Any) -> None:
    """Both its own step() and that of its base class call the hooks."""

    class Longer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            assert run.shard.abandon(run.step) == {}, "half-way through"
            run.shard._depth = 1  # as it was before the question

    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # torch gives a class its hooks when it is first used
    run = Sharded(mesh, Longer)
    run.backward()
    run.optimizer.step()
    assert run.shard.abandon(0) == {"shard:0": 1}
