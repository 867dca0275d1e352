"""Orders to a running job: pause and continue, exchange a process. The end is the same bits."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.launch import harness
from tests.launch.controlled import Job, answer, job
from tests.launch.launching import in_charge

ARGS = ("--steps=60", "--log-every=1")


def prepared(running: Job) -> dict:
    """The newest line about a switch."""
    return (running.events("switch") or [{"state": ""}])[-1]


def begin_switch(running: Job, rank: int) -> tuple:
    """Pause, so that the training is not over before the new process is ready, and order it."""
    running.wait_until_it_trains()
    running.order("pause", "--timeout=100")
    asker = running.begin("hot-switch", f"--rank={rank}")

    def started() -> list[dict]:
        return [event for event in running.events("started") if event["rank"] == rank]

    running.wait("the new process", lambda: len(started()) == 2)
    return asker, started()


@pytest.mark.matrix
def test_a_paused_job_waits_and_a_prepared_process_takes_over_in_the_same_moment() -> None:
    with job(*ARGS, ft=("--ft-warm=0", "--ft-bound=1")) as running:
        running.wait_until_it_trains()
        text = running.order("pause", "--timeout=100")
        assert "paused at step" in text
        before = running.status()
        asker = running.begin("hot-switch", "--rank=1")
        running.wait("the new process", lambda: prepared(running)["state"] == "ready")
        time.sleep(3)  # longer than a rank may be without a sign of life
        assert running.status()["step"] == before["step"] and running.status()["paused"]
        assert not running.events("fault"), "a paused rank was taken for a hanging one"
        assert "is paused already" in running.order("pause", code=1)
        running.order("continue")
        assert "rank 1 has a new process" in answer(asker)
        result = running.finish()
    harness.assert_same_end(result, *ARGS, nproc=3)
    (incident,) = result.incidents
    assert (incident["decision"], incident["steps_lost"], incident["restarted"]) == ("hot-switch", 0, [1])
    assert incident["step"] == before["step"], "the pause was not at the end of a step"
    assert {fault["kind"] for fault in incident["faults"]} == {"hot-switch"}
    assert [(e["rank"], e["incarnation"]) for e in result.events if e["event"] == "started"][-1] == (1, 1)


@pytest.mark.matrix
@pytest.mark.exhaustive
def test_a_pause_alone_aborts_nothing_and_ends_by_itself() -> None:
    with job(*ARGS) as running:
        running.wait_until_it_trains()
        running.order("pause", "--timeout=1")
        running.wait("the end of the pause", lambda: running.events("continued"))
        assert "not paused" in running.order("continue", code=1)
        result = running.finish()
    harness.assert_same_end(result, *ARGS, nproc=3)
    assert not result.incidents
    assert len([event for event in result.events if event["event"] == "generation"]) == 1, "groups were built anew"


@pytest.mark.matrix
def test_a_pause_outlives_its_controller() -> None:
    with job(*ARGS, ft=("--ft-warm=0", "--ft-standby=1")) as running:
        running.wait_until_it_trains()
        running.order("pause", "--timeout=100")
        in_charge(running.process.pid, running.events_file).kill()
        running.wait("the pause under the new controller", lambda: len(running.events("paused")) == 2)
        running.wait("the address of the new controller", lambda: len(running.events("control")) == 2)
        running.order("continue")
        result = running.finish()
    harness.assert_same_end(result, *ARGS, nproc=3)
    assert not result.incidents
    assert len([event for event in result.events if event["event"] == "generation"]) == 1, "groups were built anew"


@pytest.mark.matrix
def test_a_pause_may_end_the_job_with_a_checkpoint(tmp_path) -> None:
    with job(*ARGS, f"--checkpoint-dir={tmp_path}") as running:
        running.wait_until_it_trains()
        running.order("pause", "--timeout=0.5", "--exit")
        result = running.finish()
    assert result.code == 1, result.explain()
    assert any(event["event"] == "checkpoint" and event["ok"] for event in result.events), result.explain()
    resumed = harness.run(*ARGS, f"--checkpoint-dir={tmp_path}", nproc=3)
    harness.assert_same_end(resumed, *ARGS, nproc=3)


@pytest.mark.matrix
@pytest.mark.exhaustive
def test_a_cancelled_switch_leaves_no_trace() -> None:
    with job(*ARGS) as running:
        asker, started = begin_switch(running, 2)
        running.order("cancel-switch")
        assert "cancelled" in answer(asker, 1)
        running.wait("the end of the new process", lambda: not _lives(started[-1]["pid"]))
        running.order("continue")
        result = running.finish()
    harness.assert_same_end(result, *ARGS, nproc=3)
    assert not result.incidents


@pytest.mark.matrix
@pytest.mark.exhaustive
def test_a_prepared_process_that_dies_disturbs_nobody() -> None:
    with job(*ARGS) as running:
        asker, started = begin_switch(running, 2)
        os.kill(started[-1]["pid"], signal.SIGKILL)
        assert "came to nothing" in answer(asker, 1)
        running.order("continue")
        result = running.finish()
    harness.assert_same_end(result, *ARGS, nproc=3)
    assert not result.incidents


@pytest.mark.matrix
def test_the_old_process_dies_while_the_new_one_is_prepared() -> None:
    with job(*ARGS) as running:
        asker, started = begin_switch(running, 2)
        os.kill(started[0]["pid"], signal.SIGKILL)
        answer(asker)
        running.wait("the recovery", lambda: running.events("incident"))
        running.order("continue")
        result = running.finish()
    harness.assert_same_end(result, *ARGS, nproc=3)
    assert [incident["decision"] for incident in result.incidents] == ["recover-in-place"], result.explain()
    assert len([event for event in result.events if event["event"] == "started" and event["rank"] == 2]) == 2


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
