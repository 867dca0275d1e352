"""Strategies that come to nothing (reference 7.2, 7.4, 7.8, 7.11, their last steps): what ClusterD hears and says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.taskd.e2e.led import (
    AT_FAULT,
    Led,
    assert_controlled,
    assert_second_node_replaced,
    end_of,
    exit_of,
    led,
    restart_of,
    start_of,
    told_to_exit,
)
from tests.taskd.e2e.test_chain import assert_same_end
from tests.taskd.e2e.test_flows_elastic import ELASTIC, OUT, SCALED_IN, SHRUNK, assert_samples, shrinks
from tests.taskd.e2e.test_flows_pods import SAVES, begins_anew
from tests.taskd.e2e.test_flows_switch import prepares
from tests.taskd.jobs import Result

pytestmark = pytest.mark.matrix

FAILING, UNREADY = (Path(__file__).with_name("trainings") / name for name in ("failing.py", "unready.py"))
ROUTES = 33
"""Seconds that ClusterD gives the routes of a network to converge."""


async def fails(job: Led, strategy: str, code: int) -> None:
    status = await job.expect("ReportRecoverStatus")
    assert (status.status.code, status.strategy) == (code, strategy), f"{status}\n{job.explain()}"


def assert_kept(result: Result, *ranks: int) -> None:
    for rank in range(4):
        pids = {pid for _, pid in result.events[rank]}
        assert (len(pids) == 1) == (rank in ranks), f"rank {rank}: {result.events[rank]}"


async def retries(job: Led, *args: str) -> list[str]:
    """From the start of a job to a retry after a broken network. Returns the other strategies that were possible."""
    await job.begins("--fault=6:3:network", *args)
    await job.stops({3: 2})
    job.clusterd.say("globalFault", "on_global_rank", faults={3: 2}, timeout=ROUTES)
    offered = await job.offered({3: 2})
    assert "retry" in offered
    job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="retry", faults={3: 2})
    return [each for each in offered if each != "retry"]


RETRIED = ("stop_train {3: 2}", f"on_global_rank {ROUTES} {{3: 2}}", "change_strategy retry")
"""What the controller is called for, until then."""


async def leaves(job: Led, **fields: str) -> None:
    """The second pod ends on the strategy `exit`."""
    job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="exit", nodeRankIds=["1"], **fields)
    await job.exits(1)


async def test_a_network_that_a_retry_does_not_mend(tmp_path: Path) -> None:
    """7.4: rank 3 can't be cleaned, and its process is replaced instead."""
    async with led(tmp_path / "job", script=FAILING, FAILS="clean:3") as job:
        assert "recover" in await retries(job)
        await fails(job, "retry", 405)
        job.clusterd.say("globalFault", "on_global_rank", faults={3: 1})
        assert "recover" in await job.offered({3: 1})
        job.replaces_in_place()
        await job.succeeded("recover")
        result = await job.ends()
    assert_same_end(result)
    assert_kept(result, 0, 1, 2)
    assert job.story.of("Agent 0") == [*start_of(0), end_of(0)]
    ordered = ('Mgr orders Agent 1: 209 ["3"]', "Agent 1 confirms 209")
    assert job.story.agent(1) == [*start_of(1), *ordered, end_of(1)]
    job.story.assert_order(
        "ClusterD hears ReportProcessFault",
        "ClusterD says stopTrain stop_train",
        "ClusterD hears ReportStopComplete 0",
        "ClusterD says globalFault on_global_rank",
        "ClusterD hears ReportRecoverStrategy",
        "ClusterD says changeStrategy retry change_strategy",
        "ClusterD hears ReportRecoverStatus retry 405",
        "ClusterD says globalFault on_global_rank",
        "ClusterD hears ReportRecoverStrategy",
        "ClusterD says changeStrategy recover change_strategy fault_nodes_restart",
        *ordered,
        "ClusterD hears ReportRecoverStatus recover 0",
    )
    assert_controlled(job, *RETRIED, "on_global_rank {3: 1}", "change_strategy recover")


async def test_a_process_that_dies_in_a_retry_and_can_not_be_replaced(tmp_path: Path) -> None:
    """7.4: the controller knows no way but to save (406), and all begin again from there."""
    async with led(tmp_path / "job", script=FAILING, FAILS="repair:3:dies", REPLACES="no") as job:
        await job.begins("--fault=6:3:uce")
        await job.stops({3: 0})
        job.clusterd.say("globalFault", "on_global_rank", faults={3: 0})
        assert await job.offered({3: 0}) == ["exit", "dump", "retry"]
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="retry", faults={3: 0})
        await fails(job, "retry", 406)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="dump")
        await job.succeeded("dump")
        await leaves(job, extraParams="dump_exit")
        job.start(1)
        result = await job.ends()
    assert_same_end(result)
    assert_second_node_replaced(job)
    assert_controlled(
        job, "stop_train {3: 0}", "on_global_rank {3: 0}", "change_strategy retry", "change_strategy dump",
        "change_strategy exit", "restart_controller",
    )  # fmt: skip


async def test_a_network_that_nothing_mends(tmp_path: Path) -> None:
    """7.4: rank 3 can't be cleaned, nor replaced. It can only exit (499), and all begin from the last checkpoint."""
    async with led(tmp_path / "job", script=FAILING, FAILS="clean:3", REPLACES="no") as job:
        assert await retries(job, SAVES) == ["exit", "dump"]
        await fails(job, "retry", 499)
        await leaves(job)
        job.start(1, SAVES)
        result = await job.ends()
    assert_same_end(result, again_from=6)
    assert_second_node_replaced(job)
    assert_controlled(job, *RETRIED, "change_strategy exit", "restart_controller")


async def test_a_network_that_a_retry_mends(tmp_path: Path) -> None:
    """7.4 as it should go: agents have nothing to do, and all processes stay."""
    async with led(tmp_path / "job") as job:
        await retries(job)
        await job.succeeded("retry")
        result = await job.ends()
    assert_same_end(result)
    assert_kept(result, 0, 1, 2, 3)
    for node in (0, 1):
        assert job.story.of(f"Agent {node}") == [*start_of(node), end_of(node)]
    assert_controlled(job, *RETRIED)


async def test_a_training_that_has_not_begun_can_not_be_stopped(tmp_path: Path) -> None:
    """7.2, step 3: nobody can recover anything, and the job begins anew as a whole."""
    async with led(tmp_path / "job", script=UNREADY) as job:
        await job.begins()
        request = await job.expect("ReportProcessFault")
        assert [each.rankId for each in request.faultRanks] == ["3"], f"{request}\n{job.explain()}"
        job.clusterd.say("stopTrain", "stop_train", faults={3: 1})
        await job.stopped({3: 1}, 404)
        job.clusterd.say("killMaster")
        await job.exits(0)
        before = len(job.story.lines)
        await begins_anew(job)
        result = await job.ends()
    assert_same_end(result)
    assert job.story.agent(0, before) == [*start_of(0), *exit_of(0)]
    job.story.assert_order(
        "ClusterD hears ReportProcessFault",
        "ClusterD says stopTrain stop_train",
        "ClusterD hears ReportStopComplete 404",
        "ClusterD says killMaster",
        told_to_exit(0),
        "Agent 0 says STATUS 202 []",
        "ClusterD hears Init",
    )


async def test_a_training_that_can_not_be_paused(tmp_path: Path) -> None:
    """7.9, step 2: what rank 3 has given its device to do does not come to an end. All exit, and begin anew."""
    async with led(tmp_path / "job", script=FAILING, FAILS="stream_sync:3") as job:
        await job.begins(SAVES, *(f"--fault=5:{rank}:hold" for rank in range(4)))
        await job.done(5)
        job.clusterd.say("stopTrain", "pause_train", timeout=900)
        await job.told_to_halt(6)
        job.go()
        await job.stopped({}, 499)
        job.clusterd.say("killMaster")
        await job.exits(0)
        before = len(job.story.lines)
        await begins_anew(job)
        result = await job.ends()
    assert_same_end(result, again_from=6)
    assert job.story.agent(0, before) == [*start_of(0), *exit_of(0)]
    job.story.assert_order(
        "ClusterD says stopTrain pause_train",
        "ClusterD hears ReportStopComplete 499",
        "ClusterD says killMaster",
        told_to_exit(0),
        "ClusterD hears Init",
    )
    assert job.controlled()[0] == "pause_train 900"


async def test_a_new_pod_that_can_not_be_repaired(tmp_path: Path) -> None:
    """7.2: the others write a checkpoint, and all processes begin again from there."""
    async with led(tmp_path / "job", script=FAILING, FAILS="repair:3") as job:
        await job.begins("--fault=6:3:kill")
        await job.stops({3: 1})
        faults = {2: 1, 3: 1}
        job.clusterd.say("globalFault", "on_global_rank", "fault_nodes_exit", faults=faults, nodeRankIds=["1"])
        await job.exits(1)
        assert {"recover", "dump"} <= set(await job.offered(faults))
        job.start(1, address=9)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="recover", faults=faults)
        await fails(job, "recover", 405)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="dump", faults=faults)
        await job.succeeded("dump")
        # An original names all pods that were at fault, the replaced one too.
        dumped = {"changeStrategy": "exit", "extraParams": "dump_exit", "nodeRankIds": ["1"]}
        job.clusterd.say("changeStrategy", "change_strategy", **dumped)
        result = await job.ends()
    assert_same_end(result)
    assert job.story.agent(0) == [*start_of(0), *restart_of(0, 32766), end_of(0)]
    replaced = [*start_of(1), *exit_of(1, AT_FAULT), *start_of(1)]
    assert job.story.agent(1) == [*replaced, *restart_of(1, 32766), end_of(1)]
    job.story.assert_order(
        "ClusterD says changeStrategy recover change_strategy",
        "ClusterD hears ReportRecoverStatus recover 405",
        "ClusterD says changeStrategy dump change_strategy",
        "ClusterD hears ReportRecoverStatus dump 0",
        "ClusterD says changeStrategy exit change_strategy",
        "Mgr orders Agent 0: 208 32766",
    )
    assert_controlled(
        job, "stop_train {3: 1}", "on_global_rank {2: 1, 3: 1}", "change_strategy recover", "change_strategy dump",
        "change_strategy exit", "restart_controller",
    )  # fmt: skip


async def test_a_hot_switch_that_fails_begins_the_job_anew(tmp_path: Path) -> None:
    """7.8: a process of the backup pod can't be repaired when the old pod is gone already; the cluster deletes all."""
    async with led(tmp_path / "job", script=FAILING, FAILS="repair:3", HIGH_AVAILABILITY="recover") as job:
        await prepares(job, SAVES)
        old = job.pods._all[1]
        job.clusterd.say("hot-switch", "new pod running")
        job.go()
        assert await job.offered({}) == ["migration"]
        job.pods.delete(old)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="migration")
        await fails(job, "migration", 406)
        job.pods.delete(job.pods.pods[0])
        await begins_anew(job)
        result = await job.ends()
    assert_same_end(result, again_from=6)
    job.story.assert_order(
        "ClusterD says hot-switch hot switch",
        *start_of(1),
        "ClusterD says hot-switch new pod running",
        "ClusterD hears ReportRecoverStrategy",
        "ClusterD says changeStrategy migration change_strategy",
        "ClusterD hears ReportRecoverStatus migration 406",
        "ClusterD hears Init",
        "Mgr orders Agent 0: 210 32767",
    )


async def test_a_job_that_can_not_go_on_smaller(tmp_path: Path) -> None:
    """7.11: those that are left can't build smaller groups. All begin again from the last checkpoint."""
    async with led(tmp_path / "job", script=FAILING, FAILS="zit_downgrade_rebuild:1", **ELASTIC) as job:
        await shrinks(job, SAVES, "--fault=6:3:kill")
        job.clusterd.say("faultNodesExit", "fault_nodes_exit", nodeRankIds=["1"])
        await fails(job, "downgrade", 499)
        await job.exits(1)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="exit")
        await job.heard("Agent 0 confirms 208")
        job.start(1, SAVES)
        result = await job.ends()
    assert_same_end(result, again_from=6)
    assert_second_node_replaced(job, SCALED_IN)
    assert_controlled(job, *SHRUNK, "change_strategy exit", "restart_controller")
    job.story.assert_order(
        "ClusterD says changeStrategy downgrade change_strategy",
        "ClusterD hears ReportRecoverStatus downgrade 201",
        "ClusterD hears ReportRecoverStatus downgrade 499",
        "ClusterD says changeStrategy exit change_strategy",
        "Mgr orders Agent 0: 208 32766",
    )


async def test_a_job_that_can_not_grow_again(tmp_path: Path) -> None:
    """7.11: the new pod is there, and the groups can't be built. A checkpoint of the smaller job is where all go on."""
    async with led(tmp_path / "job", script=FAILING, FAILS="zit_upgrade_rebuild:0", **ELASTIC) as job:
        await shrinks(job, "--fault=6:3:kill", "--fault=10:0:hold", "--fault=10:1:hold", exits=True)
        await job.succeeded("downgrade")
        await job.done(10, 0, 1)
        job.start(1)
        await job.heard("Agent 1 confirms 210", times=2)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="upgrade", extraParams=OUT)
        await fails(job, "upgrade", 406)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="dump")
        await job.succeeded("dump")
        dumped = {"changeStrategy": "exit", "extraParams": "dump_exit", "nodeRankIds": ["1"]}
        job.clusterd.say("changeStrategy", "change_strategy", **dumped)
        result = await job.ends()
    assert_samples(result, small=range(7, 11))
    for node, before in ((0, start_of(0)), (1, [*start_of(1), *exit_of(1, AT_FAULT), *start_of(1)])):
        assert job.story.agent(node) == [*before, *restart_of(node, 32766), end_of(node)]
    job.story.assert_order(
        "ClusterD says changeStrategy upgrade change_strategy",
        "ClusterD hears ReportRecoverStatus upgrade 406",
        "ClusterD says changeStrategy dump change_strategy",
        "ClusterD hears ReportRecoverStatus dump 0",
        "ClusterD says changeStrategy exit change_strategy",
        "Mgr orders Agent 0: 208 32766",
    )
    assert_controlled(
        job,
        *SHRUNK,
        f"change_strategy upgrade {OUT}",
        "change_strategy dump",
        "change_strategy exit",
        "restart_controller",
    )
