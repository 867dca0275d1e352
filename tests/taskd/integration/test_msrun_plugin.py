"""MSRunPlugin in a launcher with msrun's callbacks and real processes: what the cluster's files make it do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from tests.ports import free_ports
from tests.taskd.cluster import ScriptedClusterD
from tests.taskd.msrun import Launcher
from tests.taskd.pods import alive

PLUGIN = """
from evertrain.taskd.agent import msrun_plugin
msrun_plugin.LOOK = 0.05
from taskd.python.framework.agent.ms_mgr.msrun_plugin import MSRunPlugin

plugin = MSRunPlugin()
for name, function in callbacks.items():
    plugin.register_callbacks(name, function)
plugin.start()
"""


class Pod:
    """Node 1 of a job unless told otherwise: ranks 2 and 3."""

    def __init__(self, folder: Path, node: int = 1, **environment: str) -> None:
        self.folder = folder
        manager_port, proxy_port = free_ports(2)
        self.launcher = Launcher(
            folder,
            PLUGIN,
            node,
            POD_IP=f"127.0.0.{2 + node}",
            MS_SCHED_HOST="127.0.0.2",
            TASKD_MANAGER_PORT=str(manager_port),
            TASKD_PROXY_PORT=str(proxy_port),
            TASKD_RESET_DIR=str(folder),
            TASKD_RANK_TABLE_DIR=str(folder),
            **environment,
        )
        self.pids, self.life = self.launcher.pids, self.launcher.life
        self.looked, self.ended = self.launcher.looked, self.launcher.ended

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Pod]:
        async with self.launcher.running():
            yield self

    def write(self, name: str, text: str) -> None:
        (self.folder / f".{name}").write_text(text)
        os.replace(self.folder / f".{name}", self.folder / name)

    def reset(self, ranks: dict[int, str] | None = None, **fields: Any) -> None:
        entries = [{"RankId": rank, "Status": status} for rank, status in (ranks or {}).items()]
        self.write("reset.json", json.dumps({"RankList": entries, **fields}))


async def gone(*pids: int) -> None:
    async with aio.timeout(90):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.02)


async def test_a_failed_process_is_restarted_in_its_pod_when_the_cluster_says_so(tmp_path: Path) -> None:
    async with Pod(tmp_path, ENABLE_RESTART_FAULT_PROCESS="on").running() as pod:
        first = await pod.pids(2, 3)
        os.kill(first[3], signal.SIGKILL)
        await gone(first[3])
        pod.reset({3: "fault"}, RestartFaultProcess=True)
        new, kind = await pod.life(3, 2)
        assert kind == "worker" and alive(first[2])
        pod.reset({3: "fault", 7: "fault"}, RestartFaultProcess=True)
        await pod.looked()
        assert alive(new), "it is dealt with, and rank 7 is not here"
        pod.reset()
        await pod.looked()
        pod.reset({3: "fault"}, RestartFaultProcess=True)
        newest, _ = await pod.life(3, 3)
        for pid in (first[2], newest):
            os.kill(pid, signal.SIGUSR1)
        assert await pod.ended() == 0


async def test_processes_are_ended_while_chips_are_reset(tmp_path: Path) -> None:
    async with Pod(tmp_path).running() as pod:
        first = await pod.pids(2, 3)
        pod.reset({0: "unrecovered"})
        await gone(*first.values())
        (tmp_path / "reset.json").write_text('{"RankList": [{"Rank')
        await pod.looked()
        await pod.pids(2, 3)
        pod.reset({0: "recovered"})
        second = await pod.pids(2, 3, count=2)
        await pod.looked()
        assert all(alive(pid) for pid in second.values()), "the same notice does not end them again"
        pod.reset({2: "fault"})
        assert await pod.ended() == 1
        assert not any(alive(pid) for pid in second.values())
        assert "ranks [2] are faulty" in pod.launcher.said()


@pytest.mark.matrix
async def test_all_start_again_when_a_pod_was_replaced_and_the_rank_table_knows_it(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.reset(RetryTime=4)
    pod.write("version", "7")
    pod.write("restartType", "podReschedule")
    async with pod.running():
        first = await pod.pids(2, 3)
        pod.reset({0: "fault"}, RetryTime=5)
        await pod.looked()
        pod.reset(RetryTime=5)
        await pod.looked()
        assert all(alive(pid) for pid in first.values())
        pod.write("version", "8")
        assert (await pod.life(2, 2))[1] == "pod"
        second = await pod.pids(2, 3, count=2)
        assert not any(alive(pid) for pid in first.values())
        for pid in second.values():
            os.kill(pid, signal.SIGUSR1)
        assert await pod.ended() == 0


async def test_a_file_that_was_away_for_a_moment_restarts_nobody(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.reset(RetryTime=4)
    async with pod.running():
        first = await pod.pids(2, 3)
        os.unlink(tmp_path / "reset.json")
        await pod.looked()
        pod.reset(RetryTime=4)
        await pod.looked()
        assert all(alive(pid) for pid in first.values())
        pod.reset(RetryTime=5)
        await pod.pids(2, 3, count=2)


@pytest.mark.matrix
async def test_nothing_starts_while_faults_are_collected_and_failed_processes_end_the_launcher(tmp_path: Path) -> None:
    pod = Pod(tmp_path, TEST_STARTED="0")
    pod.reset(FaultFlushing=True)
    async with pod.running():
        async with aio.timeout(90):
            while not (tmp_path / "log").exists():
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)  # that nothing happens can't be awaited
        assert not (tmp_path / "rank2").exists()
        pod.reset({3: "fault"})
        await asyncio.sleep(0.5)
        assert not (tmp_path / "rank2").exists()
        pod.reset()
        only = await pod.pids(2)
        os.kill(only[2], signal.SIGKILL)  # rank 3 was never started, msrun says that it has no process id
        begun = asyncio.get_running_loop().time()
        assert await pod.ended() == 1
        assert asyncio.get_running_loop().time() - begun < 5, "nobody is left to wait for"
        assert "ranks [2] have failed" in pod.launcher.said()
        assert f"rank 2 (process {only[2]}) failed: it is gone" in pod.launcher.said()


@pytest.mark.matrix
async def test_a_graceful_end_lets_processes_save_and_is_no_success(tmp_path: Path) -> None:
    async with Pod(tmp_path).running() as pod:
        await pod.pids(2, 3)
        pod.reset(GracefulExit=1)
        assert await pod.ended() == 1, "the cluster is to start the pod elsewhere"
        assert all((tmp_path / f"rank{rank}.saved").exists() for rank in (2, 3))


PROCESSOR = """
import os, signal, sys
from mindio_ttp.framework_ttp import tft_init_processor, tft_start_processor

tft_init_processor(int(sys.argv[1][-1]), 2, False, False)
tft_start_processor(os.environ["POD_IP"], int(os.environ["TTP_PORT"]))
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {os.environ['RESTART_FAULT_PROCESS_TYPE']}\\n")
while True:
    signal.pause()
"""


@contextlib.asynccontextmanager
async def first_node(folder: Path) -> AsyncIterator[tuple[Pod, ScriptedClusterD]]:
    """With the controller in the launcher, and MindIO's processors in the processes."""
    clusterd = ScriptedClusterD()
    await clusterd.start()
    (controller_port,) = free_ports(1)
    pod = Pod(
        folder,
        node=0,
        MINDX_SERVER_IP="127.0.0.1",
        MINDX_SERVER_PORT=str(clusterd.port),
        MS_WORKER_NUM="2",
        TTP_PORT=str(controller_port),
        TEST_CHILD=PROCESSOR,
    )
    try:
        async with pod.running():
            for method in ("Init", "Init", "Register"):
                heard = await clusterd.expect(method, 90)  # the launcher and its processes have to start
                assert (heard.jobId, heard.role) == ("job-1", "master agent")
            async with aio.timeout(90):
                await clusterd.subscribed.wait()
            yield pod, clusterd
    except TimeoutError:
        raise AssertionError(pod.launcher.said()) from None
    finally:
        await clusterd.stop()


@pytest.mark.matrix
async def test_the_first_node_follows_clusterd(tmp_path: Path) -> None:
    async with first_node(tmp_path) as (pod, clusterd):
        first = await pod.pids(0, 1)
        clusterd.say("killMaster", job="another job")
        clusterd.say("killMaster")
        assert await pod.ended() == 1
        assert "a signal for another job" in pod.launcher.said() and "ClusterD ends the job" in pod.launcher.said()
        assert not alive(first[0])


async def test_processes_that_wait_for_their_chips_are_no_fault_for_the_controller(tmp_path: Path) -> None:
    async with first_node(tmp_path) as (pod, clusterd):
        first = await pod.pids(0, 1)
        pod.reset({1: "unrecovered"})
        await gone(*first.values())
        for _ in range(3):
            await pod.looked()
        pod.reset({1: "recovered"})
        second = await pod.pids(0, 1, count=2)
        os.kill(second[1], signal.SIGKILL)
        fault = await clusterd.expect("ReportProcessFault")
        assert [(each.rankId, each.faultType) for each in fault.faultRanks] == [("1", "1")], "the first that it hears"
        clusterd.say("stopTrain", "stop_train", "stop_train", faults={1: 1})
        stopped = await clusterd.expect("ReportStopComplete")
        assert stopped.status.code == 404, "these have no training; and the controller ends the job"
        assert await pod.ended() == 1
        assert clusterd.heard.empty()
