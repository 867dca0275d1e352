"""Without ClusterD: each report of the controller, and what the manager makes of it."""

from __future__ import annotations

from evertrain.taskd.frames import ProcessEnd
from evertrain.taskd.manager.alone import Alone
from evertrain.taskd.manager.orders import Signal
from evertrain.taskd.manager.reports import Progress, Report

OFFERED = ("retry", "recover", "downgrade", "dump", "exit")


def alone(*allowed: str) -> Alone:
    return Alone("job-1", world_size=8, per_node=4, allowed=allowed)


def to_choice(judge: Alone, faults: dict[int, int], offered: tuple[str, ...] = OFFERED) -> Signal:
    """From the fault to the strategy."""
    (stop,), _ = judge.report(Report("process_fault", faults))
    assert (stop.type, stop.actions, dict(stop.faults)) == ("stopTrain", ("stop_train",), faults)
    return chosen(judge, faults, offered)


def chosen(judge: Alone, faults: dict[int, int], offered: tuple[str, ...] = OFFERED) -> Signal:
    (known,), _ = judge.report(Report("stop_complete", faults))
    assert (known.type, known.actions) == ("globalFault", ("on_global_rank",))
    (choice,), why = judge.report(Report("recover_strategy", faults, strategies=offered))
    assert choice.type == "changeStrategy" and why
    return choice


def test_a_lost_process_is_replaced_in_its_pod() -> None:
    choice = to_choice(alone(), {5: 1})
    assert (choice.strategy, choice.extra, choice.nodes, dict(choice.faults)) == (
        "recover", "recover-in-place", (1,), {5: 1},
    )  # fmt: skip


def test_a_memory_error_is_retried_and_then_its_process_is_replaced() -> None:
    judge = alone()
    assert to_choice(judge, {5: 0}).strategy == "retry"
    (again,), _ = judge.report(Report("recover_status", {5: 0}, 405, "failed", strategy="retry"))
    assert again.type == "globalFault" and dict(again.faults) == {5: 1}
    (choice,), _ = judge.report(Report("recover_strategy", {5: 1}, strategies=OFFERED))
    assert choice.strategy == "recover"


def test_processes_that_could_not_be_replaced_leave_nothing_but_a_checkpoint() -> None:
    judge = alone()
    to_choice(judge, {5: 1})
    (choice,), _ = judge.report(Report("recover_status", {5: 1}, 405, "failed", strategy="recover"))
    assert (choice.type, choice.strategy) == ("changeStrategy", "dump")


def test_after_a_recovery_the_next_fault_starts_from_the_top() -> None:
    judge = alone()
    for _ in range(9):
        assert to_choice(judge, {5: 0}).strategy == "retry"
        assert judge.report(Report("recover_status", {}, 0, "ok", strategy="retry"))[0] == []


def test_a_second_fault_during_the_recovery_is_part_of_it() -> None:
    judge = alone()
    judge.report(Report("process_fault", {5: 0}))
    assert judge.report(Report("process_fault", {6: 1}))[0] == []
    choice = chosen(judge, {5: 0, 6: 1})
    assert choice.strategy == "recover" and dict(choice.faults) == {5: 0, 6: 1}


def test_what_the_job_does_not_allow_is_not_done() -> None:
    assert to_choice(alone("dump"), {5: 1}).strategy == "dump"
    assert to_choice(alone("recover"), {5: 0}).strategy == "recover"
    assert to_choice(alone("elastic-training"), {5: 1}).strategy == "downgrade"
    assert to_choice(alone(), {5: 1}, ("downgrade", "exit")).strategy == "exit"


def test_growing_smaller_lets_the_lost_nodes_go() -> None:
    judge = alone("elastic-training")
    assert to_choice(judge, {5: 1}).extra == '{"scale-in-strategy": "DP"}'
    (leave,), _ = judge.report(Report("recover_status", {4: 1, 5: 1}, 201, "", strategy="downgrade"))
    assert (leave.type, leave.actions, leave.nodes) == ("faultNodesExit", ("fault_nodes_exit",), (1,))


def test_with_a_process_its_whole_node_leaves_unless_it_is_the_first() -> None:
    judge = alone("elastic-training")
    judge.report(Report("process_fault", {5: 1}))
    (known,), _ = judge.report(Report("stop_complete", {5: 1}))
    assert dict(known.faults) == dict.fromkeys((4, 5, 6, 7), 1)
    judge = alone("elastic-training")
    judge.report(Report("process_fault", {1: 1, 5: 0}))
    (known,), _ = judge.report(Report("stop_complete", {1: 1, 5: 0}))
    assert dict(known.faults) == {1: 1, 5: 0}
    (choice,), _ = judge.report(Report("recover_strategy", {1: 1}, strategies=OFFERED))
    assert choice.strategy == "dump"
    judge = alone("elastic-training", "recover")
    judge.report(Report("process_fault", {5: 1}))
    assert dict(judge.report(Report("stop_complete", {5: 1}))[0][0].faults) == {5: 1}, "it can be replaced in its pod"


def smaller() -> Alone:
    """Without node 1."""
    judge = alone("elastic-training")
    to_choice(judge, {5: 1})
    judge.report(Report("recover_status", {4: 1, 5: 1, 6: 1, 7: 1}, 201, "", strategy="downgrade"))
    assert judge.grow(lambda node: True)[0] == [], "the others have not gone on yet"
    judge.report(Report("recover_status", {}, 0, "ok", strategy="downgrade"))
    return judge


def test_a_job_that_goes_on_without_a_node_grows_when_it_runs_again() -> None:
    judge = smaller()
    assert judge.grow(lambda node: node == 0) == ([], "")
    (change,), why = judge.grow(lambda node: node == 1)
    assert (change.type, change.strategy, change.extra) == ("changeStrategy", "upgrade", '{"scale-out-strategy": "DP"}')
    assert why == "nodes 1 run again; the job grows"
    assert judge.grow(lambda node: True)[0] == [], "it is under way"
    assert judge.report(Report("recover_status", {}, 0, "ok", strategy="upgrade"))[0] == []
    assert judge.grow(lambda node: False)[0] == judge.grow(lambda node: True)[0] == []
    assert to_choice(judge, {5: 1}).strategy == "downgrade"


def test_a_job_that_could_not_grow_tries_again_with_the_next_pod() -> None:
    judge = smaller()
    judge.grow(lambda node: True)
    judge.report(Report("recover_status", {}, 406, "not all ranks have come back in time", strategy="upgrade"))
    assert judge.grow(lambda node: True)[0] == judge.grow(lambda node: False)[0] == []
    assert [each.strategy for each in judge.grow(lambda node: True)[0]] == ["upgrade"]


def test_a_job_that_starts_again_as_a_whole_has_nothing_to_grow_by() -> None:
    judge = smaller()
    to_choice(judge, {1: 1}, ("dump", "exit"))
    assert judge.grow(lambda node: True)[0] == [], "there is a recovery"
    judge.report(Report("recover_status", {}, 0, "", strategy="dump"))
    assert judge.grow(lambda node: True)[0] == []


def test_a_recovery_that_fails_ends_in_a_checkpoint_and_a_restart() -> None:
    judge = alone()
    to_choice(judge, {5: 1})
    (dump,), _ = judge.report(Report("recover_status", {5: 1}, 406, "no replica", strategy="recover"))
    assert dump.strategy == "dump"
    (end,), _ = judge.report(Report("recover_status", {}, 0, "", strategy="dump"))
    assert end.strategy == "exit"
    (stop,), _ = judge.report(Report("process_fault", {1: 1}))
    assert stop.type == "stopTrain", "and the next fault is a new one"


def test_a_training_that_had_not_begun_starts_again() -> None:
    judge = alone()
    judge.report(Report("process_fault", {5: 1}))
    (end,), why = judge.report(Report("stop_complete", {}, 404, "not ready"))
    assert end.strategy == "exit" and "not begun" in why


def test_processes_that_never_met_the_controller_are_started_again_and_in_the_end_all() -> None:
    judge = alone()
    for _ in range(2):
        (again,), why = judge.unseen([5], protected=True)
        assert (again.type, again.actions, dict(again.faults), again.nodes) == (
            "globalFault", ("fault_nodes_restart",), {5: 1}, (1,),
        )  # fmt: skip
        assert "the start of rank 5 failed" in why
    (end,), why = judge.unseen([5], protected=True)
    assert end.strategy == "exit" and "3 times" in why


def test_a_training_that_nobody_protects_starts_again_as_a_whole() -> None:
    judge = alone()
    (end,), why = judge.unseen([4, 5], protected=False)
    assert (end.strategy, end.nodes) == ("exit", ()) and "no training to recover" in why


def test_what_ends_during_a_recovery_is_part_of_it() -> None:
    judge = alone()
    turn = judge.turn
    judge.report(Report("process_fault", {5: 1}))
    assert judge.turn > turn, "so that the report of the agent about the same end is known"
    assert judge.unseen([6], protected=True)[0] == []


def test_a_process_that_is_lost_is_lost_whatever_else_is_said_of_it() -> None:
    judge = alone()
    judge.report(Report("process_fault", {5: 1}))
    assert chosen(judge, {5: 0}).strategy == "recover"


def test_a_checkpoint_that_can_not_be_written_does_not_keep_all_from_starting_again() -> None:
    judge = alone("dump")
    assert to_choice(judge, {5: 1}).strategy == "dump"
    (end,), why = judge.report(Report("recover_status", {}, 407, "disk full", strategy="dump"))
    assert end.strategy == "exit" and "disk full" in why


def test_restarts_are_counted() -> None:
    judge = Alone("job-1", world_size=8, per_node=4, allowed=(), max_restarts=1)
    assert "restart 1 of 1" in judge.unseen([5], protected=False)[1]
    assert "all 1 restarts are used" in judge.unseen([5], protected=False)[1]


# How processes have ended, and how far the training is.

BROKEN = ProcessEnd(1, "exited with code 1")
KILLED = ProcessEnd(-9, "killed by SIGKILL")


def ends_the_job(signals: list[Signal]) -> str:
    (end,) = signals
    assert (end.type, end.nodes) == ("killMaster", (0, 1)), end
    return end.extra


def test_a_script_that_fails_before_anybody_has_met_the_controller_is_not_started_again() -> None:
    judge = alone()
    judge.ended({5: BROKEN}, 32767, 32767)
    signals, why = judge.unseen([5], protected=False)
    assert "an error of the script" in ends_the_job(signals) and "exited with code 1" in why


def test_it_is_if_somebody_asked_for_restarts_and_only_as_often() -> None:
    judge = alone()
    for left, text in ((2, "restart 1 of 2"), (1, "restart 2 of 2")):
        judge.ended({5: BROKEN}, 2, left)
        (again,), why = judge.unseen([5], protected=False)
        assert again.strategy == "exit" and text in why
    judge.ended({5: BROKEN}, 2, 0)
    assert "all 2 restarts are used" in ends_the_job(judge.unseen([5], protected=False)[0])


def test_a_process_that_was_killed_in_the_beginning_is_not_the_fault_of_the_script() -> None:
    judge = alone()
    judge.ended({5: KILLED}, 32767, 32767)
    (again,), _ = judge.unseen([5], protected=False)
    assert again.strategy == "exit"
    judge.ended({5: KILLED, 6: BROKEN}, 32767, 32766)
    (again,), why = judge.unseen([5, 6], protected=False)
    assert again.strategy == "exit" and "rank 5" in why, "whoever loses a peer fails, too"


def test_a_script_that_fails_before_its_first_step_is_not_started_again() -> None:
    for other_ranks_came in (True, False):
        judge = alone()
        judge.learn(Progress(0))
        judge.ended({5: BROKEN})
        if other_ranks_came:
            signals, _ = judge.unseen([5], protected=True)
        else:
            judge.report(Report("process_fault", {5: 1}))
            signals, _ = judge.report(Report("stop_complete", {5: 1}, 404, "not ready"))
        assert "before its first step (exit: exited with code 1): an error of the script" in ends_the_job(signals)


def test_an_error_before_the_first_step_ends_a_job_whose_ranks_were_all_prepared() -> None:
    judge = alone()
    judge.learn(Progress(0))
    judge.ended({5: BROKEN})
    assert to_choice(judge, {5: 1}).strategy == "dump", "if there is anything to save"
    signals, why = judge.report(Report("recover_status", {}, 406, "nothing to save", strategy="dump"))
    assert "an error of the script" in ends_the_job(signals) and "nothing to save" in why


def test_after_the_first_step_a_process_that_exits_is_replaced() -> None:
    judge = alone()
    judge.learn(Progress(1))
    judge.ended({5: BROKEN})
    assert to_choice(judge, {5: 1}).strategy == "recover"


def raises(judge: Alone, step: int, text: str = "RuntimeError: no") -> Signal:
    judge.learn(Progress(step, raised={5: text}))
    return to_choice(judge, {5: 1}, ("recover", "downgrade", "dump", "exit"))


def recovered(judge: Alone) -> None:
    assert judge.report(Report("recover_status", {}, 0, "ok", strategy="recover"))[0] == []


def test_the_same_exception_in_the_first_step_again_is_an_error_of_the_script() -> None:
    judge = alone()
    assert raises(judge, 0).strategy == "recover"
    judge.report(Report("recover_status", {5: 1}, 406, "it fails again", strategy="recover"))
    judge.report(Report("recover_status", {}, 406, "nothing to save", strategy="dump"))
    assert raises(judge, 0).strategy == "dump"
    signals, _ = judge.report(Report("recover_status", {}, 406, "nothing to save", strategy="dump"))
    assert "the same error at step 0 again and again" in ends_the_job(signals)
    assert "RuntimeError: no" in ends_the_job(signals)


def test_the_same_exception_at_the_same_step_is_tried_again_for_a_while_and_at_another_step_anew() -> None:
    judge = alone()
    for step in (7, 8):
        for _ in range(3):
            assert raises(judge, step).strategy == "recover"
            recovered(judge)
    assert raises(judge, 8).strategy == "dump"
    signals, _ = judge.report(Report("recover_status", {}, 0, "", strategy="dump"))
    assert "the same error at step 8 again and again" in ends_the_job(signals)


def test_other_exceptions_at_the_same_step_are_no_error_of_the_script() -> None:
    judge = alone()
    for attempt in range(4):
        assert raises(judge, 7, f"RuntimeError: {attempt}").strategy == "recover"
        recovered(judge)
    assert raises(judge, 7, "RuntimeError: 5").strategy == "dump"
    (again,), _ = judge.report(Report("recover_status", {}, 0, "", strategy="dump"))
    assert (again.type, again.strategy) == ("changeStrategy", "exit")


def test_who_fails_while_others_are_replaced_is_replaced_as_well_and_not_for_ever() -> None:
    judge = alone()
    judge.learn(Progress(3))
    to_choice(judge, {5: 1})
    (again,), why = judge.report(Report("process_fault", {2: 1}))
    assert (again.type, again.actions, dict(again.faults), again.nodes) == (
        "globalFault", ("fault_nodes_restart",), {2: 1}, (0,),
    )  # fmt: skip
    assert "during the recovery" in why
    for _ in range(2):
        judge.ended({5: KILLED})
        (again,), _ = judge.unseen([5], protected=True)
        assert again.actions == ("fault_nodes_restart",) and dict(again.faults) == {5: 1}, "a replacement has died"
    (dump,), why = judge.unseen([5], protected=True)
    assert dump.strategy == "dump" and "3 times" in why


def test_who_fails_while_nobody_is_replaced_is_left_to_the_controller() -> None:
    judge = alone()
    assert to_choice(judge, {5: 0}).strategy == "retry"
    assert judge.report(Report("process_fault", {2: 1}))[0] == []


def test_how_a_process_has_ended_matters_before_the_first_step() -> None:
    judge = alone()
    judge.learn(Progress(0, raised={4: "ValueError"}))
    judge.report(Report("process_fault", {5: 1}))
    strategies = Report("recover_strategy", {4: 1, 5: 1, 6: 0}, strategies=OFFERED)
    assert judge.lacks(strategies) == {5} == judge.lacks(Report("stop_complete", {}, 404, "not ready"))
    assert judge.lacks(Report("stop_complete", {5: 1})) == set()
    judge.ended({5: BROKEN})
    assert judge.lacks(strategies) == set()
    judge.learn(Progress(1))
    assert judge.lacks(Report("recover_strategy", {7: 1}, strategies=OFFERED)) == set()


def test_how_a_process_has_ended_says_nothing_about_the_one_that_replaces_it() -> None:
    judge = alone()
    judge.learn(Progress(0))
    judge.ended({5: KILLED})
    assert to_choice(judge, {5: 1}).strategy == "recover"
    _, why = judge.report(Report("process_fault", {5: 1}))
    assert "disconnected" in why and "SIGKILL" not in why
    assert judge.lacks(Report("recover_strategy", {5: 1}, strategies=OFFERED)) == {5}
