"""Faults in a job that trains: what the launcher sees, reports and repairs, with ranks that need no torch."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests.launch.launching import TRAINER, finish, launch, start, wait_for

BOUND = 0.4


@pytest.fixture
def train(tmp_path):
    """Run the trainer: `train("kill@5@1", steps=20)` kills rank 1 in step 5, once."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)

    def run(*troubles, steps=20, seconds=0.02, ranks=2, options=()):
        arguments = (steps, seconds, tmp_path, *troubles)
        first = (f"--nproc-per-node={ranks}", f"--ft-bound={BOUND}", "--ft-warm=0", "--ft-grace=5")
        result = launch(*first, *options, script, *arguments, events=tmp_path / "events.jsonl")
        result.script = script
        return result

    run.script = script
    run.folder = tmp_path
    return run


def recovered(result, ranks=2, steps=20):
    assert result.code == 0, result
    for rank in range(ranks):
        assert f"[rank{rank}]: done {rank} {steps}" in result.out, result
    return result.incidents


def test_no_fault_no_incident(train):
    assert recovered(train()) == []


def test_a_killed_rank_is_replaced_and_seen_at_once(train):
    result = train("kill@5@1")
    (incident,) = recovered(result)
    (fault,) = incident["faults"]
    assert (fault["kind"], fault["rank"], fault["exit_code"], fault["step"]) == ("exit", 1, -9, 5)
    assert incident["decision"] == "recover-in-place" and incident["restarted"] == [1]
    assert (
        "evertrain: rank 1 was killed by SIGKILL at step 5; replaced by a new process and resumed at step" in result.err
    )
    assert result.out.count("training on 0") == 1, "the other rank was left alone"


def test_a_stopped_rank_is_replaced_long_before_the_bound(train):
    """As a process that is stopped, that is, and not as one that hangs."""
    (incident,) = recovered(train("stop@5@0"))
    assert incident["faults"][0]["kind"] == "stopped"


def test_an_exit_carries_its_last_words(train):
    (incident,) = recovered(train("exit@5@1"))
    assert incident["faults"][0]["detail"] == "exited with code 7; cannot go on"


def test_a_rank_blocked_in_a_system_call(train):
    (incident,) = recovered(train("sleep@5@1"))
    (fault,) = incident["faults"]
    assert fault["kind"] == "hang" and "blocked in a system call" in fault["detail"]
    assert "trainer.py" in fault["stack"] and "in trouble" in fault["stack"], "the stack tells where"
    assert incident["phases_ms"]["detect"] >= BOUND * 1000


def test_a_rank_that_holds_the_gil(train):
    (incident,) = recovered(train("gil@5@1"))
    (fault,) = incident["faults"]
    assert fault["kind"] == "hang" and "holds the GIL" in fault["detail"]


def test_an_endless_loop_gets_more_time(train):
    (incident,) = recovered(train("loop@5@1", options=["--ft-timing=busy_stall=1.5"]))
    (fault,) = incident["faults"]
    assert fault["kind"] == "hang" and "busy" in fault["detail"]
    assert incident["phases_ms"]["detect"] >= 1500


def test_ranks_that_all_wait_in_a_collective_are_retried_in_place(train):
    result = train("collective@5@*")
    (incident,) = recovered(result)
    assert [fault["kind"] for fault in incident["faults"]] == ["hccl"]
    assert "all ranks wait in a collective" in incident["faults"][0]["detail"]
    assert incident["decision"] == "retry" and incident["restarted"] == []


@pytest.mark.parametrize("trouble", ["slow@5@1", "data@5@1"])
def test_announced_slowness_and_a_slow_loader_are_no_faults(train, trouble):
    result = train(trouble, options=["--ft-timing=data_stall=5"])
    assert recovered(result) == []


def test_an_honest_but_slow_job_is_left_alone(train):
    """Steps that all take longer than the bound: the first one teaches, the bound grows with it."""
    assert recovered(train(steps=4, seconds=0.5, options=["--ft-timing=busy_stall=20"]), steps=4) == []


def test_what_a_killed_rank_started_is_killed_too(train):
    before = {process.pid for process in psutil.process_iter()}
    recovered(train("child@5@1", steps=100), steps=100)
    new = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert not [process for process in new if "1000" in " ".join(process.info["cmdline"] or [])]


def test_two_ranks_at_once(train):
    result = train("kill@5@0", "kill@5@2", ranks=3)
    incidents = recovered(result, ranks=3)
    assert sorted({rank for incident in incidents for rank in incident["restarted"]}) == [0, 2]


def test_a_fault_from_outside(train):
    """kill -9 by somebody else, on a rank found by its number in the events file."""
    events = train.folder / "events.jsonl"
    began = time.monotonic()
    launcher = start(
        "--nproc-per-node=2", "--ft-warm=0", f"--ft-bound={BOUND}", "--ft-events", events,
        train.script, 60, 0.02, train.folder,
    )  # fmt: skip
    wait_for(lambda: events.exists() and '"generation"' in events.read_text(), "the training")
    time.sleep(0.3)
    victim = next(child for child in psutil.Process(launcher.pid).children() if child.environ().get("RANK") == "0")
    victim.kill()
    result = finish(launcher, began, events)
    (incident,) = recovered(result, steps=60)
    assert incident["faults"][0]["exit_code"] == -9


def test_sigterm_writes_the_last_checkpoint_and_gives_143(train):
    events = train.folder / "events.jsonl"
    began = time.monotonic()
    launcher = start(
        "--nproc-per-node=2", "--ft-warm=0", "--ft-events", events, train.script, 10000, 0.02, train.folder
    )
    wait_for(lambda: events.exists() and '"generation"' in events.read_text(), "the training")
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)
    result = finish(launcher, began, events)
    assert result.code == 143, result
    step = int((train.folder / "dumped").read_text())
    assert step > 0
    last = result.err.strip().splitlines()[-1]
    assert last == f"evertrain: checkpoint of step {step} in dumped; the same command goes on from it", result
    assert "first cause" not in result.err


def test_a_rank_that_fails_again_and_again_ends_the_job_with_the_first_cause(train):
    troubles = [f"exit@5@{rank}" for rank in range(2)]
    script = train.script
    script.write_text(TRAINER.replace("O_CREAT | os.O_EXCL", "O_CREAT"))  # every time, not once
    result = train(*troubles, options=["--max-restarts=1"])
    assert result.code == 3, result
    assert result.err.strip().splitlines()[-1].startswith("evertrain: first cause: rank ")
    assert "cannot go on" in result.err.strip().splitlines()[-1]
    assert result.incidents[-1]["outcome"] == "ended"
