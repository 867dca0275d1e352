"""SIGTERM gives a dying-gasp checkpoint at any point of a step, and the next start goes on from there."""

from __future__ import annotations

import re

import pytest

from tests.launch import harness

ARGS = (f"--steps={harness.STEPS}",)


@pytest.mark.parametrize(
    "phase",
    [
        "optimizer",
        *(pytest.param(phase, marks=pytest.mark.matrix) for phase in ("allreduce",)),
        *(pytest.param(phase, marks=pytest.mark.exhaustive) for phase in ("data", "forward", "backward", "checkpoint")),
    ],
)
def test_sigterm_dumps_and_a_restart_goes_on(phase: str, tmp_path) -> None:
    # Long steps: the signal reaches the launcher while the training goes on, and on a busy machine that takes a while.
    args = (*ARGS, "--accumulate=4", "--log-every=1")
    checkpoints = (f"--checkpoint-dir={tmp_path}", f"--checkpoint-every={harness.EVERY}")
    first = harness.run(*args, *checkpoints, faults=(f"term@step=6,rank=1,phase={phase}",))
    assert first.code == 143, first.explain()
    assert not first.ranks, first.explain()
    told = 10 if phase == "checkpoint" else 6
    newest = max(int(path.stem.split("-")[1]) for path in tmp_path.glob("step-*.ckpt"))
    done = max(int(step) for step in re.findall(r"^\[rank0\]: step (\d+)/", first.out, re.MULTILINE))
    assert told <= newest and done <= newest + 1, f"the dump repeats at most the current step\n{first.explain()}"

    second = harness.run(*args, *checkpoints)
    harness.assert_same_end(second, *args)
    assert f"resuming from the checkpoint of step {newest}" in second.err


@pytest.mark.matrix
def test_sigterm_during_a_recovery(tmp_path) -> None:
    checkpoints = (f"--checkpoint-dir={tmp_path}",)
    faults = ("kill@step=6,rank=1,phase=forward", "term@step=0,rank=2,phase=repair")
    first = harness.run(*ARGS, *checkpoints, faults=faults)
    assert first.code == 143, first.explain()
    second = harness.run(*ARGS, *checkpoints)
    harness.assert_same_end(second, *ARGS)
    assert "resuming from the checkpoint of step 6" in second.err or "of step 7" in second.err


@pytest.mark.matrix
def test_restart_of_all_from_the_checkpoint_when_nobody_has_the_state(tmp_path) -> None:
    """All ranks lose their state in the same step: everybody goes back to the newest checkpoint."""
    faults = tuple(f"kill@step=7,rank={rank},phase=forward" for rank in range(harness.RANKS))
    checkpoints = (f"--checkpoint-dir={tmp_path}", f"--checkpoint-every={harness.EVERY}")
    result = harness.run(*ARGS, *checkpoints, faults=faults)
    harness.assert_same_end(result, *ARGS)


@pytest.mark.matrix
def test_state_lost_in_living_processes_is_loaded_online(tmp_path) -> None:
    """All ranks lose their state in the same update, and no process ends."""
    ends = []
    for kind in ("none", "lost-everywhere"):
        result = harness.run(kind, str(tmp_path / kind), script=harness.TROUBLE, nproc=3)
        assert result.code == 0, result.explain()
        ends.append({line.split("weights")[1] for line in result.out.splitlines() if "weights" in line})
    assert ends[0] == ends[1] and len(ends[0]) == 1
    assert not any(incident["restarted"] for incident in result.incidents), result.explain()
    assert any(incident["steps_lost"] == 2 for incident in result.incidents), result.explain()


@pytest.mark.matrix
def test_an_error_that_comes_again_and_again_ends_the_job_and_is_said_last(tmp_path) -> None:
    faults = ("exception@step=5,rank=2,phase=forward,times=200",)
    result = harness.run(*ARGS, faults=faults, ft=("--max-restarts=1",))
    assert result.code == 1, result.explain()
    assert "the same error at step 5 again and again: an error of the script" in result.err, result.explain()
    assert not result.ranks
    last = "\n".join(result.err.strip().splitlines()[-4:])
    assert "rank 2" in last and "InjectedFault" in last, result.explain()
