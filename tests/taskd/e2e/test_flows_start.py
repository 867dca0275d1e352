"""How a job starts, message by message, and how a process that the cluster gives up is ended and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.taskd import frames
from tests.taskd.e2e.led import (
    AT_FAULT,
    assert_controlled,
    end_of,
    exit_of,
    led,
    reported_ranks,
    start_of,
    told_to_exit,
)
from tests.taskd.e2e.test_chain import assert_same_end

pytestmark = pytest.mark.matrix

SUBSCRIPTIONS = (
    "SubscribeProcessManageSignal",
    "SubscribeNotifySwitch",
    "SubscribeNotifyExecStressTest",
    "SubscribeDataTraceSwitch",
)


async def test_a_job_starts(tmp_path: Path) -> None:
    """Reference 7.0."""
    async with led(tmp_path / "job", TASKD_WARM_SPARES=None) as job:
        await job.begins("--pace=0.1")
        result = await job.ends()
    assert_same_end(result)
    story = job.story
    for node in (0, 1):
        story.assert_order(f"Proxy {node} registers", *start_of(node), end_of(node))
        story.assert_order(f"Proxy {node} listens", f"Mgr orders Agent {node}: 210 32767")
        assert story.of(f"Agent {node}") == [*start_of(node), end_of(node)], "nothing else was said"
        assert job.tap.alive[f"Agent {node}"] >= 2, "a sign of life each second"
    story.assert_order("ClusterD hears Init", "ClusterD hears Register", "ClusterD hears SubscribeProcessManageSignal")
    heard = [line for line in story.lines if line.startswith("ClusterD hears")]
    assert sorted(heard) == sorted(f"ClusterD hears {each}" for each in ("Init", "Register", *SUBSCRIPTIONS))
    for message in job.tap.messages:
        header, body = message.header, frames.decode(message.body)
        assert header.sync and header.uuid
        assert header.mtype == ("DEFAULT" if header.src.role == "Agent" else "default")
        assert {header.src.processRank, header.dst.processRank} == {"-1"}
        assert body.extension == (None if header.src.role == "Mgr" else {})
    assert_controlled(job)


async def test_the_processes_of_a_broken_device_are_ended_first(tmp_path: Path) -> None:
    """Reference 7.2 from step 1: `preExitProcess`, then a new pod."""
    async with led(tmp_path / "job") as job:
        await job.begins("--fault=6:3:hold")
        await job.done(6)
        faults = {2: 1, 3: 1}
        job.clusterd.say("preExitProcess", "pre exit process", faults=faults, nodeRankIds=["1"])
        reported = await job.expect("ReportProcessFault")
        assert reported_ranks(reported) and reported_ranks(reported).items() <= faults.items()
        job.clusterd.say("stopTrain", "stop_train", faults=faults)
        await job.stopped(faults)
        job.clusterd.say("globalFault", "on_global_rank", "fault_nodes_exit", faults=faults, nodeRankIds=["1"])
        await job.exits(1)
        method, request = await job.hears("ReportRecoverStrategy")
        if method == "ReportProcessFault":  # the controller may have missed one of them later than the other
            request = await job.expect("ReportRecoverStrategy")
        assert "recover" in request.strategies and reported_ranks(request) == faults
        job.go()
        job.start(1, address=9)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="recover", faults=faults)
        await job.succeeded("recover")
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1)), "they kept their processes"
    ended = ('Mgr orders Agent 1: 213 ["2","3"]', "Agent 1 confirms 213")
    assert job.story.agent(1) == [*start_of(1), *ended, *exit_of(1, AT_FAULT), *start_of(1), end_of(1)]
    job.story.assert_order(ended[0], "Agent 1 says STATUS 202 [2, 3]")  # the end of both
    assert job.story.of("Agent 0") == [*start_of(0), end_of(0)], "nobody has anything to say to the other pod"
    job.story.assert_order(
        "ClusterD says preExitProcess pre exit process",
        'Mgr orders Agent 1: 213 ["2","3"]',
        "ClusterD hears ReportProcessFault",
        "ClusterD says stopTrain stop_train",
        "ClusterD hears ReportStopComplete 0",
        "ClusterD says globalFault on_global_rank fault_nodes_exit",
        told_to_exit(1, AT_FAULT),
        "ClusterD hears ReportRecoverStrategy",
        "ClusterD says changeStrategy recover change_strategy",
        "ClusterD hears ReportRecoverStatus recover 0",
    )
    assert_controlled(job, "stop_train {2: 1, 3: 1}", "on_global_rank {2: 1, 3: 1}", "change_strategy recover")
