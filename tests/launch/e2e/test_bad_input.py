"""What users get wrong, and what the world does to them: a clear word or a recovery, never a hang, nothing lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evertrain.torch.errors import NO_STEPS, NOT_RESILIENT
from tests.launch import harness

ARGS = (f"--steps={harness.STEPS}",)


def trouble(kind: str, *rest: str, **options) -> harness.Result:
    return harness.run(kind, *rest, script=harness.TROUBLE, nproc=3, **options)


def test_a_script_that_does_not_exist() -> None:
    result = harness.run(script="no/such/script.py")
    assert result.code == 2
    assert "no/such/script.py" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("kind", "says", "line"),
    [
        pytest.param(
            "meta",
            "and initialise it) before it is given to Training",
            "training = Training(",
            marks=pytest.mark.exhaustive,
        ),
        ("no-sampler", "sampler=loader.sampler if each rank already has data of its own", "for step, (batch,) in"),
        pytest.param("generator", "can be read only once", "for step, (batch,) in", marks=pytest.mark.exhaustive),
        pytest.param("ddp", "give Training the bare module", "DistributedDataParallel(", marks=pytest.mark.exhaustive),
        pytest.param("bad-extra", "has no state_dict()", "training = Training(", marks=pytest.mark.exhaustive),
        ("not-resilient", NOT_RESILIENT, "for step, (batch,) in"),
        pytest.param("not-resilient-no-steps", NOT_RESILIENT, "training.model(batch)", marks=pytest.mark.exhaustive),
        ("no-steps", NO_STEPS, "optimizer.step()"),
        pytest.param("bad-directory", "/dev/null: File exists; it is a", "Training(", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.matrix
def test_a_mistake_is_told_once_and_whole_with_the_place_in_the_script(kind: str, says: str, line: str) -> None:
    result = trouble(kind)
    assert result.code == 1, result.explain()
    _, found, cause = result.err.rpartition("evertrain: the job has failed: ")
    assert found and says in cause, result.explain()
    assert result.err.count(says) == 1, result.explain()
    assert line in cause and str(harness.TROUBLE) in cause, result.explain()
    assert "Traceback" not in result.err and "/evertrain/torch/" not in result.err, result.explain()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("different-models", "rank 2"),
        ("before-training", "the data set is not where it should be"),
        pytest.param("never-called", "never called a function with @training.resilient", marks=pytest.mark.matrix),
    ],
)
def test_an_error_of_the_script_ends_the_job_with_the_cause(kind: str, says: str) -> None:
    result = trouble(kind)
    assert result.code == 1, result.explain()
    _, found, cause = result.err.rpartition("evertrain: the job has failed: ")
    assert found and says in cause, result.explain()
    assert result.err.count("Traceback") <= 2 * 3, "it was tried again and again"


@pytest.mark.matrix
def test_a_forgotten_decorator_under_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(harness.TROUBLE),
         "not-resilient"],
        capture_output=True, text=True, timeout=90, env=harness.environment(),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"UsageError: {NOT_RESILIENT}" in done.stderr, done.stderr


@pytest.mark.matrix
def test_evaluation_outside_of_the_training_function_is_allowed() -> None:
    result = trouble("evaluates-outside")
    assert result.code == 0, result.explain()
    assert result.out.count("weights") == 3, result.explain()


def test_ranks_that_start_from_different_weights_train_the_same_ones() -> None:
    result = trouble("different-seeds")
    assert result.code == 0, result.explain()
    weights = {line.split("weights")[1] for line in result.out.splitlines() if "weights" in line}
    assert len(weights) == 1, result.explain()


def test_strangers_on_the_controllers_port() -> None:
    result = trouble("strangers")
    assert result.code == 0, result.explain()
    assert "wrong job token" in result.out, result.explain()
    assert not result.incidents, result.explain()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [pytest.param("slow-step", marks=pytest.mark.exhaustive), "busy-step"])
def test_a_long_evaluation_is_not_a_hang(kind: str) -> None:
    result = trouble(kind)
    assert result.code == 0, result.explain()
    assert not result.incidents, result.explain()


@pytest.mark.matrix
def test_a_full_disk_costs_the_checkpoint_and_nothing_else(tmp_path) -> None:
    args = (*ARGS, f"--checkpoint-dir={tmp_path}", f"--checkpoint-every={harness.EVERY}")
    result = harness.run("full-disk", str(harness.EXAMPLE), *args, script=harness.TROUBLE)
    harness.assert_same_end(result, *ARGS)
    assert "no checkpoint of step 5" in result.err, result.explain()
    assert not list(tmp_path.iterdir()), "a half-written file was left"
    assert any(event["event"] == "checkpoint" and event["error"] for event in result.events)


@pytest.mark.matrix
def test_a_checkpoint_cut_in_half_is_passed_over(tmp_path) -> None:
    checkpoints = (f"--checkpoint-dir={tmp_path}", f"--checkpoint-every={harness.EVERY}")
    first = harness.run(*ARGS, *checkpoints, faults=("term@step=12,rank=1,phase=forward",))
    assert first.code == 143, first.explain()
    newest = max(tmp_path.glob("step-*.ckpt"))
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])

    second = harness.run(*ARGS, *checkpoints)
    harness.assert_same_end(second, *ARGS)
    assert newest.name in second.err, second.explain()
    assert "resuming from the checkpoint of step 10" in second.err, second.explain()


@pytest.mark.matrix
def test_a_checkpoint_of_another_model_is_refused(tmp_path) -> None:
    checkpoints = (f"--checkpoint-dir={tmp_path}", f"--checkpoint-every={harness.EVERY}")
    first = harness.run(*ARGS, *checkpoints)
    assert first.code == 0, first.explain()
    second = harness.run(*ARGS, *checkpoints, "--model-size=small")
    assert second.code == 1, second.explain()
    assert second.err.count("made by another model") == 1 and "Traceback" not in second.err, second.explain()
    _, _, cause = second.err.partition("made by another model")
    assert "letters.weight[28, 64]" in cause and "letters.weight[28, 128]" in cause, second.explain()
