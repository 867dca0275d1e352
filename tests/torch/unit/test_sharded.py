"""The sharded optimizer among ranks that are threads: the bits of an unsharded one, and updates that are taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evertrain.torch import codec
from evertrain.torch.errors import StateError, UsageError
from evertrain.torch.sharded import Sharding, assemble

WORLD = 4


class Broken(Exception):
    """What a guarded group raises when a peer is gone."""


class Meeting:
    """A process group between threads. `fails(rank, number)` says who does not get out of its n-th gathering."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fails: Callable[[int, int], bool] = lambda rank, number: False
        self.barrier = threading.Barrier(size, timeout=20)
        self.inputs: list[Any] = [None] * size

    def of(self, rank: int) -> Seat:
        return Seat(self, rank)


class Seat:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.number = meeting, rank, 0

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Seat:
        self.meeting.inputs[self.rank] = inputs[0].clone()
        self.meeting.barrier.wait()
        for output, given in zip(outputs[0], self.meeting.inputs, strict=True):
            output.copy_(given)
        self.meeting.barrier.wait()
        return self

    def wait(self) -> None:
        self.number += 1
        if self.meeting.fails(self.rank, self.number - 1):
            raise Broken


class Net(nn.Module):
    """Sizes that don't divide well, two orders of memory, a dtype of its own, and a weight without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(5)
        self.a = nn.Parameter(torch.randn(7, 5, generator=make))
        self.conv = nn.Parameter(torch.randn(3, 2, 3, 3, generator=make).to(memory_format=torch.channels_last))
        self.b = nn.Parameter(torch.randn(11, generator=make))
        self.wide = nn.Parameter(torch.randn(13, generator=make, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(3, generator=make))
        self.one = nn.Parameter(torch.randn((), generator=make))

    def gradients(self, step: int) -> None:
        make = torch.Generator().manual_seed(100 + step)
        for name, param in self.named_parameters():
            if name != "unused":
                param.grad = torch.randn(param.shape, generator=make, dtype=param.dtype)


def groups_of(net: Net) -> list[dict[str, Any]]:
    return [{"params": [net.a, net.conv, net.wide], "weight_decay": 0.1}, {"params": [net.b, net.unused, net.one]}]


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}


class Rank:
    def __init__(self, rank: int, meeting: Meeting, copies: int, kind: str) -> None:
        self.net = Net()
        self.optimizer = MAKERS[kind](groups_of(self.net))
        self.sharding = Sharding([self.optimizer], rank, meeting.size, copies)
        self.sharding.attach(meeting.of(rank))
        self.step = 0
        self.optimizer.register_step_pre_hook(lambda *_: self.sharding.begin(self.step))
        self.optimizer.register_step_post_hook(lambda *_: self.sharding.finish())

    def train(self, until: int) -> None:
        while self.step < until:
            self.net.gradients(self.step)
            self.optimizer.step()
            self.step += 1

    def weights(self) -> str:
        return codec.digest(codec.pack(self.net.state_dict()))

    def shard(self) -> str:
        return codec.digest(self.sharding.core())


def team(copies: int, kind: str = "AdamW", world: int = WORLD) -> tuple[Meeting, list[Rank]]:
    meeting = Meeting(world)
    return meeting, [Rank(rank, meeting, copies, kind) for rank in range(world)]


def at_once(ranks: list[Rank], what: Callable[[Rank], Any]) -> list[Any]:
    """Results or exceptions, by rank."""
    results: list[Any] = [None] * len(ranks)

    def run(index: int) -> None:
        try:
            results[index] = what(ranks[index])
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def plain(kind: str, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    optimizer = MAKERS[kind](groups_of(net))
    for step in range(steps):
        net.gradients(step)
        optimizer.step()
    return net, optimizer


def assert_close(sharded: Any, whole: Any) -> None:
    """Vector instructions treat the ends of a tensor differently, so the last bits may not be those without shards."""
    assert sharded.keys() == whole.keys()
    for key, value in whole.items():
        if isinstance(value, dict):
            assert_close(sharded[key], value)
        elif isinstance(value, torch.Tensor):
            assert sharded[key].shape == value.shape, key
            torch.testing.assert_close(sharded[key], value, rtol=1e-6, atol=1e-7)
        else:
            assert sharded[key] == value


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_the_results_are_those_of_the_unsharded_optimizer(kind: str, copies: int) -> None:
    _, ranks = team(copies, kind)
    assert at_once(ranks, lambda rank: rank.train(5)) == [None] * WORLD
    net, optimizer = plain(kind, 5)
    assert_close(ranks[0].net.state_dict(), net.state_dict())
    assert len({rank.weights() for rank in ranks}) == 1
    k = WORLD // copies
    for shard in range(k):
        assert len({rank.shard() for rank in ranks[shard::k]}) == 1, "copies of a shard are the same bits"
    gathered = at_once(ranks, lambda rank: rank.sharding.gather_state_dict())
    for state in gathered:
        assert state["param_groups"] == optimizer.state_dict()["param_groups"]
        assert_close(state["state"], optimizer.state_dict()["state"])
    assert ranks[0].optimizer.state_dict()["state"] == {}, "outside of step() the user's object is as it was"
    sizes = {sum(stop - start for _, _, start, stop in rank.sharding.tree()["slices"]) for rank in ranks}
    assert max(sizes) < sum(p.numel() for p in net.parameters()) / k + WORLD * 4


def test_a_gathering_that_nobody_completes_is_taken_back_everywhere() -> None:
    meeting, ranks = team(2)
    at_once(ranks, lambda rank: rank.train(3))
    before = [(rank.weights(), rank.shard()) for rank in ranks]
    meeting.fails = lambda rank, number: True
    assert all(isinstance(result, Broken) for result in at_once(ranks, lambda rank: rank.train(4)))
    for index, rank in enumerate(ranks):
        assert rank.sharding.abandon(3) == {"state": 3, rank.sharding.name: 3}
        assert (rank.weights(), rank.shard()) == before[index]
        assert rank.sharding.others() == [(rank.sharding.name, 4)]
        rank.sharding.forget()
    meeting.fails = lambda rank, number: False
    at_once(ranks, lambda rank: rank.train(6))
    _, undisturbed = team(2)
    at_once(undisturbed, lambda rank: rank.train(6))
    assert [(r.weights(), r.shard()) for r in ranks] == [(r.weights(), r.shard()) for r in undisturbed]


def test_a_gathering_that_one_rank_completes_can_be_completed_by_all() -> None:
    meeting, ranks = team(2)
    at_once(ranks, lambda rank: rank.train(3))
    meeting.fails = lambda rank, number: rank != 0
    results = at_once(ranks, lambda rank: rank.train(4))
    assert results[0] is None and all(isinstance(result, Broken) for result in results[1:])
    _, undisturbed = team(2)
    at_once(undisturbed, lambda rank: rank.train(4))
    assert ranks[0].weights() == undisturbed[0].weights()
    for rank, other in zip(ranks[1:], undisturbed[1:], strict=True):
        old = (rank.sharding.abandon(3), rank.shard())
        assert rank.sharding.switch(rank.sharding.name, 4)
        assert rank.shard() == other.shard(), "its own shard of the new step was ready"
        assert rank.sharding.others() == [(rank.sharding.name, 3)]
        assert rank.sharding.switch(rank.sharding.name, 3) and rank.shard() == old[1], "and the old one is kept"
        assert not rank.sharding.switch(rank.sharding.name, 7)


def test_an_optimizer_that_fails_half_way_is_put_back() -> None:
    class Fails(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> None:
            super().step()
            if self.fail:
                self.param_groups[0]["lr"] = 99.0
                raise RuntimeError("half-way")

    MAKERS["Fails"] = lambda params: Fails(params, lr=0.1, momentum=0.9)
    try:
        _, ranks = team(2, "Fails")
    finally:
        del MAKERS["Fails"]
    at_once(ranks, lambda rank: rank.train(2))
    before = [(rank.weights(), rank.shard()) for rank in ranks]
    Fails.fail = True
    assert all("half-way" in str(error) for error in at_once(ranks, lambda rank: rank.train(3)))
    for index, rank in enumerate(ranks):
        assert rank.sharding.abandon(2) == {"state": 2, rank.sharding.name: 2}
        assert rank.sharding.others() == []
        assert (rank.weights(), rank.shard()) == before[index]
        assert rank.optimizer.param_groups[0]["lr"] == 0.1
        assert rank.optimizer.param_groups[0]["params"][0] is rank.net.a


def test_what_is_complete_but_between_two_steps() -> None:
    """The script raises after optimizer.step(): the shard is that of the new step, the rest is neither."""
    _, ranks = team(2)
    at_once(ranks, lambda rank: rank.train(3))
    rank = ranks[1]
    rank.step = 2  # as if the third step had not come to its end
    assert rank.sharding.abandon(2) == {"shard:1": 3}
    assert rank.sharding.others() == [("shard:1", 2)]
    untouched = ranks[2]
    assert untouched.sharding.abandon(3) == {"state": 3, "shard:0": 3}, "an update that has not begun is nothing"


def test_a_shard_goes_to_another_rank() -> None:
    _, ranks = team(2)
    at_once(ranks, lambda rank: rank.train(3))
    _, newcomers = team(2)
    packed = codec.pack(ranks[1].sharding.tree())
    tree = codec.unpack(packed.skeleton, packed.tensors)
    assert codec.digest(newcomers[3].sharding.core_of(tree)) == ranks[3].shard(), "it can be judged before it is loaded"
    newcomers[3].sharding.load(tree)
    assert newcomers[3].shard() == ranks[3].shard()
    with pytest.raises(StateError, match="cut in another way"):
        newcomers[2].sharding.load(ranks[1].sharding.tree())


@pytest.mark.parametrize(("world", "copies"), [(4, 1), (4, 4), (2, 2), (3, 1)])
def test_a_state_is_cut_anew(world: int, copies: int) -> None:
    _, ranks = team(2)
    at_once(ranks, lambda rank: rank.train(3))
    trees = [rank.sharding.tree() for rank in ranks[:2]]
    whole = assemble(trees, ranks[0].optimizer)
    _, others = team(copies, world=world)
    for other in others:
        other.sharding.load_shards(trees)
    again = assemble([other.sharding.tree() for other in others[: world // copies]], others[0].optimizer)
    assert codec.digest(codec.pack(again)) == codec.digest(codec.pack(whole))


def test_what_the_optimizer_has_loaded_before_is_cut() -> None:
    _, optimizer = plain("AdamW", 3)
    net = Net()
    loaded = MAKERS["AdamW"](groups_of(net))
    loaded.load_state_dict(optimizer.state_dict())
    sharding = Sharding([loaded], 1, WORLD, 2)
    other = Sharding([MAKERS["AdamW"](groups_of(Net()))], 1, WORLD, 2)
    assert codec.digest(sharding.core()) != codec.digest(other.core())
    assert loaded.state_dict()["state"] == {}


def test_what_can_not_be_sharded() -> None:
    net = Net()
    adam = torch.optim.Adam(net.parameters())
    for optimizers, world, copies, text in (
        ([adam], 1, 1, "at least two ranks"),
        ([adam], 4, 3, "multiple of replica_cnt"),
        ([adam], 4, 0, "at least 1"),
        ([adam, adam], 4, 2, "exactly one optimizer"),
        ([torch.optim.LBFGS(net.parameters())], 4, 2, "can't be sharded"),
    ):
        with pytest.raises(UsageError, match=text):
            Sharding(optimizers, 0, world, copies)
    meeting, ranks = team(2)
    ranks[0].optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(UsageError, match="have changed"):
        ranks[0].sharding.begin(0)


def test_between_two_updates_of_one_step_nothing_is_clean() -> None:
    """A script calls step() twice: after the first time the shard is of neither step."""
    _, ranks = team(2)

    def train(rank: Rank, updates: int) -> None:
        rank.net.gradients(rank.step)
        for _ in range(updates):
            rank.optimizer.step()

    at_once(ranks, lambda rank: train(rank, 2))
    for rank in ranks:
        rank.step = 1
    at_once(ranks, lambda rank: train(rank, 1))
    assert [rank.sharding.abandon(1) for rank in ranks] == [{}] * WORLD
    assert [rank.sharding.others() for rank in ranks] == [[]] * WORLD
