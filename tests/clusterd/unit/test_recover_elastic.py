"""Elastic training: smaller and larger again, signal by signal."""

from __future__ import annotations

import pytest

from evertrain.clusterd.model import OTHER
from evertrain.clusterd.recover.events import ProcessFault, Status, StopComplete, Strategies
from tests.clusterd.recover_world import World, change, signal

POD_1 = {2: "1", 3: "1"}
DOWN = change("downgrade", faults=POD_1, nodes=(1,), extra='{"scale-in-strategy": "DP"}')
OFFERS = ("recover", "downgrade", "upgrade", "dump", "exit")


def offered(world: World, rank: int = 3, offers: tuple[str, ...] = OFFERS) -> World:
    world.say(ProcessFault({rank: OTHER}))
    world.say(StopComplete(0))
    world.take()
    world.say(Strategies(offers))
    return world


def scaled(world: World) -> World:
    offered(world)
    world.say(Status(201, "downgrade", isolate=(2, 3, 6, 7)))
    world.say(Status(0, "downgrade"))
    assert world.state == "ScaleRunningState"
    return world


def test_down_and_up() -> None:
    world = offered(World("elastic-training"))
    assert world.take() == [DOWN]
    world.say(Status(201, "downgrade", isolate=(2, 3, 6, 7)))
    assert [each.uids for each in world.replaced] == [("pod-3-0",)]
    assert world.take() == [signal("faultNodesExit", "fault_nodes_exit", nodes=(3,))]
    world.say(Status(0, "downgrade"))
    assert (world.state, world.machine.deadline) == ("ScaleRunningState", None)
    world.replace(1)
    assert world.take() == []
    world.replace(3)
    faults = {**POD_1, 6: "1", 7: "1"}
    assert world.take() == [change("upgrade", faults=faults, nodes=(1, 3), extra='{"scale-out-strategy": "DP"}')]
    world.say(Status(0, "upgrade"))
    assert (world.state, world.outcome) == ("INIT", "recovered")


def test_after_no_replacement_was_found() -> None:
    world = offered(World("recover,elastic-training", annotations={"wait-reschedule-timeout": "30"}))
    assert world.take()[0][2] == "recover"
    before = world.now
    world.wait()
    assert world.now - before <= 30
    assert world.take() == [DOWN]
    assert world.state == "WaitReportScaleInIsolateRanksState"


@pytest.mark.parametrize(("strategies", "chosen"), [("recover,dump", "dump"), ("recover", "exit")])
def test_without_it_no_replacement_means_a_checkpoint_or_the_whole_job(strategies: str, chosen: str) -> None:
    world = offered(World(strategies))
    world.take()
    world.wait()
    assert world.transcript[-1][2] == chosen
    assert world.state == ("WaitReportDumpStatusState" if chosen == "dump" else "FaultRetryState")


def test_a_spare_node_is_looked_for_first_where_pods_may_be_rescheduled() -> None:
    labels = {"fault-scheduling": "grace"}
    world = offered(World("elastic-training,dump", labels=labels))
    assert (world.state, world.take()) == ("NotifyDecidedStrategyState", [])
    world.wait()
    assert world.take() == [DOWN]
    world = offered(World("elastic-training,dump", labels=labels))
    world.replace(1)
    assert world.take() == [change("dump", faults=POD_1, nodes=())]


def test_the_pod_with_rank_0_can_not_be_left_out() -> None:
    world = offered(World("elastic-training,dump"), rank=1)
    assert world.take()[0][2] == "dump"


def test_success_at_once_is_a_success() -> None:
    world = offered(World("elastic-training"))
    world.say(Status(0, "downgrade"))
    assert world.state == "ScaleRunningState"


@pytest.mark.parametrize("code", [405, 406, 499, 700])
@pytest.mark.parametrize("isolated", [False, True])
def test_it_fails(code: int, isolated: bool) -> None:
    world = offered(World("elastic-training,dump"))
    if isolated:
        world.say(Status(201, "downgrade", isolate=(3,)))
    world.take()
    world.say(Status(code, "downgrade"))
    assert world.take() == [change("dump", faults=POD_1, nodes=(1,))]


def test_growing_fails() -> None:
    world = scaled(World("elastic-training,dump"))
    world.replace(1, 3)
    world.take()
    world.say(Status(406, "upgrade"))
    assert world.transcript[0][2] == "dump"
    assert world.state == "WaitReportDumpStatusState"


def test_a_fault_while_it_is_smaller() -> None:
    world = scaled(World("elastic-training,dump"))
    world.take()
    world.say(ProcessFault({4: OTHER}))
    assert world.take() == [signal("stopTrain", "stop_train", faults={3: "1", 4: "1"})]
    world.say(StopComplete(0))
    world.say(Strategies(("dump", "exit")))
    assert world.transcript[-1][2] == "dump"


def test_the_cluster_sees_a_fault_while_it_is_smaller() -> None:
    world = scaled(World("elastic-training,dump"))
    world.hit(world.fault(3))  # that one is out anyway
    assert world.state == "ScaleRunningState"
    world.take()
    world.hit(world.fault(4))
    assert [each[0] for each in world.transcript] == ["preExitProcess", "stopTrain"]


def test_a_replacement_on_faulty_hardware_is_replaced_again() -> None:
    world = scaled(World("elastic-training"))
    world.replace(1, 3, phase="Pending")
    world.log.clear()
    world.hit(world.fault(3))
    uid = world.job.pods[1].uid
    assert [each.uids for each in world.replaced] == [(uid,)]
    world.replace(3)
    assert (world.state, world.take()) == ("ScaleRunningState", [])
    world.replace(1)
    assert world.transcript[-1][2] == "upgrade"


def test_a_pod_left_out_by_the_training_may_be_unknown() -> None:
    world = offered(World("elastic-training"))
    world.take()
    world.say(Status(201, "downgrade", isolate=(3, 99, -5)))
    assert world.take() == [signal("faultNodesExit", "fault_nodes_exit", nodes=())]
