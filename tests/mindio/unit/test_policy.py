"""The ladder of strategies, one step at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evertrain.mindio.controller.policy import (
    EXIT,
    PROCESS_LOST,
    RECOVER_IN_PLACE,
    RESTART,
    RETRY,
    History,
    Situation,
    after_failed_attempt,
    decide,
    rank_list,
)
from evertrain.mindio.protocol import FAULT_KINDS, Fault

RUNNING = Situation(
    step=12, starting=False, trained=True, protected=True, released=False,
    world_size=4, restarts_used=0, max_restarts=1,
)  # fmt: skip


def ladder(fault: Fault, situation: Situation, times: int) -> list[str]:
    history, strategies = History(), []
    for _ in range(times):
        decision = decide(fault, situation, history)
        history.note(fault, situation, decision)
        strategies.append(decision.strategy)
        if decision.strategy == RESTART:
            situation = replace(situation, restarts_used=situation.restarts_used + 1)
    return strategies


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_the_first_answer_to_every_kind(kind: str) -> None:
    decision = decide(Fault(kind=kind, rank=1), RUNNING, History())
    expected = EXIT if kind == "script" else RECOVER_IN_PLACE if kind in PROCESS_LOST else RETRY
    assert decision.strategy == expected
    assert "rank 1" in decision.explanation


def test_what_is_wrong_with_the_script_is_told_whole() -> None:
    detail = "do this instead: " + "word " * 100 + "\nand that"
    assert decide(Fault(kind="script", rank=1, detail=detail), RUNNING, History()).explanation == f"rank 1: {detail}"


def test_a_rank_that_raises_the_same_at_the_same_step_again_and_again_is_an_error_of_the_script() -> None:
    fault, history = Fault(kind="exception", rank=1, detail="ValueError: typo"), History()
    for expected in (RETRY, RETRY, RECOVER_IN_PLACE):
        decision = decide(fault, RUNNING, history)
        assert decision.strategy == expected and not decision.script
        history.note(fault, RUNNING, decision)
    decision = decide(fault, RUNNING, history)
    assert decision.strategy == EXIT and decision.script
    assert "the same error at step 12 again and again: an error of the script" in decision.explanation


def test_different_errors_at_the_same_step_take_the_whole_ladder() -> None:
    history, strategies, situation = History(), [], RUNNING
    for number in range(6):
        fault = Fault(kind="exception", rank=1, detail=f"OSError: {number}")
        decision = decide(fault, situation, history)
        history.note(fault, situation, decision)
        strategies.append(decision.strategy)
        if decision.strategy == RESTART:
            situation = replace(situation, restarts_used=1)
    assert strategies == [RETRY, RETRY, RECOVER_IN_PLACE, RECOVER_IN_PLACE, RESTART, EXIT]


def test_nobody_is_replaced_when_all_ranks_raise_the_same() -> None:
    """A replacement of all would lose the state and change nothing."""
    history = History()
    for _ in range(2):
        for rank in range(4):
            fault = Fault(kind="exception", rank=rank, detail="ValueError: typo")
            decision = decide(fault, RUNNING, history)
            assert decision.strategy == RETRY
            history.note(fault, RUNNING, decision)
    assert decide(Fault(kind="exception", rank=2, detail="ValueError: typo"), RUNNING, history).script
    other = decide(Fault(kind="exception", rank=2, detail="OSError: disk"), RUNNING, history)
    assert other.strategy == RECOVER_IN_PLACE


def test_an_exception_before_the_first_completed_step_is_retried_once() -> None:
    fault, first = Fault(kind="exception", rank=1, detail="NameError: x"), replace(RUNNING, step=0, completed=False)
    assert ladder(fault, first, 2) == [RETRY, EXIT]
    assert ladder(Fault(kind="hccl", rank=1), first, 2) == [RETRY, RETRY]


def test_a_rank_that_dies_at_the_same_step_again_and_again() -> None:
    assert ladder(Fault(kind="exit", rank=1), RUNNING, 4) == [RECOVER_IN_PLACE, RECOVER_IN_PLACE, RESTART, EXIT]


def test_another_step_or_another_rank_begins_at_the_top() -> None:
    history = History()
    for _ in range(4):
        fault = Fault(kind="exception", rank=1)
        history.note(fault, RUNNING, decide(fault, RUNNING, history))
    assert decide(Fault(kind="exception", rank=1), replace(RUNNING, step=13), history).strategy == RETRY
    assert decide(Fault(kind="exception", rank=2), RUNNING, history).strategy == RETRY
    assert decide(Fault(kind="exception", rank=1), RUNNING, history).strategy == EXIT


def test_a_single_rank_has_nobody_to_be_repaired_from() -> None:
    alone = replace(RUNNING, world_size=1)
    assert ladder(Fault(kind="hccl", rank=0), alone, 3) == [RETRY, RETRY, RESTART]
    assert ladder(Fault(kind="exception", rank=0), alone, 3) == [RETRY, RETRY, EXIT]


def test_failed_starts() -> None:
    starting = replace(RUNNING, starting=True)
    assert ladder(Fault(kind="start", rank=1), starting, 4) == [RECOVER_IN_PLACE, RECOVER_IN_PLACE, RESTART, EXIT]
    history = History()
    history.note(Fault(kind="start", rank=1), starting, decide(Fault(kind="start", rank=1), starting, history))
    history.reached_training(1)
    assert history.failed_starts[1] == 0


def test_an_error_of_the_script_before_its_first_step_ends_the_job_at_once() -> None:
    first = replace(RUNNING, starting=True, trained=False)
    decision = decide(Fault(kind="exit", rank=2, exit_code=1, detail="exit code 1"), first, History())
    assert decision.strategy == EXIT
    assert decision.explanation == "rank 2 ended before its first step (exit: exit code 1): an error of the script"
    assert decide(Fault(kind="exit", rank=2, exit_code=-9), first, History()).strategy == RECOVER_IN_PLACE


def test_a_script_without_training_is_restarted_like_by_torchrun() -> None:
    plain = replace(RUNNING, starting=True, trained=False, protected=False)
    fault = Fault(kind="exit", rank=0, exit_code=1)
    assert ladder(fault, plain, 2) == [RESTART, EXIT]
    assert ladder(fault, replace(plain, max_restarts=0), 1) == [EXIT]


def test_a_script_that_ends_itself_without_training_is_not_restarted_unasked() -> None:
    plain = replace(RUNNING, starting=True, trained=False, protected=False, asked=False)
    decision = decide(Fault(kind="exit", rank=0, exit_code=2), plain, History())
    assert decision.strategy == EXIT and decision.script and "an error of the script" in decision.explanation
    assert decide(Fault(kind="exit", rank=0, exit_code=-9), plain, History()).strategy == RESTART


def test_ranks_in_words() -> None:
    assert rank_list([0, 1, 2, 3, 6]) == "0-3, 6"


def test_a_failure_after_the_end_of_the_training() -> None:
    released = replace(RUNNING, released=True)
    assert ladder(Fault(kind="exit", rank=0, exit_code=1), released, 2) == [RESTART, EXIT]


def test_attempts_of_a_recovery() -> None:
    assert after_failed_attempt(1, "x", RUNNING).strategy == RETRY
    assert after_failed_attempt(2, "x", RUNNING).strategy == RETRY
    third = after_failed_attempt(3, "rank 2 did not join", RUNNING)
    assert third.strategy == RESTART
    assert third.explanation == "3 recovery attempts failed, the last because rank 2 did not join; restart 1 of 1"


def test_a_forgiven_retry_does_not_count() -> None:
    history, fault = History(), Fault(kind="link", rank=1)
    for _ in range(5):
        decision = decide(fault, RUNNING, history)
        assert decision.strategy == RETRY
        history.note(fault, RUNNING, decision)
        history.forgive(1, RUNNING.step)
