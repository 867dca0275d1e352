"""torchrun as TaskD's agent: rendezvous, restarts, orders that come while it waits, and what becomes of warm spares."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore

from evertrain.taskd import frames
from evertrain.taskd.agent import torch_private
from evertrain.taskd.agent.meeting import PatientStore
from evertrain.taskd.manager.shell import Config, Manager
from tests.taskd.native import build
from tests.taskd.pods import MEETING, SCRIPT, Pods, alive, faults


class Reversed(Pods):
    """By c10d, which would give the first ranks to the second pod."""

    c10d = True

    def options_of(self, node: int) -> list[str]:
        return ["--local_addr", f"127.0.0.{9 - node}"]


@pytest.mark.matrix
async def test_with_c10d_ranks_are_in_the_order_of_the_pods_and_a_pod_is_replaced(tmp_path: Path) -> None:
    pods = Reversed(tmp_path)
    pods.script.write_text(MEETING + SCRIPT)
    async with pods.running():
        pids = await pods.begin()
        where = {rank: pods.seen(rank, pid)["environment"]["POD_IP"] for rank, pid in pids.items()}
        assert where == {0: "127.0.0.2", 1: "127.0.0.2", 2: "127.0.0.3", 3: "127.0.0.3"}
        assert pods.seen(3, pids[3])["environment"]["GROUP_RANK"] == "1"
        os.kill(pids[3], signal.SIGKILL)
        assert faults(await pods.hear(1)) == (202, [3], 5)
        await pods.order(1, 203)
        await pods.order(0, 208, "4")
        assert faults(await pods.hear(1)) == (202, [], 5)
        assert await pods.ends(1) == 1
        await pods.start(1)
        assert (await pods.hear(1)).msg_type == "REGISTER"
        await pods.hear(1)
        await pods.order(1, 210, "4")
        new = {rank: await pods.lives(rank, 2) for rank in range(4)}
        assert {(kind, attempt) for _, kind, attempt in new.values()} == {("pod", str(32767 - 4))}
        for pid, _, _ in new.values():
            os.kill(pid, signal.SIGUSR1)
        assert [await pods.ends(node) for node in (0, 1)] == [0, 0], pods.output(0) + pods.output(1)


class ByC10d(Pods):
    c10d = True


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [Pods, ByC10d], ids=["static", "c10d"])
async def test_a_new_first_pod_joins_those_that_have_met_long_ago(tmp_path: Path, kind: type[Pods]) -> None:
    async with kind(tmp_path).running() as pods:
        before = await pods.begin()
        os.killpg(pods.pods[0].pid, signal.SIGKILL)
        await pods.ends(0)
        await pods.start(0)
        assert (await pods.hear(0)).msg_type == "REGISTER"
        await pods.hear(0)
        await pods.order(0, 210, "5")  # of a manager that knows of nobody yet: it waits
        await pods.logged(0, "receive 210 command, start to start all workers: 5", 2)
        await pods.order(0, 210, "5", UNDER_WAY="2")
        for rank in (0, 1):
            pid, restart, attempt = await pods.lives(rank, 2)
            seen = pods.seen(rank, pid)["environment"]
            assert (restart, attempt) == ("pod", str(32767 - 5))
            assert (seen["WORLD_SIZE"], seen["GROUP_RANK"], seen["LOCAL_RANK"]) == ("4", "0", str(rank))
        await pods.logged(0, "another order has come while the other nodes were waited for")
        assert all(alive(before[rank]) for rank in (2, 3)), "nobody else was disturbed"
        assert (await pods.lives(2, 1))[0] == before[2]
        pods.script.write_text(MEETING + SCRIPT)
        for node in (1, 0):
            await pods.order(node, 208, "4")
        new = [await pods.lives(rank, 3 if rank < 2 else 2) for rank in range(4)]
        assert {attempt for _, _, attempt in new} == {str(32767 - 4)}, "all have met at the new store"
        for pid, _, _ in new:
            os.kill(pid, signal.SIGUSR1)
        assert [await pods.ends(node) for node in (0, 1)] == [0, 0], pods.output(0) + pods.output(1)
        assert "are not waited for" not in pods.log(1)


@pytest.mark.matrix
async def test_an_agent_that_waits_for_another_node_obeys(tmp_path: Path) -> None:
    async with Pods(tmp_path).running() as pods:
        await pods.begin()
        await pods.order(1, 208, "4")  # node 0 knows nothing of it and does not come
        await pods.logged(1, "receive 208 command, start to restart all workers: 4")
        await pods.order(1, 209, '["3"]')  # there is nothing to replace
        for node in (1, 0):
            await pods.order(node, 208, "3")
        new = {rank: await pods.lives(rank, 2) for rank in range(4)}
        assert {attempt for _, _, attempt in new.values()} == {str(32767 - 3)}
        await pods.logged(1, "another order has come while the other nodes were waited for")
        for rank in (0, 1):
            os.kill(new[rank][0], signal.SIGUSR1)  # node 0 is done and waits for the other
        await pods.logged(0, "all processes of this node have succeeded")
        for node in (1, 0):
            await pods.order(node, 208, "2")
        new = {rank: await pods.lives(rank, 3) for rank in range(4)}
        await pods.order(1, 208, "1")
        await pods.logged(1, "receive 208 command, start to restart all workers: 1")
        await pods.order(1, 203)
        assert await pods.ends(1) == 1
        assert all(alive(new[rank][0]) for rank in (0, 1))
        await pods.start(1)
        await pods.hear(1)
        await pods.hear(1)
        await pods.order(1, 210, "0")
        await pods.logged(1, "receive 210 command, start to start all workers: 0")
        pods.pods[1].send_signal(signal.SIGTERM)
        assert await pods.ends(1) != 0


@pytest.mark.matrix
async def test_max_restarts_is_how_many_faults_a_job_survives(tmp_path: Path) -> None:
    pods = Pods(tmp_path, "--max_restarts", "1")
    manager = Manager(Config("job-1", 2, 2, enabled=False, listen=f"127.0.0.2:{pods.manager_port}"))
    running = asyncio.ensure_future(manager.run())
    try:
        async with pods.pods_only():
            first = {rank: (await pods.lives(rank, 1))[0] for rank in range(4)}
            os.kill(first[3], signal.SIGKILL)
            assert await pods.ends(1) == 1, "the cluster is to replace this pod"
            await pods.start(1)
            second = {rank: await pods.lives(rank, 2) for rank in range(4)}
            assert {attempt for _, _, attempt in second.values()} == {"1"}
            os.kill(second[2][0], signal.SIGKILL)
            assert [await pods.ends(node) for node in (0, 1)] == [1, 1]
            assert "no restarts are left (--max_restarts)" in pods.output(0)
            assert not any(alive(pid) for pid, _, _ in second.values())
    finally:
        manager.stop("over")
        await running


@pytest.mark.matrix
async def test_max_restarts_is_how_many_faults_a_container_survives_in_place(tmp_path: Path) -> None:
    async with Pods(tmp_path, "--max_restarts", "1").running() as pods:
        pids = await pods.begin()
        os.kill(pids[3], signal.SIGKILL)
        assert frames.replaced((await pods.hear(1)).extension) == 0
        await pods.order(1, 209, '["3"]')
        (new, *_) = await pods.lives(3, 2)
        os.kill(pids[2], signal.SIGKILL)
        assert frames.replaced((await pods.hear(1)).extension) == 1
        await pods.order(1, 209, '["2"]')
        assert await pods.ends(1) == 1
        assert "more faults in this container than --max_restarts 1 allows" in pods.output(1)
        assert not alive(new) and alive(pids[0]) and alive(pids[1])


def spare_of(pods: Pods, node: int) -> int:
    """The process id of the one that is there or warms up."""
    launcher = pods.pods[node].pid
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (spare,) = (pid for pid in children if b"\0unknown\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(spare)


@pytest.mark.matrix
async def test_spares_end_with_torchrun_and_crash_like_any_process(tmp_path: Path) -> None:
    library = build(tmp_path / "library")
    async with Pods(tmp_path, warm=(1, 1), LD_PRELOAD=str(library)).running() as pods:
        pids = await pods.begin()
        os.kill(spare_of(pods, 1), signal.SIGKILL)
        await pods.logged(1, "a warm spare ended with code -9; another is started")
        await pods.logged(1, "a warm spare is ready")
        await pods.order(1, 209, '["2"]')
        pid, kind, _ = await pods.lives(2, 2)
        assert kind == "worker"
        await pods.logged(1, f"process {pid} was a warm spare")
        os.kill(pid, signal.SIGSEGV)
        assert faults(await pods.hear(1)) == (202, [2], 5)
        await pods.printed(1, f"rank 2 (process {pid}) failed: ")
        assert re.search(rf"process {pid}\) failed: .*SIGSEGV.*sent by process {os.getpid()}", pods.output(1))
        ends: list[tuple[int, Callable[[], None]]] = [
            (0, pods.pods[0].kill),
            (1, lambda: pods.pods[1].send_signal(signal.SIGTERM)),
        ]
        for node, end in ends:
            mine = {0: (0, 1), 1: (3,)}[node]
            descriptors = [os.pidfd_open(pid) for pid in (spare_of(pods, node), *(pids[rank] for rank in mine))]
            end()
            await pods.ends(node)
            for descriptor in descriptors:
                assert select.select([descriptor], [], [], 90)[0], "the spare or a rank lives on"
                os.close(descriptor)


@pytest.mark.matrix
async def test_with_enough_spares_a_whole_pod_starts_warm(tmp_path: Path) -> None:
    async with Pods(tmp_path, warm=(0, 2)).running() as pods:
        await pods.begin()
        await pods.logged(1, "a warm spare is ready", 2)
        for node in (0, 1):
            await pods.order(node, 208, "4")
        new = {rank: (await pods.lives(rank, 2))[0] for rank in range(4)}
        assert [pods.seen(rank, new[rank])["warm"] for rank in range(4)] == [False, False, True, True]


# Waiting for other nodes.


def test_a_patient_store_gives_way_while_it_waits() -> None:
    store, calls = HashStore(), []

    def pause(seconds: float) -> None:
        calls.append(seconds)
        if len(calls) == 3:
            store.set("b", "2")

    patient = PatientStore(store, pause)
    patient.set("a", "1")
    assert patient.multi_get(["a", "b"]) == [b"1", b"2"] and len(calls) == 3
    with pytest.raises(DistStoreError):
        PatientStore(store, time.sleep).wait(["never"], timedelta(seconds=0.05))


def test_a_node_that_never_says_where_to_meet_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = SimpleNamespace(get_backend=lambda: "static", get_run_id=lambda: "job")
    spec = SimpleNamespace(rdzv_handler=handler, max_restarts=5)
    group = SimpleNamespace(spec=spec, group_rank=1, store=HashStore())
    agent: Any = SimpleNamespace(_worker_group=group, _remaining_restarts=4)
    monkeypatch.setattr(torch_private, "_MEETING_LIMIT", 0.05)
    elastic = torch_private.Elastic(agent, 1)
    with pytest.raises(torch_private.Unmet, match="node 0 has not said within 0.05 s where all meet"):
        elastic._meet({0: {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}})
