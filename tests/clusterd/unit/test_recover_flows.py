"""The signals of each strategy, one by one, as the original sends them; and what follows on each code of a client."""

from __future__ import annotations

import pytest

from evertrain.clusterd.model import MEMORY, NETWORK, OTHER
from evertrain.clusterd.recover.events import (
    JobSeen,
    Note,
    ProcessFault,
    Status,
    StopComplete,
    Strategies,
    Subscribed,
    Unsubscribed,
)
from tests.clusterd.recover_world import ALL, World, change, signal

STOP_3 = signal("stopTrain", "stop_train", faults={3: "1"})
POD_1 = {2: "1", 3: "1"}


def stopped(world: World, faults: dict[int, str] | None = None) -> World:
    faults = faults or {3: OTHER}
    world.say(ProcessFault(faults))
    world.say(StopComplete(0, faults))
    return world


def offered(world: World, *strategies: str, faults: dict[int, str] | None = None) -> World:
    stopped(world, faults)
    world.say(Strategies(strategies))
    return world


def test_recover() -> None:
    world = World("recover")
    world.say(ProcessFault({3: OTHER}))
    assert world.patches == [("train-1", {"fault-type": "software"})]
    assert world.resets == ["notifyFaultFlushing"]
    assert world.take() == [STOP_3]
    world.say(StopComplete(0, {3: OTHER}))
    assert world.resets == ["fault"]
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults=POD_1, nodes=(1,))]
    world.say(Strategies(("recover", "dump", "exit")))
    assert world.replaced == []  # once is enough
    assert world.take() == [change("recover", faults=POD_1, nodes=(1,))]
    world.replace(1, phase="Pending")
    assert world.resets == []
    world.replace(1)
    assert world.resets == ["clear"]
    world.say(Status(0, "recover"))
    assert {"ProcessRecoverStatus": "recover-success"} in world.group
    assert world.state == "INIT"
    assert world.outcome == "recovered"
    assert world.take() == []
    assert world.machine.deadline is None


def test_recover_when_the_pod_is_new_already_tells_nobody_to_leave() -> None:
    world = World("recover")
    stopped(world)
    world.take()
    world.replace(1)
    world.say(Strategies(("recover", "exit")))
    assert world.take() == [change("recover", faults=POD_1, nodes=())]


def test_a_fault_of_the_cluster_stops_the_processes_and_starts_the_recovery_at_once() -> None:
    world = World("recover")
    world.hit(world.fault(3))
    assert world.transcript == [
        signal("preExitProcess", "pre exit process", faults={3: "1"}, nodes=(1,)),
        STOP_3,
    ]
    uuids = [each.uuid for each in world.signals]
    assert len(set(uuids)) == 2
    world.take()
    world.say(ProcessFault({3: OTHER}))  # the same, as the training sees it
    world.say(StopComplete(0, {3: OTHER}))
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults=POD_1, nodes=(1,))]


def test_faults_of_both_kinds_that_a_retry_may_mend_are_told_to_schedulers_as_such() -> None:
    world = World("retry,recover")
    world.say(ProcessFault({2: MEMORY, 3: NETWORK}))
    assert world.patches == [("train-1", {"fault-type": "retry-fault"})]


@pytest.mark.parametrize(("kind", "timeout"), [(MEMORY, 0), (NETWORK, 33)])
def test_retry(kind: str, timeout: int) -> None:
    world = World("retry,recover")
    world.say(ProcessFault({3: kind}))
    assert world.patches == [("train-1", {"fault-type": "retry-fault"})]
    assert world.take() == [signal("stopTrain", "stop_train", faults={3: kind})]
    world.say(StopComplete(0, {3: kind}))
    assert world.resets == []
    assert world.take() == [signal("globalFault", "on_global_rank", faults={3: kind}, timeout=timeout)]
    world.say(Strategies(("retry", "recover", "exit")))
    if kind == NETWORK:  # routes have to converge
        assert (world.state, world.take()) == ("NotifyDecidedStrategyState", [])
        world.wait()
    assert world.take() == [change("retry", faults={3: kind}, nodes=(1,))]
    world.say(Status(0, "retry"))
    assert {"ProcessRecoverStatus": "retry-success"} in world.group
    assert ("train-1", {"fault-type": None}) in world.patches
    assert (world.state, world.outcome) == ("INIT", "recovered")
    assert world.replaced == []


def test_routes_have_converged_if_the_training_took_its_time() -> None:
    world = World("retry")
    world.say(ProcessFault({3: NETWORK}))
    world.say(StopComplete(0), after=3.0)
    world.say(Strategies(("retry", "exit")))
    assert world.take()[-1] == change("retry", faults={3: NETWORK}, nodes=(1,))


def test_in_place() -> None:
    world = World("recover-in-place")
    world.say(ProcessFault({3: OTHER}))
    assert world.take() == [STOP_3]
    world.say(StopComplete(0, {3: OTHER}))
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults={3: "1"}, nodes=())]
    world.say(Strategies(("recover", "exit")))
    assert world.resets == ["clear"]
    assert world.take() == [
        change("recover", "fault_nodes_restart", faults={3: "1"}, nodes=(1,), extra="recover-in-place")
    ]
    world.say(Status(0, "recover"))
    assert (world.state, world.outcome, world.replaced) == ("INIT", "recovered", [])


def test_a_process_that_has_died_of_broken_memory_is_started_again_in_place() -> None:
    """Its agent knows of what it died. The training does not offer to run the step again with what is dead."""
    world = World("retry,recover-in-place")
    world.say(ProcessFault({3: MEMORY}))
    world.say(StopComplete(0, {3: MEMORY}))
    assert world.take()[-1] == signal("globalFault", "on_global_rank", faults={3: MEMORY})
    world.say(Strategies(("exit", "dump", "recover")))
    assert world.take() == [
        change("recover", "fault_nodes_restart", faults={3: "1"}, nodes=(1,), extra="recover-in-place")
    ]
    world.say(Status(0, "recover"))
    assert (world.state, world.outcome, world.replaced) == ("INIT", "recovered", [])


def test_in_place_waits_for_the_chip_and_goes_on_as_soon_as_it_is_well() -> None:
    world = World("recover-in-place")
    world.hit(world.fault(3, level="RestartBusiness", in_place=True))
    world.say(StopComplete(0))
    assert (world.state, world.take()[-1]) == ("NotifyGlobalFaultState", STOP_3)
    world.hit()
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults={3: "1"}, nodes=())]


def test_in_place_does_not_wait_for_a_chip_that_says_nothing_of_what_the_training_reports() -> None:
    world = World("retry,recover-in-place")
    world.say(ProcessFault({3: MEMORY}))
    world.hit(world.fault(3, MEMORY, level="RestartBusiness", in_place=True, reported=True))
    world.say(StopComplete(0, {3: MEMORY}))
    world.say(Strategies(("retry", "recover", "exit")))
    world.take()
    world.say(Status(405, "retry"))
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults={3: "1"}, nodes=())]


def test_in_place_moves_the_pods_whose_chip_stays_faulty() -> None:
    world = World("recover-in-place")
    world.hit(world.fault(3, level="RestartBusiness", in_place=True))
    world.say(ProcessFault({4: OTHER}))
    world.say(StopComplete(0))
    world.take()
    world.wait()
    faults = {2: "1", 3: "1", 4: "1"}
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults=faults, nodes=(1,))]
    world.say(Strategies(("recover", "exit")))
    assert world.take() == [
        change("recover", "fault_nodes_restart", faults=faults, nodes=(2,), extra="recover-in-place")
    ]
    assert world.resets == []
    world.replace(1)
    assert world.resets == ["clear"]


def test_processes_that_fail_in_several_pods_do_not_start_again_in_place() -> None:
    world = World("recover-in-place,recover")
    stopped(world, {3: OTHER, 4: OTHER})
    faults = dict.fromkeys(range(2, 6), "1")
    assert world.take()[-1] == signal("globalFault", "on_global_rank", "fault_nodes_exit", faults=faults, nodes=(1, 2))
    world.say(Strategies(("recover", "exit")))
    assert world.take() == [change("recover", faults=faults, nodes=(1, 2))]


def test_in_place_was_planned_and_something_else_is_chosen() -> None:
    world = offered(World("recover-in-place,dump"), "dump", "exit")
    assert world.take()[-1] == change("dump", "fault_nodes_exit", faults={3: "1"}, nodes=(1,))


def test_dump_and_nothing_else() -> None:
    world = World("dump")
    world.say(ProcessFault({3: OTHER}))
    assert world.resets == ["fault"]
    assert world.take() == [signal("saveAndExit", "save_and_exit", nodes=(1,))]
    world.say(Status(0, "dump"))
    assert {"ProcessRecoverStatus": "dump-success"} in world.group
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]
    assert world.take() == [change("exit", nodes=(1,), extra="dump_exit")]
    assert world.state == "ListenScheduleResultState"
    world.replace(1)
    assert world.resets == ["restartAllProcess", "clear"]
    assert (world.state, world.outcome, world.take()) == ("INIT", "fell back", [])


def test_dump_that_fails() -> None:
    world = World("dump")
    world.say(ProcessFault({3: OTHER}))
    world.say(Status(499, "dump"))
    assert {"ProcessRecoverStatus": "dump-failed"} in world.group
    assert world.transcript[-1] == change("exit", nodes=(1,), extra="dump_exit")


def test_dump_as_the_last_resort() -> None:
    world = offered(World("recover,dump"), "dump", "exit")
    assert world.take()[-1] == change("dump", faults=POD_1, nodes=(1,))
    world.say(Status(0, "dump"))
    assert world.take() == [change("exit", nodes=(1,), extra="dump_exit")]


def test_exit() -> None:
    world = offered(World("recover"), "exit")
    assert {"ProcessRecoverStatus": "exit-completed"} in world.group
    assert world.take()[-1] == change("exit", faults=POD_1, nodes=(1,))
    world.replace(1)
    assert (world.state, world.outcome, world.take()) == ("INIT", "fell back", [])


def test_training_that_has_not_begun_is_started_as_a_whole() -> None:
    world = World("recover")
    world.say(ProcessFault({3: OTHER}))
    world.take()
    world.say(StopComplete(404))
    assert world.transcript == [signal("killMaster")]
    assert world.replaced[0].whole_job
    assert world.state == "NotifyKillJobState"
    world.replace(0, 1, 2, 3)
    assert (world.state, world.outcome) == ("INIT", "fell back")


def test_405_goes_on_with_the_next_finer_strategy() -> None:
    world = offered(World("retry,recover,dump"), "retry", "recover", "dump", "exit", faults={3: MEMORY})
    world.take()
    world.say(Status(405, "retry"))
    assert {"ProcessRecoverStatus": "retry-failed"} in world.group
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults=POD_1, nodes=(1,))]
    world.say(Strategies(("recover", "dump", "exit")))
    assert world.take() == [change("recover", faults=POD_1, nodes=(1,))]


@pytest.mark.parametrize(
    ("code", "strategies", "chosen"),
    [
        (406, "retry,recover,dump", "dump"),
        (406, "retry,recover", "exit"),
        (499, "retry,recover,dump", "exit"),
        (700, "retry,recover,dump", "dump"),
        (406, "retry,recover,elastic-training,dump", "downgrade"),
    ],
)
def test_other_codes_of_a_retry(code: int, strategies: str, chosen: str) -> None:
    world = offered(World(strategies), "retry", "recover", "downgrade", "dump", "exit", faults={3: MEMORY})
    world.take()
    world.say(Status(code, "retry"))
    assert world.resets[0] == "fault"
    extra = '{"scale-in-strategy": "DP"}' if chosen == "downgrade" else ""
    assert world.take() == [change(chosen, faults=POD_1, nodes=(1,), extra=extra)]


@pytest.mark.parametrize("code", [405, 406, 499, 201, 700])
@pytest.mark.parametrize(("strategies", "chosen"), [("recover,dump", "dump"), ("recover", "exit")])
def test_codes_of_a_recover(code: int, strategies: str, chosen: str) -> None:
    world = offered(World(strategies), "recover", "dump", "exit")
    world.replace(1)
    world.take()
    world.say(Status(code, "recover"))
    assert {"ProcessRecoverStatus": "recover-failed"} in world.group
    assert world.take() == [change(chosen, faults=POD_1, nodes=())]


def test_retry_that_is_not_offered_becomes_the_next_one() -> None:
    world = offered(World("retry,recover,dump"), "recover", "dump", "exit", faults={3: MEMORY})
    assert world.resets[-1] == "fault"
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]
    assert world.take()[-1] == change("recover", faults=POD_1, nodes=(1,))


@pytest.mark.parametrize("faults", [{3: MEMORY, 5: NETWORK}, {3: MEMORY, 5: OTHER}])
def test_faults_of_two_kinds_are_not_retried(faults: dict[int, str]) -> None:
    world = stopped(World("retry,recover"), faults)
    assert world.take()[-1][1] == ("on_global_rank", "fault_nodes_exit")


@pytest.mark.parametrize("first", [OTHER, MEMORY])
def test_the_worse_of_two_faults_of_a_rank_counts(first: str) -> None:
    world = World("retry,recover")
    world.say(ProcessFault({3: first}))
    world.say(ProcessFault({3: MEMORY if first == OTHER else OTHER}))
    world.say(StopComplete(0))
    assert world.transcript[-1][1] == ("on_global_rank", "fault_nodes_exit")


def test_faults_until_the_global_fault_are_part_of_it() -> None:
    world = World("recover")
    world.say(ProcessFault({3: OTHER}))
    world.say(ProcessFault({5: OTHER}))
    world.hit(world.fault(7))
    assert world.transcript[-1] == signal("preExitProcess", "pre exit process", faults={7: "1"}, nodes=(3,))
    world.take()
    world.say(StopComplete(0, {4: OTHER}))
    faults = dict.fromkeys(range(2, 8), "1")
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults=faults, nodes=(1, 2, 3))]


def test_what_the_training_reports_with_its_offers_is_part_of_the_decision() -> None:
    world = stopped(World("recover"))
    world.take()
    world.say(ProcessFault({5: OTHER}))
    world.say(Strategies(("recover", "exit"), {3: OTHER, 5: OTHER}))
    assert [each.uids for each in world.replaced] == [("pod-2-0",)]
    assert world.take() == [change("recover", faults={**POD_1, 4: "1", 5: "1"}, nodes=(1, 2))]


def test_faults_that_come_later_begin_another_round() -> None:
    world = offered(World("retry"), "retry", "exit", faults={3: MEMORY})
    world.take()
    world.say(ProcessFault({5: OTHER}))
    world.hit(world.fault(6))
    assert world.take() == []
    world.say(Status(0, "retry"))
    assert world.outcome == "recovered"
    assert world.state == "WaitReportStopCompleteState"
    assert world.transcript == [
        signal("stopTrain", "stop_train", faults={5: "1"}),
        signal("preExitProcess", "pre exit process", faults={6: "1"}, nodes=(3,)),
    ]
    world.take()
    world.say(StopComplete(0))
    assert world.take()[-1][4] == (2, 3)


def test_a_fault_that_a_retry_has_cured_is_over_also_if_the_cluster_sees_it_only_then() -> None:
    """Ranks fail one after the other, and the last one when everybody has been told: what it reports is seen late."""
    world = World("retry")
    world.say(ProcessFault({3: NETWORK}))
    world.say(StopComplete(0, {3: NETWORK}))
    world.say(ProcessFault({5: NETWORK}))
    world.say(Strategies(("retry", "exit")))
    late = world.fault(5, NETWORK, "8C1F860B", level="RestartBusiness", time_ms=int(world.now * 1000))
    world.hit(late)
    world.wait()  # for the routes
    world.say(Status(0, "retry"))
    assert (world.state, world.outcome) == ("INIT", "recovered")
    world.hit(late)
    assert world.state == "INIT"
    world.hit(world.fault(5, NETWORK, "8C1F860B", level="RestartBusiness", time_ms=int(world.now * 1000) + 1))
    assert world.state == "WaitReportStopCompleteState", "another one"


@pytest.mark.parametrize("strategy", ["dump", "exit"])
def test_all_pods_are_replaced_when_all_start_again_and_the_first_is_at_fault(strategy: str) -> None:
    """The others would wait for a place to meet that goes with it."""
    world = World(f"retry,{strategy}")
    world.say(ProcessFault({1: OTHER}))
    world.say(StopComplete(0))
    world.say(Strategies(("dump", "exit")))
    if strategy == "dump":
        world.say(Status(0, "dump"))
    assert [(len(each.uids), each.whole_job) for each in world.replaced][-1] == (4, True)
    assert world.state == "ListenScheduleResultState"
    world.replace(0, 1, 2, 3)
    assert (world.state, world.outcome) == ("INIT", "fell back")


def test_a_late_fault_of_a_pod_that_is_replaced_meanwhile_is_over() -> None:
    world = offered(World("retry"), "retry", "exit", faults={3: MEMORY})
    world.say(ProcessFault({5: OTHER}))
    world.replace(2)
    world.say(Status(0, "retry"))
    assert world.state == "INIT"


def test_a_fault_that_lasts_is_dealt_with_once_and_again_if_it_hits_the_new_pod() -> None:
    world = World("recover")
    fault = world.fault(3)
    world.hit(fault)
    world.say(StopComplete(0))
    world.say(Strategies(("recover", "exit")))
    world.replace(1)
    world.say(Status(0, "recover"))
    world.hit(fault)
    assert world.state == "INIT"
    world.hit(world.fault(3))
    assert world.state == "WaitReportStopCompleteState"


def test_a_fault_of_the_training_just_after_its_pod_was_replaced_is_about_the_one_before() -> None:
    world = World("recover")
    world.replace(1)
    stopped(world)
    assert world.take()[-1] == signal("globalFault", "on_global_rank", "fault_nodes_exit", faults=POD_1, nodes=())
    assert world.replaced == []


@pytest.mark.parametrize("level", ["NotHandleFault", "PreSeparateNPU", "SubHealthFault"])
def test_levels_that_call_for_nothing(level: str) -> None:
    world = World("recover")
    world.hit(world.fault(3, level=level))
    assert (world.state, world.log) == ("INIT", [])


def test_a_node_that_does_not_answer_is_left_to_the_training_to_miss() -> None:
    world = World("recover")
    world.hit(world.fault(3, code=""))
    assert (world.state, world.log) == ("INIT", [])


def test_faults_of_the_cluster_are_not_ours_without_the_label() -> None:
    world = World("recover", labels={"process-recover-enable": "off"})
    world.hit(world.fault(3))
    assert (world.state, world.log) == ("INIT", [])


def test_reports_that_nobody_waits_for_are_noted_and_ignored() -> None:
    world = World(ALL)
    for event in (StopComplete(0), Strategies(("retry",)), Status(0, "retry")):
        world.say(event)
        assert world.state == "INIT"
    assert [type(each) for each in world.log] == [Note] * 3
    offered(world, "recover", "exit")
    world.take()
    world.say(Status(0, "retry"))
    assert (world.state, world.take()) == ("WaitReportProcessRecoverStatusState", [])


def test_the_same_uuid_from_stop_to_end() -> None:
    world = offered(World("retry,recover,dump"), "retry", "recover", "dump", "exit", faults={3: MEMORY})
    world.say(Status(405, "retry"))
    world.say(Strategies(("recover", "dump", "exit")))
    world.say(Status(406, "recover"))
    world.say(Status(0, "dump"))
    assert len(world.signals) == 7
    assert len({each.uuid for each in world.signals}) == 1
    world.replace(1)
    world.say(ProcessFault({3: OTHER}))
    assert world.signals[-1].uuid != world.signals[0].uuid


def test_nothing_is_said_to_nobody_and_a_client_that_comes_is_stopped() -> None:
    world = World("recover", listening=False)
    world.hit(world.fault(3))
    assert (world.state, world.transcript) == ("NotifyStopTrainState", [])
    world.say(Subscribed())
    assert [each[0] for each in world.transcript] == ["preExitProcess", "stopTrain"]
    assert world.state == "WaitReportStopCompleteState"


def test_a_job_without_a_client_is_rescheduled_as_a_whole() -> None:
    world = World("recover", listening=False)
    world.hit(world.fault(3))
    world.wait()
    assert world.state == "FaultRetryState"
    assert [(each.whole_job, len(each.uids)) for each in world.replaced] == [(True, 4)]
    assert {"process-recover-enable": "pause"} in world.group
    world.replace(0, 1, 2, 3)
    assert {"process-recover-enable": "on"} in world.group
    assert (world.state, world.outcome) == ("INIT", "fell back")


def test_a_client_that_is_gone_for_a_moment_does_no_harm() -> None:
    world = offered(World("recover"), "recover", "exit")
    world.say(Unsubscribed())
    before = world.signals[-1]
    world.say(Subscribed(), after=10.0)
    assert world.signals[-1] == before
    world.say(Status(0, "recover"))
    assert world.state == "INIT"


def test_two_subscriptions_in_a_row() -> None:
    world = stopped(World("recover"))
    uuid = world.signals[-1].uuid
    world.take()
    world.say(Subscribed())
    assert world.transcript == [STOP_3]
    assert world.signals[0].uuid != uuid
    world.say(StopComplete(0))
    world.say(Strategies(("recover", "exit")))
    last = world.signals[-1]
    world.say(Subscribed())
    assert world.signals[-1] == last


def test_the_job_goes_away() -> None:
    world = offered(World("recover"), "recover", "exit")
    world.say(JobSeen(None))
    assert (world.state, world.machine.deadline, world.outcome) == ("INIT", None, "failed")
    world.say(Status(0, "recover"))
    assert world.state == "INIT"


def test_all_pods_are_new_in_the_middle_of_it() -> None:
    world = offered(World("recover"), "recover", "exit")
    world.replace(0, 1, 2, 3)
    assert (world.state, world.outcome) == ("INIT", "fell back")


def test_the_story_of_a_recovery() -> None:
    world = World("retry,recover")
    world.hit(world.fault(3))
    world.say(StopComplete(0))
    world.say(Strategies(("recover", "exit")))
    world.replace(1)
    world.say(Status(0, "recover"))
    kinds = [each.kind for each in world.log if isinstance(each, Note)]
    assert kinds == ["opened", "phase", "phase", "decision", "phase", "phase", "closed"]
    assert len({each.details["id"] for each in world.log if isinstance(each, Note)}) == 1
    assert "81078603" in world.notes("opened")[0].text
    decision = world.notes("decision")[0]
    assert decision.details["strategy"] == "recover"
    assert "retry: running the step again does not mend" in decision.text


def test_a_fallback_says_from_what_to_what_and_why() -> None:
    world = offered(World("recover,dump"), "recover", "dump", "exit")
    world.say(Status(406, "recover", info="no replica"))
    note = world.notes("fallback")[0]
    assert (note.details["from"], note.details["to"]) == ("recover", "dump")
    assert "406 no replica" in note.text


def test_the_label_comes_back_if_somebody_died_while_it_was_on_pause() -> None:
    world = World("recover")
    world.label(process_recover_enable="pause")
    assert world.group == [{"process-recover-enable": "on"}]
    world.log.clear()
    world.tick()  # still so: again
    assert world.group == [{"process-recover-enable": "on"}]
    world.label(process_recover_enable="on")
    assert world.machine.deadline is None


def test_ranks_that_the_job_does_not_have() -> None:
    world = World("recover")
    world.say(ProcessFault({99: OTHER, -1: OTHER}))
    assert (world.state, world.transcript) == ("INIT", [])
    world.say(ProcessFault({3: OTHER, 99: OTHER}))
    world.say(StopComplete(0, {98: OTHER}))
    assert world.transcript[0] == STOP_3
    assert world.transcript[1][3] == POD_1


def test_the_job_ends_well_meanwhile() -> None:
    world = offered(World("recover"), "recover", "exit")
    world.see(status="complete")
    assert (world.state, world.outcome) == ("INIT", "cancelled")


def test_the_pod_with_rank_0_is_replaced_like_any_other() -> None:
    """Its client goes with it, and another one comes from the new pod: that may take as long as a pod takes."""
    world = World("recover")
    world.say(ProcessFault({1: OTHER}))
    world.say(StopComplete(0))
    assert [each.uids for each in world.replaced] == [("pod-0-0",)]
    world.say(Strategies(("recover", "exit")))
    last = world.signals[-1]
    world.say(Unsubscribed())
    world.replace(0, phase="Pending")
    world.tick()
    world.tick()
    assert world.state == "WaitReportProcessRecoverStatusState"
    world.replace(0)
    world.say(Subscribed())
    assert world.signals[-1] == last
    world.say(Status(0, "recover"))
    assert (world.state, world.outcome) == ("INIT", "recovered")
