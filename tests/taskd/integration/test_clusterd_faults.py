"""What ClusterD may do to the manager: go away, be cut off, answer late, talk too fast, talk nonsense, refuse."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from evertrain.taskd.frames import FaultReport
from evertrain.taskd.manager import clusterd as link
from evertrain.taskd.manager import shell
from evertrain.taskd.manager.reports import Report
from evertrain.wire.recover_pb2 import FaultRank, ProcessManageSignal, Status
from tests.taskd.cluster import ScriptedClusterD
from tests.taskd.integration.test_manager import Job, cluster, environment, hear, say, until
from tests.taskd.relay import Relay

__all__ = ["environment"]
pytestmark = pytest.mark.usefixtures("environment")


@contextlib.asynccontextmanager
async def over_a_relay(tmp_path: Path) -> AsyncIterator[tuple[ScriptedClusterD, Relay, Job]]:
    clusterd = ScriptedClusterD()
    await clusterd.start()
    relay = Relay(clusterd.port)
    await relay.start()
    own, clusterd.port = clusterd.port, relay.port
    job = Job(tmp_path, clusterd)
    clusterd.port = own
    try:
        async with job.running():
            await registered(clusterd)
            yield clusterd, relay, job
    finally:
        await relay.stop()
        await clusterd.stop()


async def registered(clusterd: ScriptedClusterD) -> None:
    await clusterd.expect("Init")
    await clusterd.expect("Register")
    await asyncio.wait_for(clusterd.subscribed.wait(), 90)


async def led(clusterd: ScriptedClusterD, job: Job) -> None:
    """Signals reach the agents."""
    clusterd.say("preExitProcess", "pre exit process", uuid=os.urandom(4).hex(), faults={3: 1}, nodeRankIds=["1"])
    assert (await hear(job.agents[1])).code == 213


def quick_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a real outage, but faster."""
    shorter = dict.fromkeys(("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"), 3000)
    shorter |= {"grpc.keepalive_time_ms": 1000, "grpc.min_reconnect_backoff_ms": 300}
    options = [(name, shorter.get(name, value)) for name, value in link._OPTIONS]
    monkeypatch.setattr(link, "_OPTIONS", options)
    monkeypatch.setattr(link, "_HEALTH", 0.5)


async def test_a_line_that_is_cut_without_a_word_is_noticed_and_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_to_notice(monkeypatch)
    async with over_a_relay(tmp_path) as (clusterd, relay, job):
        relay.cut()
        job.manager._reported(Report("process_fault", {3: 1}))
        job.manager._reported(Report("process_fault", {2: 1}))
        await until(lambda: not job.link.subscribed.is_set())
        assert relay.dropped and clusterd.heard.empty()
        clusterd.subscribed.clear()
        relay.mend()
        await registered(clusterd)
        for rank in "32":
            assert [each.rankId for each in (await clusterd.expect("ReportProcessFault")).faultRanks] == [rank]
        await led(clusterd, job)


@pytest.mark.matrix
async def test_a_clusterd_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine answers pings, it does not."""
    monkeypatch.setattr(link, "_HEALTH", 0.2)
    monkeypatch.setattr(link, "_HEALTH_LIMIT", 0.5)
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.late = 3600
        await clusterd.expect("Init")
        clusterd.late = 0
        await clusterd.stop()
        await clusterd.start()
        await registered(clusterd)
        await led(clusterd, job)


async def test_a_health_check_that_fails_in_an_unknown_way_is_a_reason_to_register_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_HEALTH", 0.2)
    async with cluster(tmp_path) as (clusterd, job):

        def broken(*_: object, **__: object) -> None:
            monkeypatch.setattr(job.link._recover, "HealthCheck", whole)
            raise RuntimeError("the channel is in no usable state")

        whole = job.link._recover.HealthCheck
        monkeypatch.setattr(job.link._recover, "HealthCheck", broken)
        await registered(clusterd)
        await led(clusterd, job)


@pytest.mark.matrix
async def test_late_answers_are_waited_for_and_nothing_is_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_HEALTH", 0.2)
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.late = 2.0
        job.manager._reported(Report("process_fault", {3: 1}))
        taken = job.manager._reported(Report("stop_complete", {3: 1}))
        assert taken is not None
        await led(clusterd, job)  # not held up by that
        await asyncio.wait_for(taken, 90)
        assert [clusterd.heard.get_nowait()[0] for _ in range(2)] == ["ReportProcessFault", "ReportStopComplete"]
        assert clusterd.heard.empty() and clusterd.health_checks, "late health checks are no reason to register again"


@pytest.mark.matrix
async def test_a_clusterd_that_is_slow_from_the_beginning(tmp_path: Path) -> None:
    clusterd = ScriptedClusterD()
    clusterd.late = 1.0
    await clusterd.start()
    try:
        async with Job(tmp_path, clusterd).running() as job:
            await registered(clusterd)
            await led(clusterd, job)
    finally:
        await clusterd.stop()


async def test_a_burst_of_signals_keeps_its_order(tmp_path: Path) -> None:
    """The agent's buffer has room for eight; what does not fit is sent again, and nothing overtakes it."""
    async with cluster(tmp_path) as (clusterd, job):
        for number in range(60):
            node = str(number % 2)
            clusterd.say("preExitProcess", "pre exit process", uuid=str(number), faults={number: 1}, nodeRankIds=[node])
        for node in (0, 1):
            got = [(await hear(job.agents[node])).message for _ in range(30)]
            assert got == [f'["{number}"]' for number in range(node, 60, 2)]


async def test_garbage_on_every_stream(tmp_path: Path) -> None:
    chance = random.Random(5)
    async with cluster(tmp_path) as (clusterd, job):
        for _ in range(20):
            clusterd.garbage(b"\x0a\xff" + chance.randbytes(30))
        await led(clusterd, job)
        clusterd.switch(["0"], [True])
        assert (await hear(job.workers[0])).code == 204
        clusterd.stress({"0": [0], "\u00b2": [0], "-1": [0], "9" * 5000: [1]})
        assert (await hear(job.workers[0])).code == 205
        clusterd.trace(CommunicationOperator="on", Step="\u2603")
        assert (await hear(job.workers[0])).code == 711
    assert clusterd.heard.empty(), "it did not even have to register again"


@pytest.mark.matrix
async def test_signals_that_make_no_sense(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        odd = [
            ProcessManageSignal(),
            ProcessManageSignal(uuid="1", jobId="job-1", signalType="no such signal", actions=["stop_train"]),
            ProcessManageSignal(uuid="2", jobId="another", signalType="killMaster"),
            ProcessManageSignal(uuid="3", jobId="job-1", signalType="stopTrain", actions=["x"] * 100_000),
            ProcessManageSignal(uuid="4", jobId="job-1", signalType="changeStrategy", changeStrategy="hope"),
            ProcessManageSignal(
                uuid="5", jobId="job-1", signalType="changeStrategy", changeStrategy="downgrade",
                actions=["change_strategy"], extraParams='{"scale-in-strategy": ',
            ),
            ProcessManageSignal(uuid="6", jobId="job-1", signalType="stopTrain", timeout=-(1 << 62)),
            ProcessManageSignal(
                uuid="7", jobId="job-1", signalType="faultNodesExit", actions=["fault_nodes_exit"],
                nodeRankIds=["-1", "70000", "9" * 400],
            ),
        ]  # fmt: skip
        ranks = [FaultRank(rankId=str(rank), faultType="77") for rank in range(100_000)]
        odd.append(
            ProcessManageSignal(
                uuid="8", jobId="job-1", signalType="stopTrain", actions=["stop_train"], faultRanks=ranks
            )
        )
        for name in ("rankId", "faultType"):
            for value in ("", "one", "-5", "1e3", "9" * 9999):
                fault = FaultRank(**{"rankId": "3", "faultType": "1", name: value})
                odd.append(
                    ProcessManageSignal(
                        uuid=name + value,
                        jobId="job-1",
                        signalType="stopTrain",
                        actions=["stop_train"],
                        faultRanks=[fault],
                    )  # fmt: skip
                )
        for signal in odd:
            clusterd.say_raw(signal)
        await led(clusterd, job)
        clusterd.switch(["0"], [True], job="another")
        clusterd.stress({"0": [0]}, job="another")
        clusterd.switch(["1"], [True])
        order = await hear(job.workers[0])
        assert order.extension and order.extension["globalRankIDs"] == '["1"]'
        assert job.agents[0].received.empty() and not job.task.done() and clusterd.heard.empty()


async def test_a_message_beyond_all_limits_costs_no_more_than_the_stream(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.say("stopTrain", extraParams="x" * (9 << 20))
        await clusterd.expect("Init")
        await clusterd.expect("Register")
        await led(clusterd, job)


async def test_nonsense_as_an_answer(tmp_path: Path) -> None:
    """`Status` whose info is not text."""
    async with cluster(tmp_path) as (clusterd, job):
        job.manager._reported(Report("process_fault", {3: 1}))
        await clusterd.expect("ReportProcessFault")
        clusterd.answers["ReportStopComplete"] = [Status(code=-7, info="\ud7ff")]
        taken = job.manager._reported(Report("stop_complete", {3: 1}))
        assert taken is not None
        await asyncio.wait_for(taken, 90)
        await led(clusterd, job)


async def test_reports_wait_until_clusterd_is_subscribed_to(tmp_path: Path) -> None:
    """It forgets all that went before."""
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.answers["ReportProcessFault"] = [Status(code=400, info="jobId=job-1 not registed")]
        clusterd.answers["Register"] = [Status(code=402, info="not yet"), Status(code=408, info="not yet")]
        clusterd.subscribed.clear()
        job.manager._reported(Report("process_fault", {3: 1}))
        for method in ("ReportProcessFault", "Init", "Register", "Init", "Register", "Init", "Register"):
            await clusterd.expect(method)
        await clusterd.expect("ReportProcessFault")
        assert clusterd.subscribed.is_set()


async def test_reports_do_not_wait_for_the_first_signal_of_a_clusterd_in_go(tmp_path: Path) -> None:
    clusterd = ScriptedClusterD()
    clusterd.greets = False
    await clusterd.start()
    try:
        async with Job(tmp_path, clusterd).running() as job:
            await registered(clusterd)
            job.manager._reported(Report("process_fault", {3: 1}))
            await clusterd.expect("ReportProcessFault")
            await led(clusterd, job)
    finally:
        await clusterd.stop()


async def test_a_report_that_clusterd_can_not_deal_with_does_not_hold_up_the_next_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_LONGEST_PAUSE", 0.01)

    async def crash(clusterd: ScriptedClusterD, request: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.INTERNAL, "panic")

    monkeypatch.setattr(ScriptedClusterD, "ReportStopComplete", crash, raising=False)
    async with cluster(tmp_path) as (clusterd, job):
        job.manager._reported(Report("stop_complete", {3: 1}))
        job.manager._reported(Report("process_fault", {3: 1}))
        await clusterd.expect("ReportProcessFault")


async def test_a_conversation_that_broke_begins_again_with_all_faults(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        job.manager._reported(Report("process_fault", {3: 1}))
        await clusterd.expect("ReportProcessFault")
        await clusterd.stop()
        await until(lambda: not job.link.subscribed.is_set())
        job.manager._reported(Report("stop_complete", {3: 1}))
        job.manager._reported(Report("process_fault", {1: 0}))
        await clusterd.start()
        await registered(clusterd)
        request = await clusterd.expect("ReportProcessFault")
        assert {each.rankId: each.faultType for each in request.faultRanks} == {"1": "0", "3": "1"}
        clusterd.say("changeStrategy", "change_strategy", changeStrategy="retry")
        await led(clusterd, job)
        await clusterd.stop()
        await until(lambda: not job.link.subscribed.is_set())
        await clusterd.start()
        await registered(clusterd)
        job.manager._reported(Report("recover_status", {}, 0, "", strategy="retry"))
        await clusterd.expect("ReportRecoverStatus")


async def test_the_controller_waits_for_a_report_as_long_as_clusterd_is_away(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        await clusterd.stop()
        await until(lambda: not job.link.subscribed.is_set())
        report = asyncio.ensure_future(
            asyncio.to_thread(job.manager._reported_in_thread, Report("process_fault", {3: 1}))
        )
        done, _ = await asyncio.wait({report}, timeout=0.3)
        assert not done, "its patience with ClusterD's answer would begin now"
        await clusterd.start()
        await asyncio.wait_for(report, 90)
        await registered(clusterd)
        await clusterd.expect("ReportProcessFault")


async def test_a_clusterd_that_does_not_lead_makes_pods_the_unit_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_SWITCHED_OFF_PAUSE", 0.2)
    clusterd = ScriptedClusterD()
    clusterd.init_code = 403
    await clusterd.start()
    try:
        async with Job(tmp_path, clusterd).running() as job:
            await clusterd.expect("Init")
            for agent in job.agents:
                await say(agent, "STATUS", 201, "7", {})
                await hear(agent)
            await say(job.agents[1], "STATUS", 202, FaultReport([2], 7).encode(), {"REPORT_FAULT_TIME": "1"})
            assert (await hear(job.agents[1])).code == 203
            assert (await hear(job.agents[0])).code == 208
            clusterd.init_code = 0
            await asyncio.wait_for(clusterd.subscribed.wait(), 90)
            await until(lambda: job.manager._mind.pods.recovers_processes)
    finally:
        await clusterd.stop()


async def test_the_last_reports_are_sent_before_the_manager_ends(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (clusterd, job):
        clusterd.late = 0.3
        job.manager._reported(Report("process_fault", {3: 1}))
        job.manager._reported(Report("stop_complete", {3: 1}))
        job.manager.stop("now")
        await asyncio.wait_for(job.task, 90)
        assert [clusterd.heard.get_nowait()[0] for _ in range(2)] == ["ReportProcessFault", "ReportStopComplete"]


async def test_the_manager_ends_without_a_clusterd_to_report_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shell, "FAREWELL", 0.3)
    async with cluster(tmp_path) as (clusterd, job):
        await clusterd.stop()
        job.manager._reported(Report("process_fault", {3: 1}))
        with caplog.at_level(logging.WARNING):
            job.manager.stop("now")
            await asyncio.wait_for(job.task, 90)
    assert "has not got the last reports" in caplog.text
