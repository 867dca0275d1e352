"""Restarts of pods and of the whole job (reference 7.1, 7.6, 7.7): who is told what, and where the training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.harness import ROOT
from tests.taskd.documents import START
from tests.taskd.e2e.led import (
    BY_STRATEGY,
    Led,
    assert_controlled,
    end_of,
    exit_of,
    led,
    restart_of,
    start_of,
    told_to_exit,
)
from tests.taskd.e2e.test_chain import STEPS, assert_same_end

pytestmark = pytest.mark.matrix

PODS_ONLY = {"PROCESS_RECOVER": "off", "HIGH_AVAILABILITY": "", "ENABLE_RESTART_FAULT_PROCESS": "off"}
SAVES = "--checkpoint-every=5"
PLAIN = ROOT / "tests" / "taskd" / "e2e" / "scripts" / "plain_job.py"


async def begins_without_recovery(job: Led, *args: str) -> None:
    """ClusterD has nothing to say to such a job."""
    job.clusterd.init_code = 403
    for node in (0, 1):
        job.start(node, SAVES, *args)
    await job.expect("Init")


def replaced(job: Led, times: int) -> None:
    """The scheduler counts a pod that it has replaced."""
    folder = Path(job.pods.environment["TASKD_RESET_DIR"])
    folder.mkdir(exist_ok=True)
    (folder / "next").write_text(json.dumps({"RankList": [], "RetryTime": times}))
    (folder / "next").rename(folder / "reset.json")


async def test_a_fault_replaces_its_pod_and_restarts_the_others(tmp_path: Path) -> None:
    """7.1, steps 2b to 4."""
    async with led(tmp_path / "job", TASKD_RESET_DIR=str(tmp_path / "reset"), **PODS_ONLY) as job:
        replaced(job, 0)
        await begins_without_recovery(job, "--fault=6:3:kill")
        await job.exits(1)
        replaced(job, 1)
        job.start(1, SAVES)
        result = await job.ends()
    assert_same_end(result, again_from=6)
    assert job.story.agent(1) == [*start_of(1), *exit_of(1), *start_of(1, 32766), end_of(1)]
    other = [*start_of(0), *restart_of(0, 32766), end_of(0)]
    assert job.story.agent(0) == other, "the scheduler's count has restarted nobody again"
    for order in (told_to_exit(1), "Mgr orders Agent 0: 208 32766"):
        job.story.assert_order("Agent 1 says STATUS 202 [3]", order)
    assert_controlled(job, "restart_controller")


async def test_a_pod_that_was_deleted_restarts_the_others(tmp_path: Path) -> None:
    """7.1, step 5: nobody reports anything; the scheduler counts. The file appears with the first count."""
    async with led(tmp_path / "job", TASKD_RESET_DIR=str(tmp_path / "reset"), **PODS_ONLY) as job:
        await begins_without_recovery(job, "--fault=7:0:hold")
        await job.done(7)
        job.pods.delete(job.pods.pods[1])
        replaced(job, 1)
        await job.heard("Agent 0 confirms 208")
        job.start(1, SAVES)
        job.go()
        result = await job.ends()
    assert_same_end(result, again_from=6)
    # The manager may not have noticed yet that the pod is gone; an order that somebody hears is also confirmed.
    heard = [line for line in job.story.agent(1) if line != "Mgr orders Agent 1: 208 32766"]
    assert heard == [*start_of(1), *start_of(1, 32766), end_of(1)]
    assert job.story.agent(0) == [*start_of(0), *restart_of(0, 32766), end_of(0)]
    assert_controlled(job, "restart_controller")


async def test_a_training_without_mindio(tmp_path: Path) -> None:
    """7.1 with `TASKD_PROCESS_ENABLE=off`: no controller, and ClusterD is not asked for signals."""
    start = START.replace('TASKD_PROCESS_ENABLE="on"', 'TASKD_PROCESS_ENABLE="off"')
    async with led(tmp_path / "job", start=start, script=PLAIN, **PODS_ONLY) as job:
        for node in (0, 1):
            job.start(node, SAVES, "--fault=7:3:kill")
        await job.exits(1)
        job.start(1, SAVES)
        result = await job.ends()
    assert result.codes == [0, 0], result.explain()
    weights = [1] * 4
    for step in range(STEPS):
        gradient = [sum((each + step) * (rank + 1) % 1009 for rank in range(4)) for each in weights]
        weights = [(each * 3 + more) % 10007 for each, more in zip(weights, gradient, strict=True)]
    assert {rank: each["weights"] for rank, each in result.results.items()} == dict.fromkeys(range(4), weights)
    assert [step for (step,) in result.steps[3]] == [*range(1, 8), *range(6, STEPS + 1)]
    assert job.story.agent(1) == [*start_of(1), *exit_of(1), *start_of(1, 32766), end_of(1)]
    job.story.assert_order("Agent 1 says STATUS 202 [3]", told_to_exit(1))
    assert job.controlled() == [], "there is none"
    assert job.story.agent(0) == [*start_of(0), *restart_of(0, 32766), end_of(0)]
    heard = {line.removeprefix("ClusterD hears ") for line in job.story.of("ClusterD hears")}
    assert heard == {"SubscribeNotifySwitch", "SubscribeNotifyExecStressTest", "SubscribeDataTraceSwitch"}


async def restarts_whole(job: Led) -> None:
    """The first pod has ended; the cluster ends the others and starts all again."""
    job.pods.delete(job.pods.pods[1])
    job.pods.environment["RUN_ID"] = "2"
    for node in (0, 1):
        job.start(node, SAVES)


async def begins_anew(job: Led) -> None:
    """As a whole, with a new manager."""
    await restarts_whole(job)
    for method in ("Init", "Register"):
        await job.expect(method)


async def test_a_fault_in_the_first_pod_ends_it_and_the_job_starts_again(tmp_path: Path) -> None:
    """7.1, step 2a."""
    async with led(tmp_path / "job", **PODS_ONLY) as job:
        await begins_without_recovery(job, "--fault=6:0:kill")
        await job.exits(0)
        before = len(job.story.lines)
        await restarts_whole(job)
        result = await job.ends()
    assert_same_end(result, again_from=6)
    assert job.story.agent(0, before) == [*start_of(0), *exit_of(0)]
    job.story.assert_order("Agent 0 says STATUS 202 [0]", told_to_exit(0))
    assert job.story.lines[before:].count("Mgr orders Agent 0: 210 32767") == 1, "a new manager counts anew"


async def test_when_the_restarts_are_used_up_all_agents_exit(tmp_path: Path) -> None:
    """7.1, step 6."""
    start = START.replace("--max_restarts 32767", "--max_restarts 1")
    async with led(tmp_path / "job", start=start, **PODS_ONLY) as job:
        await begins_without_recovery(job, "--fault=2:3:kill")
        await job.exits(1)
        job.start(1, "--fault=3:3:kill", SAVES)
        await job.exits(1)
        await job.exits(0)
    agent = [*start_of(1, 1, given=1), *exit_of(1), *start_of(1, 0, given=1), *exit_of(1)]
    assert job.story.agent(1) in (agent, agent[:-1]), "the manager ends with the first pod, maybe before it"
    assert job.story.lines.count("Agent 1 says STATUS 202 [3]") == 2
    farewell = "Agent 0 says STATUS 202 []"
    assert job.story.agent(0) == [*start_of(0, 1, given=1), *restart_of(0, 0), *restart_of(0, -1), farewell]
    assert job.controlled()[:2] == ["restart_controller"] * 2


async def test_the_strategy_exit(tmp_path: Path) -> None:
    """7.6."""
    async with led(tmp_path / "job") as job:
        await job.begins(SAVES, "--fault=6:3:kill")
        await job.stops({3: 1})
        job.clusterd.say("globalFault", "on_global_rank", faults={3: 1})
        assert "exit" in await job.offered({3: 1})
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="exit", nodeRankIds=["1"])
        await job.exits(1)
        job.start(1, SAVES)
        result = await job.ends()
    assert_same_end(result, again_from=6)
    for order in (told_to_exit(1, BY_STRATEGY), "Mgr orders Agent 0: 208 32766"):
        job.story.assert_order("ClusterD says changeStrategy exit change_strategy", order)
    assert job.story.agent(1) == [*start_of(1), *exit_of(1, BY_STRATEGY), *start_of(1, 32766), end_of(1)]
    assert job.story.agent(0) == [*start_of(0), *restart_of(0, 32766), end_of(0)]
    assert_controlled(job, "stop_train {3: 1}", "on_global_rank {3: 1}", "change_strategy exit", "restart_controller")


async def test_kill_master(tmp_path: Path) -> None:
    """7.7, in the middle of a recovery: the stop of the training holds nothing up."""
    async with led(tmp_path / "job") as job:
        await job.begins(SAVES, "--fault=6:3:kill")
        await job.stops({3: 1})
        job.clusterd.say("killMaster")
        await job.exits(0)
        before = len(job.story.lines)
        await begins_anew(job)
        result = await job.ends()
    assert_same_end(result, again_from=6)
    assert job.story.agent(0, before) == [*start_of(0), *exit_of(0)]
    job.story.assert_order("ClusterD says killMaster", told_to_exit(0), "Agent 0 says STATUS 202 []")
    assert job.controlled()[:2] == ["stop_train {3: 1}", "destroy_controller"]
