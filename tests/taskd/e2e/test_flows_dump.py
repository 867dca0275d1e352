"""The dying gasp on ClusterD's order (reference 7.5a, 7.12): a checkpoint of this step, exit, and on from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.taskd.e2e.led import Led, assert_controlled, assert_second_node_replaced, led, reported_ranks
from tests.taskd.e2e.test_chain import assert_same_end

pytestmark = pytest.mark.matrix

DUMP_ONLY = {"HIGH_AVAILABILITY": "dump", "ENABLE_RESTART_FAULT_PROCESS": "off"}


async def saves_and_starts_again(job: Led) -> None:
    """From `saveAndExit` to a new pod for node 1."""
    job.clusterd.say("saveAndExit", "save_and_exit", nodeRankIds=["1"])
    await job.succeeded("dump")
    await job.exits(1)
    job.clusterd.say(
        "changeStrategy", "change_strategy", changeStrategy="exit", extraParams="dump_exit", nodeRankIds=["1"]
    )
    await job.heard("Mgr orders Agent 0: 208 32766")
    job.go()
    job.start(1)


def assert_told(job: Led) -> None:
    job.story.assert_order(
        "ClusterD says saveAndExit save_and_exit",
        "Mgr orders Agent 1: 203",
        "ClusterD says changeStrategy exit change_strategy",
        "Mgr orders Agent 0: 208 32766",
        "Mgr orders Agent 1: 210 32766",
    )
    assert_second_node_replaced(job, "")
    assert_controlled(job, "save_and_exit", "change_strategy exit", "restart_controller")


async def test_a_fault_is_answered_with_save_and_exit(tmp_path: Path) -> None:
    """7.5a: no strategy but `dump` is configured."""
    async with led(tmp_path / "job", **DUMP_ONLY) as job:
        await job.begins("--fault=6:3:kill")
        assert reported_ranks(await job.expect("ReportProcessFault")) == {3: 1}
        await saves_and_starts_again(job)
        result = await job.ends()
    assert_same_end(result)
    assert_told(job)
    job.story.assert_order("ClusterD hears ReportProcessFault", "ClusterD says saveAndExit save_and_exit")


async def test_a_job_on_a_weak_node_saves_and_moves(tmp_path: Path) -> None:
    """7.12: nothing has failed yet. What the scheduler writes for a graceful exit is not for these agents."""
    reset = tmp_path / "reset"
    async with led(tmp_path / "job", TASKD_RESET_DIR=str(reset), **DUMP_ONLY) as job:
        reset.mkdir()
        (reset / "reset.json").write_text(json.dumps({"GracefulExit": 1, "RetryTime": 0}))
        await job.begins("--fault=6:0:hold")
        await job.done(6)
        assert [line for line in job.story.lines if "orders" in line] == [
            line for line in job.story.lines if ": 210" in line
        ]
        await saves_and_starts_again(job)
        result = await job.ends()
    assert_same_end(result)
    assert_told(job)
