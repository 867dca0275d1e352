"""Elastic training (reference 7.11): the job goes on without a pod, grows when it is back, or meets another fault."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evertrain import aio
from tests.taskd.e2e.led import (
    AT_FAULT,
    LIMIT,
    Led,
    _has,
    assert_controlled,
    end_of,
    exit_of,
    led,
    restart_of,
    start_of,
    told_to_exit,
)
from tests.taskd.e2e.test_chain import STEPS, undisturbed_run
from tests.taskd.jobs import Result, TwoPods

IN, OUT = '{"scale-in-strategy": "DP"}', '{"scale-out-strategy": "DP"}'
ELASTIC = {"HIGH_AVAILABILITY": "elastic-training", "ENABLE_RESTART_FAULT_PROCESS": "off"}
LOST = {2: 1, 3: 1}
SCALED_IN = 'faultNodesExit ["fault_nodes_exit"]'
SHRUNK = ("stop_train {3: 1}", "on_global_rank {2: 1, 3: 1}", f"change_strategy downgrade {IN}")
"""What the controller is called for when a job shrinks."""


def assert_samples(result: Result, small: range) -> None:
    """Every step has the samples of an undisturbed run, none lost and none twice; in `small` two ranks share them."""
    assert result.codes == [0, 0], result.explain()
    whole = undisturbed_run()
    for step in range(1, STEPS + 1):
        now, then = (
            {rank: record[1:] for rank, records in run.steps.items() for record in records if record[0] == step}
            for run in (result, whole)
        )
        assert sorted(now) == ([0, 1] if step in small else [0, 1, 2, 3]), f"step {step}"
        samples = [sorted(sample for batch, *_ in ranks.values() for sample in batch) for ranks in (now, then)]
        assert samples[0] == samples[1], f"step {step}"
        loss, expected = now[0][1], then[0][1]
        assert abs(loss - expected) <= 1e-4 * max(1.0, abs(expected)), f"step {step}: only the order of sums differs"
    for rank, records in result.steps.items():
        seen = [record[0] for record in records]
        assert seen == sorted(set(seen)), f"rank {rank} did a step twice: {seen}"
    assert len({each["weights"] for each in result.results.values()}) == 1 and len(result.results) == 4


async def isolated(job: Led) -> None:
    """The controller says who has to leave."""
    status = await job.expect("ReportRecoverStatus")
    assert (status.status.code, status.strategy) == (201, "downgrade")
    assert sorted(status.isolateRankIds) == ["2", "3"]


async def shrinks(job: Led, *args: str, exits: bool = False) -> None:
    """From the start of a job, over a fault in its second pod, to the controller's word who has to leave. With `exits`
    the pod ends before that."""
    await job.begins(*args)
    await job.stops({3: 1})
    if exits:
        job.clusterd.say("globalFault", "on_global_rank", "fault_nodes_exit", faults=LOST, nodeRankIds=["1"])
        await job.exits(1)
    else:
        job.clusterd.say("globalFault", "on_global_rank", faults=LOST)
    assert "downgrade" in await job.offered(LOST)
    job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="downgrade", extraParams=IN, faults=LOST)
    await isolated(job)


async def test_no_new_pod_in_time_then_smaller_then_whole_again(tmp_path: Path) -> None:
    async with led(tmp_path / "job", **ELASTIC) as job:
        await job.begins("--fault=6:3:kill", "--fault=10:0:hold", "--fault=10:1:hold")
        await job.stops({3: 1})
        job.clusterd.say("globalFault", "on_global_rank", "fault_nodes_exit", faults=LOST, nodeRankIds=["1"])
        await job.exits(1)
        assert {"recover", "downgrade"} <= set(await job.offered(LOST))
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="recover", faults=LOST)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="downgrade", extraParams=IN, faults=LOST)
        await isolated(job)
        await job.succeeded("downgrade")
        await job.done(10, 0, 1)
        job.start(1)
        await job.heard("Agent 1 confirms 210", times=2)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="upgrade", extraParams=OUT)
        await job.succeeded("upgrade")
        result = await job.ends()
    assert_samples(result, small=range(7, 11))
    for rank in (0, 1):
        assert len({pid for _, pid in result.events[rank]}) == 1, "it kept its process"
        names = [name for name, _ in result.events[rank]]
        assert [name for name in names if "grade" in name] == ["downgrade_rebuild", "upgrade_rebuild"]
    assert job.story.of("Agent 0") == [*start_of(0), end_of(0)]
    assert job.story.agent(1) == [*start_of(1), *exit_of(1, AT_FAULT), *start_of(1), end_of(1)]
    job.story.assert_order(
        "ClusterD says changeStrategy downgrade change_strategy",
        "ClusterD hears ReportRecoverStatus downgrade 201",
        "ClusterD hears ReportRecoverStatus downgrade 0",
        *start_of(1),
        "ClusterD says changeStrategy upgrade change_strategy",
        "ClusterD hears ReportRecoverStatus upgrade 0",
    )
    assert_controlled(
        job, *SHRUNK[:2], "change_strategy recover", SHRUNK[2], f"change_strategy upgrade {OUT}"
    )  # fmt: skip


@pytest.mark.matrix
async def test_without_clusterd_the_manager_has_the_job_shrink_and_grow(tmp_path: Path) -> None:
    pods = TwoPods(tmp_path / "job", **ELASTIC)
    try:
        for node in (0, 1):
            pods.start(node, f"--steps={STEPS}", "--fault=6:3:kill", "--fault=10:0:hold", "--fault=10:1:hold")
        assert await asyncio.to_thread(pods.pods[1].wait, LIMIT) == 1
        async with aio.timeout(LIMIT):
            while not all(_has(pods.work / f"steps.{rank}", 10) for rank in (0, 1)):
                await asyncio.sleep(0.05)
        pods.start(1, f"--steps={STEPS}")
        result = await asyncio.to_thread(pods.wait)
    finally:
        pods.end()
    assert_samples(result, small=range(7, 11))
    for rank in (0, 1):
        assert len({pid for _, pid in result.events[rank]}) == 1, "it kept its process"


@pytest.mark.matrix
async def test_another_fault_while_the_job_is_smaller(tmp_path: Path) -> None:
    """Isolated pods leave on `faultNodesExit`. What is left can only save and start again, with all pods."""
    async with led(tmp_path / "job", **ELASTIC) as job:
        await shrinks(job, "--fault=6:3:kill", "--fault=9:1:network")
        job.clusterd.say("faultNodesExit", "fault_nodes_exit", nodeRankIds=["1"])
        await job.succeeded("downgrade")
        await job.exits(1)
        await job.stops({1: 2})
        job.clusterd.say("globalFault", "on_global_rank", faults={1: 2})
        assert await job.offered({1: 2}) == ["exit", "dump"]
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="dump")
        await job.succeeded("dump")
        job.clusterd.say(
            "changeStrategy", "change_strategy", changeStrategy="exit", extraParams="dump_exit", nodeRankIds=["1"]
        )
        await job.heard("Agent 0 confirms 208")
        job.start(1)
        result = await job.ends()
    assert_samples(result, small=range(7, 10))
    job.story.assert_order(
        "ClusterD hears ReportRecoverStatus downgrade 201",
        "ClusterD says faultNodesExit fault_nodes_exit",
        told_to_exit(1, SCALED_IN),
        "ClusterD hears ReportProcessFault",
        "ClusterD says stopTrain stop_train",
        "ClusterD hears ReportRecoverStatus dump 0",
        *restart_of(0, 32766),
        *start_of(1, 32766),
    )
    agent = [*start_of(1), *exit_of(1, SCALED_IN), *start_of(1, 32766), end_of(1)]
    assert job.story.agent(1) == agent, "the new pod is not told to exit"
    assert_controlled(
        job, *SHRUNK, "stop_train {1: 2}", "on_global_rank {1: 2}", "change_strategy dump", "change_strategy exit",
        "restart_controller",
    )  # fmt: skip
