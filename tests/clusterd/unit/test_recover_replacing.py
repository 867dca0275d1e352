"""While the training waits for replacements, others fail: it waits for theirs, too, and somebody has to start them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evertrain.clusterd.model import OTHER
from evertrain.clusterd.recover.events import (
    ProcessFault,
    Status,
    StopComplete,
    Strategies,
    Subscribed,
    Unsubscribed,
)
from tests.clusterd.recover_world import World, change, signal

WAITING = "WaitReportProcessRecoverStatusState"
BOTH = "recover-in-place,recover"


def waiting(strategies: str) -> World:
    """For the replacement of rank 3, of pod 1."""
    world = World(strategies)
    world.say(ProcessFault({3: OTHER}))
    world.say(StopComplete(0, {3: OTHER}))
    world.say(Strategies(("recover", "dump", "exit")))
    assert world.state == WAITING
    world.log.clear()
    return world


def leaves(pod: int) -> list[object]:
    return [signal("faultNodesExit", "fault_nodes_exit", nodes=(pod,))]


def restarts(rank: int) -> list[object]:
    return [signal("globalFault", "fault_nodes_restart", faults={rank: "1"}, nodes=(rank // 2,))]


def test_a_process_of_another_pod_that_fails_meanwhile_is_replaced_with_its_pod() -> None:
    world = waiting("recover")
    world.say(ProcessFault({5: OTHER}))
    assert [each.uids for each in world.replaced] == [("pod-2-0",)]
    assert world.take() == leaves(2)
    world.replace(1, 2)
    world.say(Status(0, "recover"))
    assert (world.state, world.outcome) == ("INIT", "recovered")


def test_processes_of_pods_that_leave_end_with_them() -> None:
    world = waiting("recover")
    world.say(ProcessFault({2: OTHER, 3: OTHER}))
    assert (world.replaced, world.take()) == ([], [])


def test_a_process_beside_one_that_starts_again_in_place_does_so_too() -> None:
    world = waiting(BOTH)
    world.say(ProcessFault({2: OTHER}))
    assert (world.replaced, world.take()) == ([], restarts(2))


def test_a_process_that_fails_again_in_its_place_costs_its_pod() -> None:
    world = waiting(BOTH)
    world.say(ProcessFault({3: OTHER}))
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]
    (note,) = world.notes("fallback")
    assert (note.details["from"], note.details["to"]) == ("recover-in-place", "recover")
    assert "rank 3 failed again" in note.text
    assert "rank 3 failed again" in world.notes("decision")[-1].text
    assert world.take() == leaves(1)
    world.say(ProcessFault({2: OTHER, 3: OTHER}))
    assert (world.replaced, world.take()) == ([], [])
    world.replace(1)
    world.say(Status(0, "recover"))
    assert world.outcome == "recovered"


def test_the_first_pod_fails_again_and_again_and_its_manager_with_it() -> None:
    """Whoever has the place is replaced: the pod that was at fault when it began is not there any more."""
    world = World(BOTH)
    first = {0: OTHER, 1: OTHER}
    world.say(ProcessFault({1: OTHER}))
    world.say(StopComplete(0, {1: OTHER}))
    world.say(Strategies(("recover", "dump", "exit")))
    world.say(ProcessFault({1: OTHER}))
    assert [each.uids for each in world.replaced] == [("pod-0-0",)]
    world.say(Unsubscribed())
    world.replace(0)
    world.say(Subscribed())
    world.say(ProcessFault(first))
    world.say(StopComplete(0, first))
    world.say(Strategies(("recover", "dump", "exit")))
    assert world.state == WAITING
    world.log.clear()
    world.say(ProcessFault({1: OTHER}))
    assert [each.uids for each in world.replaced] == [("pod-0-1",)]


def test_a_process_that_fails_again_where_pods_are_not_replaced() -> None:
    world = waiting("recover-in-place")
    world.say(ProcessFault({3: OTHER}))
    assert (world.replaced, world.take()) == ([], restarts(3))


@pytest.mark.parametrize(
    ("strategies", "expected"),
    [("recover,dump", "dump"), ("recover", "exit"), ("recover,elastic-training,dump", "elastic-training")],
)
def test_a_process_that_fails_again_in_a_new_pod(strategies: str, expected: str) -> None:
    world = World(strategies)
    world.say(ProcessFault({3: OTHER}))
    world.say(StopComplete(0, {3: OTHER}))
    world.say(Strategies(("recover", "downgrade", "dump", "exit"), {2: OTHER, 3: OTHER}))
    world.replace(1)
    world.log.clear()
    world.say(ProcessFault({3: OTHER}))
    (note,) = world.notes("fallback")
    assert (note.details["from"], note.details["to"]) == ("recover", expected)
    assert "rank 3 failed again in a new pod" in note.text
    strategy = world.transcript[-1][2]
    if expected == "dump":
        assert (strategy, world.state) == ("dump", "WaitReportDumpStatusState")
        world.say(Status(0, "dump"))
    elif expected == "exit":
        assert strategy == "exit"
    else:
        assert (strategy, world.state) == ("downgrade", "WaitReportScaleInIsolateRanksState")
    assert [each.uids for each in world.replaced] == [("pod-1-1",)], "the new pod is replaced, too"


def test_the_end_of_the_process_beside_it_is_not_that_of_its_replacement() -> None:
    """Its pod is replaced for the sake of another rank, and of its own end one hears when the new pod is there."""
    world = waiting(BOTH + ",dump")
    world.say(ProcessFault({3: OTHER}))
    world.replace(1)
    world.log.clear()
    world.say(ProcessFault({2: OTHER}))
    assert (world.notes("fallback"), world.transcript, world.state) == ([], [], WAITING)
    world.say(ProcessFault({2: OTHER}))
    assert world.notes("fallback")[-1].details["to"] == "dump"


def test_a_new_pod_that_training_goes_on_with_is_at_fault_itself_however_soon() -> None:
    world = waiting("recover,dump")
    world.replace(1)
    world.say(Status(0, "recover"))
    world.log.clear()
    world.say(ProcessFault({3: OTHER}))
    world.say(StopComplete(0, {3: OTHER}))
    world.say(Strategies(("recover", "dump", "exit")))
    assert [each.uids for each in world.replaced] == [("pod-1-1",)]
    assert world.transcript[-1] == change("recover", faults={2: "1", 3: "1"}, nodes=(1,))


def test_starting_again_in_place_that_fails_in_the_training_costs_the_pod() -> None:
    world = waiting(BOTH + ",dump")
    world.say(Status(405, "recover", info="rank 1 answered 1"))
    (note,) = world.notes("fallback")
    assert (note.details["from"], note.details["to"]) == ("recover-in-place", "recover")
    assert "rank 1 answered 1" in note.text
    assert world.take() == [signal("stopTrain", "stop_train", faults={3: "1"})], "it is begun anew"
    world.say(StopComplete(0, {3: OTHER}))
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]
    world.say(Strategies(("recover", "dump", "exit"), {2: OTHER, 3: OTHER}))
    assert world.notes("decision")[-1].details["strategy"] == "recover"
    assert world.transcript[-1] == change("recover", faults={2: "1", 3: "1"}, nodes=(1,))
    world.replace(1)
    assert world.notes("phase")[-1].details["phase"] == "rebuild"
    world.say(Status(405, "recover"))
    assert (world.state, world.transcript[-1][2]) == ("WaitReportDumpStatusState", "dump"), "once is enough"


@pytest.mark.parametrize(("strategies", "code"), [(BOTH + ",dump", 406), ("recover-in-place,dump", 405)])
def test_starting_again_in_place_that_fails_where_nothing_but_a_checkpoint_is_left(strategies: str, code: int) -> None:
    world = waiting(strategies)
    world.say(Status(code, "recover"))
    assert (world.state, world.transcript[-1][2]) == ("WaitReportDumpStatusState", "dump")


def loses_node(world: World, pod: int) -> None:
    """It does not answer: a fault without a code."""
    world.hit(*(world.fault(rank, code="") for rank in world.job.ranks_of(pod)))


@pytest.mark.parametrize("known", ["before", "after"])
def test_nothing_starts_again_on_a_node_that_does_not_answer(known: str) -> None:
    world = World(BOTH)
    if known == "before":
        loses_node(world, 1)
    world.say(ProcessFault({2: OTHER, 3: OTHER}))
    world.say(StopComplete(0, {2: OTHER, 3: OTHER}))
    world.say(Strategies(("recover", "dump", "exit")))
    if known == "after":
        assert world.notes("decision")[-1].details["strategy"] == "recover-in-place"
        loses_node(world, 1)
        assert "node node-1 does not answer" in world.notes("fallback")[-1].text
    assert world.notes("decision")[-1].details["strategy"] == "recover"
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]
    world.replace(1)
    world.say(Status(0, "recover"))
    assert (world.state, world.outcome) == ("INIT", "recovered")


def test_a_node_that_does_not_answer_where_pods_are_not_replaced() -> None:
    world = waiting("recover-in-place,dump")
    loses_node(world, 1)
    assert (world.state, world.transcript[-1][2]) == ("WaitReportDumpStatusState", "dump")


def test_a_node_that_does_not_answer_while_others_are_replaced_matters_to_nobody() -> None:
    world = waiting(BOTH)
    loses_node(world, 2)
    assert (world.state, world.replaced) == (WAITING, [])


def ends(world: World, pod: int) -> None:
    pods = {**world.job.pods, pod: replace(world.job.pods[pod], phase="Failed")}
    world.see(pods=pods, status="failed")


@pytest.mark.parametrize("strategies", [BOTH, "recover-in-place,dump", "recover-in-place"])
def test_a_pod_that_ends_instead_of_starting_its_processes_again(strategies: str) -> None:
    world = waiting(strategies)
    ends(world, 1)
    match strategies.removeprefix("recover-in-place,"):
        case "recover":
            assert [each.uids for each in world.replaced] == [("pod-1-0",)]
            assert world.notes("fallback")[-1].details["to"] == "recover"
        case "dump":
            assert (world.transcript[-1][2], world.state) == ("dump", "WaitReportDumpStatusState")
            assert world.notes("fallback")[-1].details["to"] == "dump"
        case _:
            assert world.transcript == []
            assert world.patches == [("train-1", {"fault-type": None})], "the operator need not wait for us"
            world.log.clear()
            world.see()
            assert world.log == [], "once is enough"
            world.see(ended=True)
            assert (world.state, world.outcome) == ("INIT", "failed")


def test_who_misses_a_process_of_a_job_that_has_failed_begins_no_other_incident() -> None:
    """The training's controller lives until its own pod is ended, and hears nothing more from the one that failed."""
    world = waiting("recover-in-place")
    ends(world, 1)
    world.see(ended=True)
    world.log.clear()
    world.say(ProcessFault({2: OTHER, 3: OTHER}))
    assert (world.state, world.notes("opened"), world.transcript) == ("INIT", [], [])
    assert [each.text for each in world.notes("ignored")] == ["ranks 2-3 failed: the job has ended"]


@pytest.mark.parametrize("word", [{"ended": True}, {"status": "complete"}])
def test_nor_does_who_misses_one_of_a_job_that_has_come_to_its_end(word: dict[str, Any]) -> None:
    world = World("recover-in-place")
    world.see(**word)
    world.say(ProcessFault({3: OTHER}))
    assert (world.state, world.notes("opened")) == ("INIT", [])


def test_the_job_starts_a_pod_again_that_has_ended_and_the_training_takes_it_in() -> None:
    """It has restarts left, by its label fault-retry-times."""
    world = waiting("recover-in-place")
    ends(world, 1)
    world.replace(1)
    world.say(Status(0, "recover"))
    assert (world.state, world.outcome) == ("INIT", "recovered")
