"""ClusterD goes away, is cut off, answers late, talks too fast or talks nonsense while a job of two pods trains."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from evertrain.wire.recover_pb2 import FaultRank, ProcessManageSignal
from tests.taskd.e2e.led import Led, led
from tests.taskd.e2e.test_chain import STEPS, assert_same_end
from tests.taskd.e2e.test_manager_killed import assert_recovered_in_place
from tests.taskd.paced import Pace, paced
from tests.taskd.relay import Relay

pytestmark = pytest.mark.matrix


@contextlib.asynccontextmanager
async def trains(folder: Path, *args: str, fault_at: int = 0) -> AsyncIterator[tuple[Led, Pace, Relay]]:
    """A job that has done three steps. Rank 3 dies before its next one after `fault_at`."""
    async with led(folder) as job:
        relay = Relay(job.clusterd.port)
        await relay.start()
        job.pods.environment["MINDX_SERVER_PORT"] = str(relay.port)
        pace = paced(job.pods)
        try:
            await job.begins(*args, *([f"--fault={fault_at}:3:kill"] if fault_at else []))
            await pace.to(3)
            yield job, pace, relay
        finally:
            await relay.stop()


async def registers(job: Led) -> None:
    for method in ("Init", "Register"):
        await job.expect(method)


async def test_clusterd_is_restarted(tmp_path: Path) -> None:
    async with trains(tmp_path / "job", fault_at=9) as (job, pace, _):
        for step in (6, 9):
            await job.clusterd.stop()
            await pace.to(step)
            await job.clusterd.start()
            await registers(job)
        pace.allow(STEPS)
        await job.recovers_in_place()
        result = await job.ends()
    assert_recovered_in_place(result)


async def test_clusterd_is_cut_off_for_30_seconds(tmp_path: Path) -> None:
    async with trains(tmp_path / "job", fault_at=9) as (job, pace, relay):
        relay.cut()
        cut = asyncio.ensure_future(asyncio.sleep(30))
        await pace.to(6)
        await cut
        assert relay.dropped
        relay.mend()
        await registers(job)
        await pace.to(9)
        pace.allow(STEPS)
        await job.recovers_in_place()
        result = await job.ends()
    assert_recovered_in_place(result)


async def test_a_fault_while_clusterd_is_cut_off(tmp_path: Path) -> None:
    """It takes longer than the controller's patience with ClusterD."""
    async with trains(tmp_path / "job", fault_at=3) as (job, pace, relay):
        relay.cut()
        pace.allow(STEPS)
        await asyncio.sleep(35)
        relay.mend()
        await registers(job)
        await job.recovers_in_place()
        result = await job.ends()
    assert_recovered_in_place(result)


async def test_clusterd_is_cut_off_in_the_middle_of_a_recovery(tmp_path: Path) -> None:
    """It forgets what it was told. The conversation begins anew."""
    async with trains(tmp_path / "job", fault_at=3) as (job, pace, relay):
        pace.allow(STEPS)
        await job.expect("ReportProcessFault")
        relay.cut()
        job.clusterd.say("stopTrain", "stop_train", faults={3: 1})
        await asyncio.sleep(5)
        relay.mend()
        await registers(job)
        await job.recovers_in_place()
        result = await job.ends()
    assert_recovered_in_place(result)


async def test_every_answer_is_late(tmp_path: Path) -> None:
    async with trains(tmp_path / "job", fault_at=6) as (job, pace, _):
        job.clusterd.late = 12.0
        await pace.to(6)
        pace.allow(STEPS)
        await job.recovers_in_place()
        job.clusterd.late = 0.0
        result = await job.ends()
    assert_recovered_in_place(result)


async def test_signals_come_in_a_burst(tmp_path: Path) -> None:
    async with trains(tmp_path / "job") as (job, pace, _):

        def chatter() -> None:
            for _ in range(100):
                job.clusterd.say("keep-alive")
                job.clusterd.say("pauseStartAgent", "pause_start_agent")
                job.clusterd.say("continueStartAgent", "continue_start_agent")
                job.clusterd.say("preExitProcess", "pre exit process", nodeRankIds=["0", "1"])

        chatter()
        job.clusterd.say("stopTrain", "pause_train", uuid="pause")
        chatter()
        await job.told_to_halt(4)
        pace.allow(STEPS)
        paused = await job.expect("ReportStopComplete")
        assert (paused.status.code, paused.status.info) == (0, "pause complete")
        chatter()
        job.clusterd.say("changeStrategy", "change_strategy", uuid="go", changeStrategy="continue")
        chatter()
        await job.succeeded("continue")
        result = await job.ends()
    assert_same_end(result)


async def test_garbage(tmp_path: Path) -> None:
    chance = random.Random(7)
    async with trains(tmp_path / "job", fault_at=6) as (job, pace, _):

        def garbage() -> None:
            for _ in range(20):
                job.clusterd.garbage(b"\x0a\xff" + chance.randbytes(40))
            ranks = [FaultRank(rankId=str(rank), faultType="77") for rank in range(50_000)]
            for signal in (
                ProcessManageSignal(uuid="1", jobId="job-1", signalType="no such signal"),
                ProcessManageSignal(uuid="2", jobId="another", signalType="killMaster"),
                ProcessManageSignal(uuid="3", jobId="job-1", signalType="stopTrain", actions=["x"] * 50_000),
                ProcessManageSignal(uuid="4", jobId="job-1", signalType="changeStrategy", changeStrategy="hope"),
                ProcessManageSignal(
                    uuid="5", jobId="job-1", signalType="stopTrain", actions=["stop_train"], faultRanks=ranks
                ),
                ProcessManageSignal(
                    uuid="6", jobId="job-1", signalType="faultNodesExit", actions=["fault_nodes_exit"],
                    nodeRankIds=["-1", "70000", "x"],
                ),
            ):  # fmt: skip
                job.clusterd.say_raw(signal)
            job.clusterd.switch(["0"], [True], job="another")
            job.clusterd.stress({"\u00b2": [0]}, job="another")

        garbage()
        await pace.to(6)
        pace.allow(STEPS)
        garbage()
        await job.recovers_in_place()
        garbage()
        result = await job.ends()
    assert_recovered_in_place(result)
