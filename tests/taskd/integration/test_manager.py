"""The manager with a real MindIO controller, real agents and workers, and a ClusterD that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from evertrain.taskd import frames
from evertrain.taskd.frames import Body, FaultReport
from evertrain.taskd.manager import delivery, shell, signals
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.manager.orders import End, Signal
from evertrain.taskd.manager.reports import Progress, Report
from evertrain.taskd.manager.shell import Config, Manager
from evertrain.taskd.net import client, server
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security
from evertrain.taskd.tracing import KINDS
from evertrain.wire.recover_pb2 import ClientInfo, FaultRank, ProcessManageSignal, Status
from tests.ports import free_port
from tests.taskd.cluster import ScriptedClusterD
from tests.taskd.relay import Relay

MANAGER = Position("Mgr", "0")


class Job:
    def __init__(
        self, tmp_path: Path, clusterd: ScriptedClusterD | None, nodes: int = 2, recovers: bool = True
    ) -> None:
        self.clusterd, self.nodes = clusterd, nodes
        self.reset = tmp_path / "reset.json"
        self.config = Config(
            job="job-1",
            nodes=nodes,
            per_node=2,
            recovers_processes=recovers,
            listen="127.0.0.1:0",
            clusterd=f"127.0.0.1:{clusterd.port}" if clusterd else "",
            reset_file=self.reset,
            trace_file=tmp_path / "trace.json",
        )
        self.members: list[Node] = []
        self.agents: list[Node] = []
        self.workers: list[Node] = []

    @contextlib.asynccontextmanager
    async def running(self, members: int | None = None) -> AsyncIterator[Job]:
        """With so many of its nodes; all, if nothing is said."""
        self.manager = Manager(self.config)
        self.task = asyncio.ensure_future(self.manager.run())
        await asyncio.wait_for(self.manager.listening.wait(), 90)
        try:
            for node in range(self.nodes if members is None else members):
                await self.add(node)
            yield self
        finally:
            for member in reversed(self.members):
                await member.close()
            self.manager.stop("the test is over")
            await asyncio.wait_for(self.task, 90)

    @property
    def link(self) -> ClusterD:
        assert self.manager._clusterd is not None
        return self.manager._clusterd

    async def add(self, node: int, started: int = 1, port: int = 0) -> Node:
        """`port`: where its proxy finds the manager."""
        above = f"127.0.0.1:{port or self.manager.port}"
        proxy = await self._join(Node(Position("Proxy", str(node), str(started)), listen="127.0.0.1:0", upstream=above))
        agent = await self._join(Node(Position("Agent", str(node)), upstream=f"127.0.0.1:{proxy.port}"))
        self.agents.append(agent)
        await say(agent, "REGISTER", 0)
        for rank in (2 * node, 2 * node + 1):
            worker = Node(Position("Worker", str(node), str(rank)), upstream=f"127.0.0.1:{proxy.port}")
            self.workers.append(await self._join(worker))
            await say(worker, "REGISTER", 101)
        return agent

    async def _join(self, node: Node) -> Node:
        self.members.append(node)
        await node.start()
        assert await node.wait_joined(90)
        return node


async def until(true: Callable[[], bool], limit: float = 90) -> None:
    async with aio.timeout(limit):
        while not true():
            await asyncio.sleep(0.01)


async def say(node: Node, msg_type: str, code: int, message: str = "", extension: dict[str, str] | None = None) -> None:
    assert await node.send(MANAGER, frames.body(msg_type, code, message, extension).encode(), mtype="DEFAULT") == 0


async def hear(node: Node) -> Body:
    return frames.decode((await asyncio.wait_for(node.received.get(), 90)).body)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POD_IP": "127.0.0.1", "TTP_PORT": str(free_port()), "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PROCESS_RECOVER", "on")


@contextlib.asynccontextmanager
async def cluster(tmp_path: Path, **options: bool) -> AsyncIterator[tuple[ScriptedClusterD, Job]]:
    clusterd = ScriptedClusterD()
    await clusterd.start()
    try:
        async with Job(tmp_path, clusterd, **options).running() as job:
            await asyncio.wait_for(clusterd.subscribed.wait(), 90)
            for method in ("Init", "Register"):
                request = await clusterd.expect(method)
                assert (request.jobId, request.role) == ("job-1", "taskd")
            yield clusterd, job
    finally:
        await clusterd.stop()


@pytest.mark.usefixtures("environment")
async def test_an_agent_starts_and_is_led_by_clusterd(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        await say(job.agents[1], "STATUS", 201, "32767", {})
        assert await hear(job.agents[1]) == frames.body("ACTION", 210, "32767")
        clusterd.say("preExitProcess", "pre exit process", faults={2: 1}, nodeRankIds=["1"])
        assert await hear(job.agents[1]) == frames.body("ACTION", 213, '["2"]')
        clusterd.say(
            "changeStrategy", "change_strategy", "fault_nodes_restart", changeStrategy="recover",
            extraParams="recover-in-place", faults={2: 1, 3: 1}, nodeRankIds=["1"],
        )  # fmt: skip
        assert await hear(job.agents[1]) == frames.body("ACTION", 209, '["2","3"]')
        clusterd.say("faultNodesExit", "fault_nodes_exit", nodeRankIds=["1"])
        assert (await hear(job.agents[1])).code == 203
        assert job.agents[0].received.empty()


@pytest.mark.usefixtures("environment")
async def test_reports_of_the_controller_reach_clusterd_as_it_knows_them(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        reported = job.manager._reported
        reported(Report("process_fault", {3: 1}))
        assert list((await clusterd.expect("ReportProcessFault")).faultRanks) == [FaultRank(rankId="3", faultType="1")]
        reported(Report("stop_complete", {3: 1}, 0, "stop complete"))
        stopped = await clusterd.expect("ReportStopComplete")
        assert (stopped.jobId, stopped.status.code, stopped.status.info) == ("job-1", 0, "stop complete")
        reported(Report("recover_strategy", {3: 1}, strategies=("recover", "exit")))
        assert list((await clusterd.expect("ReportRecoverStrategy")).strategies) == ["recover", "exit"]
        reported(Report("recover_status", {3: 1}, 406, "no", strategy="recover"))
        status = await clusterd.expect("ReportRecoverStatus")
        assert (status.status.code, status.strategy, list(status.isolateRankIds)) == (406, "recover", ["3"])


@pytest.mark.usefixtures("environment")
async def test_an_agent_knows_what_the_controller_can_not(tmp_path: Path) -> None:
    """The controller sees that a process is gone, its agent that it died of broken memory."""
    async with cluster(tmp_path) as (clusterd, job):
        report = frames.FaultReport([2, 3]).encode()
        await say(job.agents[1], "STATUS", 202, report, {"REPORT_FAULT_TIME": "1", "FAULT_TYPES": '{"3":0}'})
        for kind in ("0", "1"):
            job.manager._reported(Report("process_fault", {2: 1, 3: 1}))
            faults = (await clusterd.expect("ReportProcessFault")).faultRanks
            assert [(each.rankId, each.faultType) for each in faults] == [("2", "1"), ("3", kind)], "that fault only"


@pytest.mark.usefixtures("environment")
async def test_what_an_agent_knew_of_a_fault_is_not_said_of_the_next_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        report = frames.FaultReport([3]).encode()
        await say(job.agents[1], "STATUS", 202, report, {"FAULT_TYPES": '{"3":0}'})
        job.manager._reported(Report("recover_status", {}, 0, "ok", strategy="recover"))
        await clusterd.expect("ReportRecoverStatus")
        job.manager._reported(Report("process_fault", {3: 1}))
        (fault,) = (await clusterd.expect("ReportProcessFault")).faultRanks
        assert (fault.rankId, fault.faultType) == ("3", "1")


@pytest.mark.usefixtures("environment")
async def test_a_message_that_comes_twice_is_heard_once(tmp_path: Path) -> None:
    """A sender that has missed an ack sends again, under the same name."""
    async with cluster(tmp_path) as (_, job):
        agent = job.agents[1]
        for uuid in ("the same", "the same", "another"):
            body = frames.body("STATUS", 201, "7", {})
            assert await agent.send(MANAGER, body.encode(), mtype="DEFAULT", uuid=uuid) == 0
        await until(lambda: agent.received.qsize() >= 2)
        job.manager._signal(Signal("preExitProcess", actions=("pre exit process",), faults={2: 1}, nodes=(1,)))
        assert [(await hear(agent)).code for _ in range(3)] == [210, 210, 213]


@pytest.mark.usefixtures("environment")
async def test_a_report_that_clusterd_does_not_take_is_sent_again_after_registering(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.answers["ReportProcessFault"] = [Status(code=400, info="not registered")]
        job.manager._reported(Report("process_fault", {3: 1}))
        for method in ("ReportProcessFault", "Init", "Register", "ReportProcessFault"):
            await clusterd.expect(method)


@pytest.mark.usefixtures("environment")
async def test_clusterd_goes_away_and_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        await clusterd.stop()
        await until(lambda: not job.link.subscribed.is_set())
        job.manager._reported(Report("process_fault", {3: 1}))
        job.manager._reported(Report("stop_complete", {3: 1}))
        await clusterd.start()
        await asyncio.wait_for(clusterd.subscribed.wait(), 90)
        for method in ("Init", "Register", "ReportProcessFault", "ReportStopComplete"):
            await clusterd.expect(method)
        clusterd.say("faultNodesExit", "fault_nodes_exit", nodeRankIds=["1"])
        assert (await hear(job.agents[1])).code == 203


@pytest.mark.usefixtures("environment")
async def test_whatever_clusterd_wants_is_heard_again_after_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four streams. And agents that it had told to wait for their start are let go, since it has forgotten them."""
    monkeypatch.setattr(signals, "REPEATED", 0.1)
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.say("pauseStartAgent", "pause_start_agent")
        await until(lambda: job.manager._mind._signals.paused)
        await say(job.agents[1], "STATUS", 201, "7", {})
        await clusterd.stop()
        await until(lambda: not job.link.subscribed.is_set())
        assert job.agents[1].received.empty()
        await clusterd.start()
        assert (await hear(job.agents[1])).code == 210
        for method in ("Init", "Register"):
            await clusterd.expect(method)
        clusterd.switch(["0"], [True])
        for worker in job.workers:
            await say(worker, "ACTION", 204, "switchOK", (await hear(worker)).extension)
        assert (await clusterd.expect("ReplySwitchNicResult")).result
        clusterd.stress({"3": [0]})
        order = (await hear(job.workers[3])).extension
        await say(job.workers[3], "ACTION", 205, '{"rankResult": {"0": {"code": "0", "result": "OK"}}}', order)
        assert (await clusterd.expect("ReplyStressTestResult")).stressResult["3"].rankResult["0"].code == "0"
        clusterd.trace(**{name: "on" if name == "Step" else "off" for name in KINDS})
        assert [(await hear(worker)).code for worker in job.workers] == [710] * 4


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("problem", ["", "MINDX_SERVER_IP: neither an IP address nor a domain name: 1.2.3.4.5"])
async def test_only_a_manager_that_was_told_of_no_clusterd_decides_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    job = Job(tmp_path, None)
    job.config = replace(job.config, no_clusterd=problem)
    caplog.set_level(logging.INFO, "evertrain.taskd")
    async with job.running():
        await say(job.agents[1], "STATUS", 202, FaultReport([2]).encode(), {})
    assert ("decides by itself" in caplog.text) == (not problem)
    assert (f"{problem}: ClusterD can't be asked, and nobody decides" in caplog.text) == bool(problem)


class Deaf(ScriptedClusterD):
    """Its line is cut without a word: what is sent to it stays unanswered."""

    cut = False

    async def HealthCheck(self, request: ClientInfo, context: Any) -> Status:
        while self.cut:
            await asyncio.sleep(0.02)
        return await super().HealthCheck(request, context)


@pytest.mark.matrix
async def test_a_clusterd_that_was_silent_for_a_while_is_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evertrain.taskd.manager.clusterd._HEALTH", 0.2)
    clusterd, signals = Deaf(), asyncio.Queue[Signal]()
    await clusterd.start()
    link = ClusterD(f"127.0.0.1:{clusterd.port}", "job-1", security=Security(), signal=signals.put_nowait)
    try:
        await link.start()
        await asyncio.wait_for(clusterd.subscribed.wait(), 90)
        clusterd.cut = True
        while link.subscribed.is_set():
            await asyncio.sleep(0.02)
        clusterd.cut = False
        await asyncio.wait_for(link.subscribed.wait(), 90)
        clusterd.say("killMaster")
        assert (await asyncio.wait_for(signals.get(), 90)).type == "killMaster"
    finally:
        await link.close()
        await clusterd.stop()


async def test_one_word_that_can_not_be_dealt_with_does_not_cost_the_next() -> None:
    clusterd, tests = ScriptedClusterD(), asyncio.Queue[dict[int, list[int]]]()
    await clusterd.start()

    def stress(ops: dict[int, list[int]], job: str) -> None:
        tests.put_nowait({} if 7 in ops and 1 / 0 else ops)

    link = ClusterD(f"127.0.0.1:{clusterd.port}", "job-1", security=Security(), stress=stress)
    try:
        await link.start()
        clusterd.stress({"7": [0]})
        clusterd.stress({"²": [0], "9" * 5000: [1], "3": [0, 1]})
        assert await asyncio.wait_for(tests.get(), 90) == {3: [0, 1]}
    finally:
        await link.close()
        await clusterd.stop()


@pytest.mark.usefixtures("environment")
async def test_garbage_and_bursts_of_signals(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        nonsense = ProcessManageSignal(
            uuid="x", signalType="stopTrain", actions=["stop_train"], faultRanks=[FaultRank(rankId="one")]
        )
        clusterd.say_raw(nonsense)
        clusterd.say_raw(ProcessManageSignal())
        clusterd.say("\ud7ff" * 1000, *["x"] * 1000)
        clusterd.say("faultNodesExit", "fault_nodes_exit", job="another", nodeRankIds=["1"])
        for number in range(5):
            clusterd.say("preExitProcess", "pre exit process", uuid=str(number), faults={number: 1}, nodeRankIds=["1"])
        assert [(await hear(job.agents[1])).message for _ in range(5)] == [f'["{number}"]' for number in range(5)]


@pytest.mark.usefixtures("environment")
async def test_link_failover_there_and_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.switch(["0", "2"], [True, True])
        for worker in job.workers:
            order = await hear(worker)
            assert order.code == 204 and order.extension and order.extension["globalRankIDs"] == '["0","2"]'
            answer = {"switchNicUUID": order.extension["switchNicUUID"]}
            await say(worker, "ACTION", 204, "switchOK", answer)
        reply = await clusterd.expect("ReplySwitchNicResult")
        assert (reply.jobId, reply.result) == ("job-1", True)


@pytest.mark.usefixtures("environment")
async def test_a_stress_test(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.stress({"3": [0, 1]})
        order = await hear(job.workers[3])
        assert order.extension and json.loads(order.extension["StressTestRankOPStr"]) == {"3": {"ops": [0, 1]}}
        results = {"rankResult": {"0": {"code": "0", "result": "OK"}, "1": {"code": "2", "result": "find fault rank"}}}
        answer = {"stressTestUUID": order.extension["stressTestUUID"]}
        await say(job.workers[3], "ACTION", 205, json.dumps(results), answer)
        reply = await clusterd.expect("ReplyStressTestResult")
        assert {op: each.code for op, each in reply.stressResult["3"].rankResult.items()} == {"0": "0", "1": "2"}


@pytest.mark.usefixtures("environment")
async def test_profiling_by_clusterd(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.trace(CommunicationOperator="on", Step="off", SaveCheckpoint="off", FP="off", DataLoader="off")
        assert [(await hear(worker)).code for worker in job.workers] == [711] * 4


@pytest.mark.usefixtures("environment")
async def test_a_file_says_which_timings_to_write_until_clusterd_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []

    def read(path: Path, limit: int, read: Callable[[Path, int], dict[str, object]] = shell._read_json) -> Any:
        looks.append(path)
        return read(path, limit)

    monkeypatch.setattr(shell, "LOOK", 0.01)
    monkeypatch.setattr(shell, "_read_json", read)
    off = dict.fromkeys(KINDS, "off")
    async with cluster(tmp_path) as (clusterd, job):
        job.config.trace_file.write_text(json.dumps({**off, "Step": "on"}))
        assert [(await hear(worker)).code for worker in job.workers] == [710] * 4
        clusterd.trace(**{**off, "CommunicationOperator": "on"})
        assert [(await hear(worker)).code for worker in job.workers] == [711] * 4
        job.config.trace_file.write_text(json.dumps(off))
        looks.clear()
        await until(lambda: len(looks) >= 3)
        assert all(worker.received.empty() for worker in job.workers) and job.config.trace_file not in looks


@pytest.mark.usefixtures("environment")
async def test_a_job_that_clusterd_does_not_lead(tmp_path: Path) -> None:
    """Code 403 is for good: nobody asks again."""
    clusterd = ScriptedClusterD()
    clusterd.init_code = 403
    await clusterd.start()
    try:
        async with Job(tmp_path, clusterd).running() as job:
            await clusterd.expect("Init")
            assert job.manager._clusterd is not None
            await say(job.agents[0], "STATUS", 201, "5", {})
            assert (await hear(job.agents[0])).code == 210
            assert job.manager._clusterd.switched_off and clusterd.heard.empty()
    finally:
        await clusterd.stop()


@pytest.mark.usefixtures("environment")
async def test_pods_are_replaced_without_process_recovery(tmp_path: Path) -> None:
    async with Job(tmp_path, None, recovers=False).running() as job:
        for agent in job.agents:
            await say(agent, "STATUS", 201, "7", {})
            assert (await hear(agent)).message == "7"
        await say(job.agents[1], "STATUS", 202, FaultReport([2], 7).encode(), {"REPORT_FAULT_TIME": "1"})
        assert (await hear(job.agents[1])).code == 203
        restart = await hear(job.agents[0])
        assert (restart.code, restart.message) == (208, "6")
        new = await job.add(1, started=2)
        await say(new, "STATUS", 201, "7", {})
        assert (await hear(new)).message == "6"


@pytest.mark.usefixtures("environment")
async def test_an_agent_that_was_cut_off_when_all_were_to_restart_hears_it_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "BETWEEN", 0.05)
    monkeypatch.setattr(server, "ACK_WAIT", 0.3)
    monkeypatch.setattr(client, "CALL_LIMIT", 2.0)
    async with Job(tmp_path, None, recovers=False).running() as job:
        relay = Relay(job.manager.port)
        await relay.start()
        try:
            far = await job.add(2, port=relay.port)
            for agent in job.agents:
                await say(agent, "STATUS", 201, "7", {})
                assert (await hear(agent)).message == "7"
            relay.cut()
            await say(job.agents[1], "STATUS", 202, FaultReport([2], 7).encode(), {"REPORT_FAULT_TIME": "1"})
            assert (await hear(job.agents[0])).code == 208
            await until(lambda: "mgr resend message more times than limit 5: 208 to Agent 2" in caplog.text)
            relay.mend()
            async with aio.timeout(90):
                while far.received.empty():
                    sign = frames.body("KEEP_ALIVE", 0, FaultReport([], 7).encode(), {"RUNNING": "true"})
                    await far.send(MANAGER, sign.encode(), mtype="DEFAULT")
                    await asyncio.sleep(0.05)
            restart = await hear(far)
            assert (restart.code, restart.message) == (208, "6")
        finally:
            await relay.stop()


@pytest.mark.usefixtures("environment")
async def test_without_clusterd_a_training_without_mindio_starts_again(tmp_path: Path) -> None:
    """Nobody has met the controller, so it misses nobody; the agents' words are all there is."""
    async with Job(tmp_path, None).running() as job:
        for agent in job.agents:
            await say(agent, "STATUS", 201, "7", {})
            await hear(agent)
        for agent, ranks in zip(job.agents, ([0, 1], [2, 3]), strict=True):
            await say(agent, "STATUS", 202, FaultReport(ranks, 7).encode(), {"REPORT_FAULT_TIME": "1"})
        for agent in job.agents:
            restart = await hear(agent)
            assert (restart.code, restart.message) == (208, "6")
        await say(job.agents[1], "STATUS", 202, FaultReport([2], 7).encode(), {})
        await say(job.agents[1], "STATUS", 201, "7", {})
        assert (await hear(job.agents[1])).code == 210, "a word that crossed with the restart is none"


@pytest.mark.usefixtures("environment")
async def test_without_clusterd_a_broken_script_ends_the_job(tmp_path: Path) -> None:
    async with Job(tmp_path, None).running() as job:
        ends = {frames.PROCESS_ENDS: '{"2":{"code":1,"cause":"exited with code 1"}}', frames.MAX_RESTARTS: "32767"}
        await say(job.agents[1], "STATUS", 202, FaultReport([2], 32767).encode(), ends)
        for agent in job.agents:
            leave = await hear(agent)
            assert leave.code == 203 and leave.extension is not None
            assert "rank 2 ended" in leave.extension["Reason"] and "error of the script" in leave.extension["Reason"]
        await say(job.agents[0], "STATUS", 202, FaultReport([], 32767).encode(), {})
        end = await asyncio.wait_for(asyncio.shield(job.task), 90)
        assert not end.ok and "an error of the script" in end.reason


class Controller:
    """In the place of the bridge: what the manager asks the MindIO controller."""

    def __init__(self, manager: Manager, found: Progress | None, linked: bool = True) -> None:
        self.found, self._linked = found, linked
        self.close = manager._bridge.close if manager._bridge is not None else None
        manager._bridge = self  # type: ignore[assignment]

    async def linked(self) -> bool:
        return self._linked

    def progress(self) -> Progress | None:
        return self.found

    async def call(self, order: object) -> bool:
        return True


@pytest.mark.usefixtures("environment")
async def test_what_the_controller_will_report_is_left_to_it_and_nothing_else(tmp_path: Path) -> None:
    ends = {frames.PROCESS_ENDS: '{"2":{"code":-9}}'}
    async with Job(tmp_path, None).running() as job:
        bridge = Controller(job.manager, Progress(5, frozenset({0, 1, 2, 3})))
        await say(job.agents[1], "STATUS", 202, FaultReport([2]).encode(), ends)
        bridge.found = Progress(5, frozenset({0, 1, 2}))
        await say(job.agents[1], "STATUS", 202, FaultReport([3]).encode(), {})
        assert await hear(job.agents[1]) == frames.body("ACTION", 209, '["3"]'), "the controller had never heard of it"
        assert job.agents[1].received.empty()


@pytest.mark.usefixtures("environment")
async def test_how_a_process_has_ended_is_waited_for_before_the_first_step(tmp_path: Path) -> None:
    async with Job(tmp_path, None).running() as job:
        Controller(job.manager, Progress(0, frozenset({0, 1, 2, 3})))
        await job.manager._report(Report("process_fault", {2: 1}))
        judged = asyncio.ensure_future(job.manager._report(Report("stop_complete", {2: 1}, 404, "not ready")))
        await say(job.agents[1], "STATUS", 202, FaultReport([2]).encode(), {frames.PROCESS_ENDS: '{"2":{"code":1}}'})
        await judged
        assert (await hear(job.agents[0])).code == 203, "an error of the script"


@pytest.mark.usefixtures("environment")
async def test_it_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "ENDS", 0.1)
    async with Job(tmp_path, None).running() as job:
        Controller(job.manager, Progress(0, frozenset({0, 1, 2, 3})))
        await job.manager._report(Report("process_fault", {2: 1}))
        await job.manager._report(Report("stop_complete", {2: 1}, 404, "not ready"))
        assert (await hear(job.agents[0])).code == 208, "all start again"


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("before", "after"), [('{"RetryTime": 1}', '{"RetryTime": 2}'), ('{"status": "initializing"}', '{"RetryTime": 1}')]
)
async def test_a_deleted_pod_shows_in_the_file_of_the_scheduler(tmp_path: Path, before: str, after: str) -> None:
    job = Job(tmp_path, None, recovers=False)
    job.reset.write_text(before)
    async with job.running():
        await say(job.agents[0], "STATUS", 201, "7", {})
        await hear(job.agents[0])
        job.reset.write_text(after)
        assert [(await hear(agent)).code for agent in job.agents] == [208, 208]


@pytest.mark.usefixtures("environment")
async def test_orders_for_a_pod_that_is_gone_do_not_reach_the_one_that_replaces_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        proxy, agent = job.members[4], job.agents[1]
        await agent.close()
        await proxy.close()
        clusterd.say("faultNodesExit", "fault_nodes_exit", nodeRankIds=["1"])
        clusterd.say("preExitProcess", "pre exit process", faults={0: 1}, nodeRankIds=["0"])
        await hear(job.agents[0])  # so the one before is on its way, and fails
        new = await job.add(1, started=2)
        await say(new, "STATUS", 201, "7", {})
        assert (await hear(new)).code == 210


@pytest.mark.usefixtures("environment")
async def test_they_do_not_reach_it_either_before_it_has_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertrain.taskd.manager.delivery.BETWEEN", 0.5)
    async with cluster(tmp_path) as (clusterd, job):
        proxy, agent = (each for each in job.members[:2])
        await agent.close()
        await proxy.close()
        clusterd.say("faultNodesExit", "fault_nodes_exit", nodeRankIds=["0"])
        above = f"127.0.0.1:{job.manager.port}"
        new = await job._join(Node(Position("Proxy", "0", "2"), listen="127.0.0.1:0", upstream=above))
        successor = await job._join(Node(Position("Agent", "0"), upstream=f"127.0.0.1:{new.port}"))
        with pytest.raises(TimeoutError):
            async with aio.timeout(1.5):
                await successor.received.get()


@pytest.mark.usefixtures("environment")
async def test_orders_for_a_process_that_is_gone_do_not_reach_the_one_that_replaces_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        old = job.workers[1]
        await old.close()
        clusterd.stress({"1": [0], "0": [0]})
        await hear(job.workers[0])
        new = await job._join(Node(old.own, upstream=f"127.0.0.1:{job.members[0].port}"))
        await say(new, "REGISTER", 101)
        clusterd.trace(**dict.fromkeys(("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader"), "on"))
        assert (await hear(new)).code == 711, "and no stress test while it trains"


@pytest.mark.usefixtures("environment")
async def test_whatever_a_member_says_the_manager_hears_the_next_word(tmp_path: Path) -> None:
    async with Job(tmp_path, None, recovers=False).running() as job:
        liar = await job._join(Node(Position("Agent", "9" * 9), upstream=f"127.0.0.1:{job.members[0].port}"))
        for message in ("²", "--5", "9" * 5000, "\x00", "{}", "[" * 10_000, '{"fault_ranks": [1e99]}'):
            for msg_type in ("REGISTER", "STATUS", "ACTION", "KEEP_ALIVE", "?"):
                for code in (0, 101, 201, 202, 203, 204, 205, 1411, -1, 2**31):
                    await say(liar, msg_type, code, message, {"switchNicUUID": message, "stressTestUUID": ""})
        job.manager._mind.heard = lambda *args: 1 / 0  # type: ignore[assignment,method-assign,return-value]
        await say(liar, "KEEP_ALIVE", 0)
        del job.manager._mind.heard
        await say(job.agents[0], "STATUS", 201, "7", {})
        assert (await hear(job.agents[0])).code == 210


@pytest.mark.usefixtures("environment")
async def test_the_manager_ends_with_the_job(tmp_path: Path) -> None:
    async with Job(tmp_path, None).running() as job:
        for agent in job.agents:
            await say(agent, "STATUS", 203, "0", {})
        assert await asyncio.wait_for(job.task, 90) == End("all agents have ended with success")


@pytest.mark.usefixtures("environment")
async def test_an_order_for_more_workers_than_are_told_at_once_reaches_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has its whole time to confirm, however many are told before it: it is told when those have confirmed."""
    monkeypatch.setattr(delivery, "AT_ONCE", 1)
    monkeypatch.setattr(server, "ACK_WAIT", 90.0)
    caplog.set_level(logging.WARNING, "evertrain.taskd.manager.delivery")
    turns = asyncio.Lock()
    async with cluster(tmp_path) as (clusterd, job):
        for worker in job.workers:
            assert worker.client is not None
            monkeypatch.setattr(worker.client, "_received", in_turn(turns, worker.client._received))
        clusterd.switch(["0"], [True])
        for worker in job.workers:
            uuid = ((await hear(worker)).extension or {})["switchNicUUID"]
            await say(worker, "ACTION", 204, "switchOK", {"switchNicUUID": uuid})
        assert (await clusterd.expect("ReplySwitchNicResult")).result is True
    assert not caplog.messages, "nobody has to be told twice"


def in_turn(turns: asyncio.Lock, received: Any) -> Any:
    async def late(message: Any) -> int:
        assert not turns.locked(), "the time of this one runs while another one has not confirmed"
        async with turns:
            await asyncio.sleep(0.1)
            code: int = await received(message)
            return code

    return late
