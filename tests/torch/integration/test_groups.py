"""Process groups of real processes: built, used through torch.distributed, broken and left."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from evertrain.torch import attic, backends, groups
from evertrain.torch.default_group import check_torch, default_installed, install_default, uninstall_default
from evertrain.torch.errors import UsageError
from evertrain.torch.interrupt import Interrupted
from tests.torch.teams import Member, team

STUCK = 900.0
"""Timeout of the groups: who isn't got out of an operation stays in it for longer than any test lasts."""


def build(me: Member, generation: int, timeout: float = STUCK, install: bool = False) -> None:
    me.kept["broken"], me.kept["waits"] = [], []
    me.kept["group"] = groups.build(
        generation, me.rank, me.size, me.store(generation), backends.pick("cpu"), timeout, threading.Event(),
        on_wait=me.kept["waits"].append, on_broken=me.kept["broken"].append,
    )  # fmt: skip
    assert len(me.kept["group"]._raw.sockets) == me.size - 1
    if install:
        install_default(me.kept["group"])


# --- user collectives ------------------------------------------------------------------------------------------------


def use_everything(me: Member) -> dict[str, Any]:
    n, rank = me.size, me.rank
    seen: dict[str, Any] = {"backend": dist.get_backend(), "rank": dist.get_rank(), "size": dist.get_world_size()}
    x = torch.full((5,), float(rank))
    dist.all_reduce(x)
    seen["all_reduce"] = x.tolist()
    x = torch.full((2,), float(rank))
    dist.broadcast(x, src=1)
    seen["broadcast"] = x.tolist()
    objects = [{"from": rank}]
    dist.broadcast_object_list(objects, src=2)
    seen["objects"] = objects
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, f"rank {rank}")
    seen["gathered"] = gathered
    parts = [torch.empty(1) for _ in range(n)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    seen["all_gather"] = [part.item() for part in parts]
    whole = torch.empty(n)
    dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]))
    seen["all_gather_into_tensor"] = whole.tolist()
    part = torch.empty(1)
    dist.reduce_scatter_tensor(part, torch.arange(n, dtype=torch.float32))
    seen["reduce_scatter"] = part.item()
    dist.reduce(x := torch.ones(1), dst=0)
    seen["reduce"] = x.item() if rank == 0 else None
    dist.all_to_all_single(out := torch.empty(n), torch.full((n,), float(rank)))
    seen["all_to_all"] = out.tolist()
    dist.scatter(x := torch.empty(1), [torch.tensor([float(i)]) for i in range(n)] if rank == 0 else None)
    seen["scatter"] = x.item()
    dist.gather(torch.tensor([float(rank)]), parts if rank == 0 else None)
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % n)
    dist.recv(x := torch.empty(1), (rank - 1) % n)
    sent.wait()
    sent.wait()
    seen["ring"] = x.item()
    dist.barrier()
    half = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x := torch.ones(1), group=half)
        seen["subgroup"] = x.item()
    return seen


def swap(me: Member) -> float:
    began = time.perf_counter()
    uninstall_default()
    install_default(me.kept["group"])
    return time.perf_counter() - began


def destroy(me: Member) -> bool:
    dist.destroy_process_group()
    return not dist.is_initialized() and not default_installed()


@pytest.mark.matrix
def test_users_collectives_run_on_the_current_generation(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 3) as ranks:
        for generation in range(2):
            ranks.call(build, generation, STUCK, True)
            for rank, seen in enumerate(ranks.call(use_everything)):
                assert seen["backend"] == "gloo"
                assert (seen["rank"], seen["size"]) == (rank, 3)
                assert seen["all_reduce"] == [3.0] * 5
                assert seen["broadcast"] == [1.0, 1.0]
                assert seen["objects"] == [{"from": 2}]
                assert seen["gathered"] == ["rank 0", "rank 1", "rank 2"]
                assert seen["all_gather"] == seen["all_gather_into_tensor"] == [0.0, 1.0, 2.0]
                assert seen["reduce_scatter"] == 3.0 * rank
                assert seen["reduce"] == (3.0 if rank == 0 else None)
                assert seen["all_to_all"] == [0.0, 1.0, 2.0]
                assert seen["scatter"] == rank
                assert seen["ring"] == (rank - 1) % 3
                assert seen.get("subgroup") == (2.0 if rank < 2 else None)
            assert max(ranks.call(swap)) < 0.05
            assert ranks.call(destroy) == [True] * 3
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]


def test_this_torch_has_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_torch()
    monkeypatch.delattr(dist.distributed_c10d, "_update_default_pg")
    with pytest.raises(UsageError, match="lacks torch.distributed.distributed_c10d._update_default_pg"):
        check_torch()
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.5.1+cu124"))
    with pytest.raises(UsageError, match=r"torch 2.5.1\+cu124 is not supported: version 2.6 or newer"):
        check_torch()


def test_devices_without_a_library_are_named() -> None:
    with pytest.raises(ValueError, match="'tpu'.*cpu, cuda, npu"):
        backends.pick("tpu")
    if not dist.is_nccl_available():
        with pytest.raises(RuntimeError, match="needs nccl"):
            backends.pick("cuda")


# --- getting out -----------------------------------------------------------------------------------------------------


def block(me: Member, operation: str, elements: int) -> dict[str, Any]:
    """Exchange until it breaks; another thread stops the group when the test says so (by a file)."""
    group = me.kept["group"]
    stopped_at: list[float] = []
    told = threading.Event()

    def stop_when_told() -> None:
        while not os.path.exists(os.path.join(me.directory, f"stop-{group.generation}")) and not told.wait(0.001):
            pass
        stopped_at.append(time.monotonic())
        group.stop()

    watcher = threading.Thread(target=stop_when_told, daemon=True)
    watcher.start()
    x = torch.ones(elements)
    try:
        while True:
            match operation:
                case "allreduce":
                    group.allreduce([x]).wait()
                case "reduce_scatter":
                    group.reduce_scatter([torch.empty(elements)], [[x] * me.size]).wait()
                case "ring":
                    sent = group.send([x], (me.rank + 1) % me.size, 0)
                    group.recv([torch.empty(elements)], (me.rank - 1) % me.size, 0).wait()
                    sent.wait()
    except Interrupted as error:
        out = time.monotonic()
        text = str(error)
    told.set()
    watcher.join()
    try:
        group.barrier()
        refused = False
    except Interrupted:
        refused = True
    broken = me.kept["broken"]
    return {"late": out - stopped_at[0], "text": text, "refused": refused, "broken": len(broken), "waits": sum(
        1 if waiting else -1 for waiting in me.kept["waits"])}  # fmt: skip


@pytest.mark.parametrize(("operation", "elements"), [
    ("allreduce", 200_000),
    pytest.param("reduce_scatter", 1000, marks=pytest.mark.exhaustive),
    pytest.param("allreduce", 100, marks=pytest.mark.exhaustive),
    pytest.param("ring", 50_000, marks=pytest.mark.matrix),
])  # fmt: skip
@pytest.mark.matrix
def test_stop_gets_everybody_out_of_flowing_operations(tmp_path: Path, operation: str, elements: int) -> None:
    rounds = 20 if operation == "allreduce" else 8
    with team(__file__, tmp_path, 4) as ranks:
        for generation in range(rounds):
            ranks.call(build, generation)
            ranks.begin(block, operation, elements)
            time.sleep(0.03)
            (tmp_path / f"stop-{generation}").touch()
            for seen in ranks.answers():
                print(f"generation {generation}: out after {seen['late'] * 1000:.0f} ms")
                assert seen["refused"]
                assert seen["broken"] <= 1
                assert seen["waits"] == 0


def fork_a_victim(me: Member, generation: int, operation: str) -> int:
    """A member that can be lost twenty times without importing torch twenty times. Returns its process id."""
    pid = os.fork()
    if not pid:
        try:
            build(me, generation)
            block(me, operation, 20_000)
        finally:
            os._exit(1)
    return pid


def bury(me: Member, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("operation", ["allreduce", pytest.param("ring", marks=pytest.mark.matrix)])
def test_stop_gets_survivors_out_when_a_peer_is_lost(tmp_path: Path, how: str, operation: str) -> None:
    survivors = [0, 1, 2]
    with team(__file__, tmp_path, 4) as ranks:
        for generation in range(20):
            (victim,) = ranks.call(fork_a_victim, generation, operation, ranks=[3])
            ranks.call(build, generation, ranks=survivors)
            ranks.begin(block, operation, 20_000, ranks=survivors)
            time.sleep(0.03)
            os.kill(victim, getattr(signal, how))
            time.sleep(0.02)
            (tmp_path / f"stop-{generation}").touch()
            for seen in ranks.answers(survivors):
                print(f"generation {generation}: out after {seen['late'] * 1000:.0f} ms")
            ranks.call(bury, victim, ranks=[3])
        assert [ranks.finish(rank) for rank in survivors] == [0, 0, 0]


def build_among(me: Member, generation: int, members: list[int]) -> None:
    me.kept["broken"], me.kept["waits"] = [], []
    me.kept["group"] = groups.build(
        generation, members.index(me.rank), len(members), me.store(generation), backends.pick("cpu"), STUCK,
        threading.Event(), on_wait=me.kept["waits"].append, on_broken=me.kept["broken"].append,
    )  # fmt: skip


def wait_for_a_dead_peer(me: Member) -> dict[str, Any]:
    try:
        while True:
            me.kept["group"].allreduce([torch.ones(1000)]).wait()
    except RuntimeError:
        return {"swallowed": True}
    except Interrupted:
        return {"broken": me.kept["broken"]}


def test_a_broken_group_is_reported_once_and_cannot_be_swallowed(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 4) as ranks:
        ranks.call(build, 0)
        ranks.begin(wait_for_a_dead_peer, ranks=[0, 1, 2])
        time.sleep(0.05)
        ranks.signal(3, signal.SIGKILL)
        for seen in ranks.answers([0, 1, 2]):
            assert len(seen["broken"]) == 1


# --- building --------------------------------------------------------------------------------------------------------


def build_without_the_last(me: Member, generation: int, cancel_after: float, timeout: float) -> dict[str, Any]:
    cancelled = threading.Event()
    timer = threading.Timer(cancel_after, cancelled.set)
    timer.start()
    began = time.monotonic()
    try:
        gloo = backends.pick("cpu")
        groups.build(generation, me.rank, me.size, me.store(generation), gloo, timeout, cancelled).stop()
        outcome = "built"
    except Interrupted:
        outcome = "interrupted"
    except groups.GroupError as error:
        outcome = f"failed: {error}"
    timer.cancel()
    return {"outcome": outcome, "after": time.monotonic() - began}


@pytest.mark.matrix
def test_building_ends_when_it_is_cancelled_or_times_out(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 3) as ranks:
        for seen in ranks.call(build_without_the_last, 0, 0.3, STUCK, ranks=[0, 1]):
            assert seen["outcome"] == "interrupted"
            assert seen["after"] >= 0.25
        for seen in ranks.call(build_without_the_last, 1, STUCK, 1.0, ranks=[0, 1]):
            assert seen["outcome"].startswith("failed: the process group could not be built")
        # A member dies while it builds; then the next generation works in the same processes.
        ranks.begin(build_without_the_last, 2, 0.5, STUCK, ranks=[0, 1])
        ranks.begin(die_while_building, 2, ranks=[2])
        # Whoever had its connections to the dead one already has a group, which the next wait finds broken; whoever was
        # connecting may be told by gloo.
        for seen in ranks.answers([0, 1]):
            outcome = seen["outcome"]
            told = "Connection closed by peer" in outcome or "Connection refused" in outcome
            assert told or outcome in ("interrupted", "built")
        ranks.call(build_among, 3, [0, 1], ranks=[0, 1])
        assert ranks.call(sum_of_ones, ranks=[0, 1]) == [2.0, 2.0]
        assert [ranks.finish(rank) for rank in (0, 1)] == [0, 0]


def die_while_building(me: Member, generation: int) -> None:
    class Deadly(dist.Store):
        def set(self, key: str, value: bytes) -> None:
            store.set(key, value)

        def get(self, key: str) -> bytes:
            return store.get(key)

        def wait(self, keys: list[str], *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    store = me.store(generation)
    groups.build(generation, me.rank, me.size, Deadly(), backends.pick("cpu"), STUCK, threading.Event())


def sum_of_ones(me: Member) -> float:
    x = torch.ones(1)
    me.kept["group"].allreduce([x]).wait()
    return x.item()


# --- leaving nothing behind ------------------------------------------------------------------------------------------


def resources(me: Member) -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def stop(me: Member) -> None:
    uninstall_default()
    me.kept["group"].stop()


def empty_attic(me: Member) -> int:
    deadline = time.monotonic() + 20
    while attic.count() and time.monotonic() < deadline:
        time.sleep(0.05)
    me.kept.clear()
    # The last one leaves the list just before it is destroyed.
    time.sleep(1.0)
    return attic.count()


@pytest.mark.matrix
def test_thirty_generations_leak_no_threads_and_no_descriptors(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 3) as ranks:
        for generation in range(31):
            ranks.call(build, generation, 2.0, True)
            assert ranks.call(sum_of_ones) == [3.0] * 3
            # In every third one somebody is left alone in an operation, which leaves a worker stuck.
            ranks.call(stop if generation % 3 else abandon)
            if generation == 0:
                assert ranks.call(empty_attic) == [0] * 3
                before = ranks.call(resources)
        assert ranks.call(empty_attic) == [0] * 3
        for was, now in zip(before, ranks.call(resources), strict=True):
            assert now[0] <= was[0] + 1
            assert now[1] <= was[1] + 1


def abandon(me: Member) -> None:
    if me.rank == 0:
        me.kept["group"].allreduce([torch.ones(1000)])
    stop(me)


def leave_stuck(me: Member) -> None:
    """An operation that nobody answers, in a group that is then stopped but for its sockets: surely stuck."""
    group = me.kept["group"]
    me.kept["work"] = group.allreduce([torch.ones(1000)])
    group._raw.sockets.clear()
    group.stop()


@pytest.mark.parametrize("abandoned", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_a_process_with_a_stuck_group_ends_with_its_exit_code(tmp_path: Path, abandoned: bool) -> None:
    with team(__file__, tmp_path, 3) as ranks:
        ranks.call(build, 0)
        ranks.call(leave_stuck if abandoned else start_alone, ranks=[0])
        assert ranks.finish(0) == 0


def start_alone(me: Member) -> None:
    me.kept["work"] = me.kept["group"].allreduce([torch.ones(1000)])
