"""The flows through TaskD, message by message: a ClusterD that follows a script leads a real job of two pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.taskd.e2e.led import (
    AT_FAULT,
    BY_STRATEGY,
    FAULT,
    assert_controlled,
    assert_second_node_replaced,
    end_of,
    exit_of,
    led,
    reported_ranks,
    start_of,
    told_to_exit,
)
from tests.taskd.e2e.test_chain import STEPS, assert_same_end
from tests.taskd.e2e.test_flows_pods import SAVES
from tests.taskd.jobs import example_with

MACHINE_CHECK = """
import signal
from tests.taskd.dying import fault

train.FAULTS["memory"] = lambda job: fault(signal.SIGBUS, 4)
"""


async def test_recover_in_place(tmp_path: Path) -> None:
    async with led(tmp_path / "job") as job:
        await job.begins("--fault=6:3:kill")
        await job.recovers_in_place()
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1, 2)), "they kept their processes"
    ordered = ('Mgr orders Agent 1: 209 ["3"]', "Agent 1 confirms 209")
    assert job.story.of("Agent 0") == [*start_of(0), end_of(0)]
    assert job.story.agent(1) == [*start_of(1), *ordered, end_of(1)]
    assert job.story.lines.count("Agent 1 says STATUS 202 [3]") == 1
    job.story.assert_order(
        "ClusterD hears ReportProcessFault",
        "ClusterD says stopTrain stop_train",
        "ClusterD hears ReportStopComplete 0",
        "ClusterD says globalFault on_global_rank",
        "ClusterD hears ReportRecoverStrategy",
        "ClusterD says changeStrategy recover change_strategy fault_nodes_restart",
        *ordered,
        "ClusterD hears ReportRecoverStatus recover 0",
    )
    assert_controlled(job, "stop_train {3: 1}", "on_global_rank {3: 1}", "change_strategy recover")


@pytest.mark.matrix
async def test_broken_memory_is_reported_as_such(tmp_path: Path) -> None:
    """Reference 7.3 for a process that a machine check has killed: its agent knows of what, and says so before the
    controller reports that it is gone."""
    script = example_with(MACHINE_CHECK, tmp_path / "broken.py")
    async with led(tmp_path / "job", script=script, TASKD_WARM_SPARES=None) as job:
        await job.begins("--fault=6:3:memory")
        await job.recovers_in_place({3: 0})
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1, 2)), "they kept their processes"
    job.story.assert_order("Agent 1 says STATUS 202 [3]", "ClusterD hears ReportProcessFault")
    assert_controlled(job, "stop_train {3: 0}", "on_global_rank {3: 1}", "change_strategy recover")


@pytest.mark.matrix
async def test_recover_with_a_new_pod_at_another_address(tmp_path: Path) -> None:
    """Reference 7.2."""
    async with led(tmp_path / "job", TASKD_WARM_SPARES=None) as job:
        await job.begins("--fault=6:3:kill")
        await job.recovers_with_a_new_pod()
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1)), "they kept their processes"
    assert job.story.of("Agent 0") == [*start_of(0), end_of(0)]
    assert job.story.agent(1) == [*start_of(1), *exit_of(1, AT_FAULT), *start_of(1), end_of(1)]
    assert_controlled(job, "stop_train {3: 1}", "on_global_rank {2: 1, 3: 1}", "change_strategy recover")


@pytest.mark.matrix
async def test_recover_with_a_pod_that_leaves_with_the_strategy(tmp_path: Path) -> None:
    """Reference 7.2, step 6: its pod is the one that it was, and has to go before the others hear what follows."""
    async with led(tmp_path / "job") as job:
        await job.begins("--fault=6:3:kill")
        await job.stops({3: 1})
        faults = {2: 1, 3: 1}
        job.clusterd.say("globalFault", "on_global_rank", faults=faults)
        assert "recover" in await job.offered(faults)
        job.clusterd.say(
            "changeStrategy", "change_strategy", changeStrategy="recover", faults=faults, nodeRankIds=["1"]
        )
        await job.exits(1)
        job.start(1, address=9)
        await job.succeeded("recover")
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1)), "they kept their processes"
    assert job.story.of("Agent 0") == [*start_of(0), end_of(0)]
    assert job.story.agent(1) == [*start_of(1), *exit_of(1, BY_STRATEGY), *start_of(1), end_of(1)]
    job.story.assert_order(
        "ClusterD hears ReportRecoverStrategy",
        "ClusterD says changeStrategy recover change_strategy",
        told_to_exit(1, BY_STRATEGY),
        *start_of(1),
        "ClusterD hears ReportRecoverStatus recover 0",
    )
    assert_controlled(job, "stop_train {3: 1}", "on_global_rank {2: 1, 3: 1}", "change_strategy recover")


@pytest.mark.matrix
async def test_recover_with_one_process_in_place_and_another_pod(tmp_path: Path) -> None:
    """Reference 7.3, with a pod to be migrated. No whole copy of the state is left: all load the last checkpoint."""
    async with led(tmp_path / "job", TASKD_WARM_SPARES=None) as job:
        await job.begins(SAVES, "--fault=6:1:kill", "--fault=6:3:kill")
        failed, faults = {1: 1, 3: 1}, {1: 1, 2: 1, 3: 1}
        reported = reported_ranks(await job.expect(FAULT))
        assert reported and reported.items() <= failed.items()
        job.clusterd.say("stopTrain", "stop_train", faults=failed)
        await job.stopped(failed)
        job.clusterd.say("globalFault", "on_global_rank", "fault_nodes_exit", faults=faults, nodeRankIds=["1"])
        await job.exits(1)
        assert "recover" in await job.offered(faults)
        job.start(1, SAVES, address=9)
        job.clusterd.say(
            "changeStrategy", "change_strategy", "fault_nodes_restart", changeStrategy="recover",
            extraParams="recover-in-place", faults=faults, nodeRankIds=["0"],
        )  # fmt: skip
        await job.succeeded("recover")
        result = await job.ends()
    assert_same_end(result, again_from=6)
    assert [len({pid for _, pid in result.events[rank]}) for rank in (0, 1)] == [1, 2]
    ordered = ('Mgr orders Agent 0: 209 ["1","2","3"]', "Agent 0 confirms 209")
    assert job.story.agent(0) == [*start_of(0), *ordered, end_of(0)]
    assert job.story.agent(1) == [*start_of(1), *exit_of(1, AT_FAULT), *start_of(1), end_of(1)]
    assert_controlled(job, "stop_train {1: 1, 3: 1}", "on_global_rank {1: 1, 2: 1, 3: 1}", "change_strategy recover")


@pytest.mark.matrix
async def test_retry_of_a_memory_error(tmp_path: Path) -> None:
    async with led(tmp_path / "job") as job:
        await job.begins("--fault=6:1:uce")
        await job.stops({1: 0})
        job.clusterd.say("globalFault", "on_global_rank", faults={1: 0})
        assert "retry" in await job.offered({1: 0})
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="retry")
        await job.succeeded("retry")
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in range(4)), "nobody restarted"
    for node in (0, 1):
        assert job.story.of(f"Agent {node}") == [*start_of(node), end_of(node)], "nobody has anything to say to agents"
    job.story.assert_order(
        "ClusterD says globalFault on_global_rank",
        "ClusterD hears ReportRecoverStrategy",
        "ClusterD says changeStrategy retry change_strategy",
        "ClusterD hears ReportRecoverStatus retry 0",
    )
    assert_controlled(job, "stop_train {1: 0}", "on_global_rank {1: 0}", "change_strategy retry")


@pytest.mark.matrix
async def test_dump_and_start_again(tmp_path: Path) -> None:
    async with led(tmp_path / "job") as job:
        await job.begins("--fault=6:3:kill")
        await job.stops({3: 1})
        job.clusterd.say("globalFault", "on_global_rank", faults={3: 1})
        assert "dump" in await job.offered({3: 1})
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="dump")
        await job.succeeded("dump")
        job.clusterd.say(
            "changeStrategy", "change_strategy", changeStrategy="exit", extraParams="dump_exit", nodeRankIds=["1"]
        )
        await job.exits(1)
        job.pods.start(1, f"--steps={STEPS}")
        result = await job.ends()
    assert result.codes == [0, 0], result.explain()
    seen = [step for step, *_ in result.steps[0]]
    assert seen == list(range(1, STEPS + 1)), f"it went on from the dying gasp: {seen}"
    job.story.assert_order(
        "ClusterD says changeStrategy dump change_strategy",
        "ClusterD hears ReportRecoverStatus dump 0",
        "ClusterD says changeStrategy exit change_strategy",
        "Mgr orders Agent 0: 208 32766",
    )
    assert_second_node_replaced(job)
    assert_controlled(
        job, "stop_train {3: 1}", "on_global_rank {3: 1}", "change_strategy dump", "change_strategy exit",
        "restart_controller",
    )  # fmt: skip


@pytest.mark.exhaustive
async def test_clusterd_is_restarted_in_the_middle_and_training_does_not_notice(tmp_path: Path) -> None:
    async with led(tmp_path / "job") as job:
        await job.begins(*(f"--fault=6:{rank}:hold" for rank in range(4)))
        await job.done(6)
        await job.clusterd.stop()
        await job.clusterd.start()
        for method in ("Init", "Register"):
            await job.expect(method)
        job.go()
        result = await job.ends()
    assert_same_end(result)
