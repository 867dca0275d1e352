"""What scripts say to their peers before training: real in the first processes, replayed in a replacement."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evertrain.torch import backends, groups, prelude
from evertrain.torch.lasting import keeper
from tests.torch.teams import Member, team


class Link:
    """A store in a file in the place of the controller's."""

    def __init__(self, path: str) -> None:
        self._store = dist.FileStore(path, -1)

    def store_set(self, key: str, value: bytes) -> None:
        self._store.set(key, value.hex())

    def store_get(self, keys: list[str], timeout: float) -> list[bytes]:
        try:
            self._store.wait(keys, timedelta(seconds=timeout))
        except dist.DistStoreError:
            raise TimeoutError from None
        return [bytes.fromhex(self._store.get(key).decode()) for key in keys]

    def store_add(self, key: str, amount: int) -> int:
        raise NotImplementedError


def start_script(me: Member, first: bool, script: str, link: str = "link") -> Any:
    """The beginning of a script, up to its first line of training."""
    undo = prelude.patch_init_process_group(
        lambda: (me.rank, me.size), lambda: Link(f"{me.directory}/{link}"), lambda: first, timeout=30.0
    )
    try:
        dist.init_process_group("gloo")
        return globals()[script](me)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        undo()


def agree(me: Member) -> dict[str, Any]:
    seen: dict[str, Any] = {"rank": dist.get_rank(), "size": dist.get_world_size(), "backend": dist.get_backend()}
    run = [f"run of {me.rank}"]
    dist.broadcast_object_list(run, src=2)
    seen["run"] = run
    names: list[Any] = [None] * me.size
    dist.all_gather_object(names, {"rank": me.rank})
    seen["names"] = names
    dist.barrier()
    samples = torch.tensor([10 + me.rank])
    dist.all_reduce(samples)
    seen["samples"] = samples.item()
    weights = torch.full((prelude.LIMIT,), float(me.rank))
    dist.broadcast(weights, src=1)
    seen["weights"] = weights[0].item()
    work = dist.all_reduce(odd := torch.ones(3, 2, dtype=torch.bfloat16), async_op=True)
    work.wait()
    seen["odd"] = odd.float().tolist()
    if me.rank == 0:
        dist.send(torch.tensor([5.0]), 1)
    if me.rank == 1:
        dist.recv(x := torch.empty(1), 0)
        seen["received"] = x.item()
    return seen


def disagree(me: Member) -> str:
    try:
        dist.barrier()
    except prelude.PreludeError as error:
        return str(error)
    return "agreed"


def make_groups(me: Member) -> list[float]:
    """Groups of the script's own, each with notes of its own."""
    seen = []
    for ranks in ([0, 1], [1, 2]):
        group = dist.new_group(ranks)
        if me.rank in ranks:
            dist.all_reduce(x := torch.tensor([1.0 + me.rank]), group=group)
            seen.append(x.item())
    mesh = init_device_mesh("cpu", (me.size,))
    dist.all_reduce(x := torch.tensor([10.0 + me.rank]), group=mesh.get_group())
    return [*seen, x.item()]


def wrong_arguments(me: Member) -> str:
    undo = prelude.patch_init_process_group(
        lambda: (me.rank, me.size), lambda: Link(f"{me.directory}/link"), lambda: False, timeout=30.0
    )
    try:
        dist.init_process_group("gloo", rank=me.rank, world_size=me.size + 1)
    except ValueError as error:
        return str(error)
    finally:
        undo()
    return "accepted"


def hand_over(me: Member) -> list[float]:
    """Training begins: its group takes the place of the one before it."""

    def build(name: str, ranks: list[int]) -> groups.GuardedGroup:
        store = dist.PrefixStore(f"{name}/", me.store(5))
        index = ranks.index(me.rank)
        return groups.build(5, index, len(ranks), store, backends.pick("cpu"), 30.0, threading.Event())

    mine = dist.new_group([1, 2])
    before = dist.group.WORLD
    keeper.begin(me.rank, [0, 1, 2], build("main", [0, 1, 2]), build)
    keeper.go()
    assert dist.group.WORLD is before
    dist.all_reduce(x := torch.ones(1))
    if me.rank:
        dist.all_reduce(x, group=mine)
    return x.tolist()


def shrink(me: Member) -> list[Any]:
    """Rank 0 is missing: the others go on, with other numbers."""

    def build(generation: int) -> Any:
        def make(name: str, ranks: list[int]) -> groups.GuardedGroup:
            store = dist.PrefixStore(f"{name}/", me.store(generation))
            index = ranks.index(me.rank)
            return groups.build(generation, index, len(ranks), store, backends.pick("cpu"), 30.0, threading.Event())

        return make

    mine = dist.new_group([1, 2])
    keeper.begin(me.rank, [0, 1, 2], build(6)("main", [0, 1, 2]), build(6))
    keeper.go()
    me.store(8).set(f"there/{me.rank}", "yes")
    me.store(8).wait([f"there/{rank}" for rank in range(me.size)], timedelta(seconds=30))
    if me.rank == 0:
        return []
    keeper.leave()
    keeper.begin(me.rank, [1, 2], build(7)("main", [1, 2]), build(7))
    keeper.go()
    dist.broadcast(x := torch.tensor([float(me.rank)]), src=0, group=mine)
    return [dist.get_rank(), dist.get_process_group_ranks(mine), x.item()]


def test_a_group_goes_on_when_a_rank_is_missing(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 3) as ranks:
        assert ranks.call(start_script, False, "shrink") == [[], [0, [0, 1], 1.0], [1, [0, 1], 1.0]]
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]


def test_a_replacement_sees_what_its_predecessor_saw(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 3) as ranks:
        first = ranks.call(start_script, True, "agree")
        for rank, seen in enumerate(first):
            assert (seen["rank"], seen["size"], seen["backend"]) == (rank, 3, "gloo")
            assert seen["run"] == ["run of 2"]
            assert seen["names"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
            assert seen["samples"] == 33
            assert seen["weights"] == 1.0
            assert seen["odd"] == [[3.0, 3.0]] * 3
            assert seen.get("received") == (5.0 if rank == 1 else None)
        # Each alone, with nobody to answer. Only what is too big to be noted stays as the replacement made it.
        for rank in (1, 0):
            (seen,) = ranks.call(start_script, False, "agree", ranks=[rank])
            assert seen == {**first[rank], "weights": float(rank)}
        (text,) = ranks.call(start_script, False, "disagree", ranks=[2])
        assert "number 1 before training was broadcast" in text and "is barrier here" in text
        groups_made = ranks.call(start_script, True, "make_groups", "other")
        assert groups_made == [[3.0, 33.0], [3.0, 5.0, 33.0], [5.0, 33.0]]
        for rank in (1, 2):
            assert ranks.call(start_script, False, "make_groups", "other", ranks=[rank]) == [groups_made[rank]]
        (text,) = ranks.call(wrong_arguments, ranks=[0])
        assert "world_size=4" in text
        assert ranks.call(start_script, False, "hand_over") == [[3.0], [6.0], [6.0]]
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]
