"""A model sharded by FSDP2 on a mesh of 2 replicas x 2 shards: after every fault the end is the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import harness
from tests.once import once

EXAMPLE = harness.ROOT / "examples" / "pytorch" / "train_fsdp.py"
ARGS = ("--mesh=2x2", f"--steps={harness.STEPS}")
RESTARTED = {"kill", "hang"}


@once
def undisturbed(*more: str, nproc: int = 4) -> harness.Result:
    result = harness.run(*ARGS, *more, script=EXAMPLE, nproc=nproc)
    assert result.code == 0, result.explain()
    assert set(result.ranks) == set(range(nproc)), result.explain()
    assert len(set(result.proof.values())) == 1, result.explain()
    assert not result.incidents, result.explain()
    return result


RUNS = {
    "kills": ("kill@step=4,rank=1,phase=backward", "kill@step=8,rank=2,phase=optimizer"),
    "more-kills": (
        "kill@step=1,rank=0,phase=forward",
        "kill@step=4,rank=3,phase=allreduce",
        "kill@step=7,rank=0,phase=optimizer",
        "kill@step=10,rank=1,phase=checkpoint",
    ),
    "other-kinds": (
        "exception@step=3,rank=0,phase=backward",
        "exception@step=5,rank=3,phase=optimizer",
        "uce@step=8,rank=1,phase=forward",
        "hang@step=11,rank=2,phase=allreduce",
    ),
}


@pytest.mark.parametrize("name", [pytest.param("kills", marks=pytest.mark.exhaustive), "more-kills", "other-kinds"])
@pytest.mark.matrix
def test_a_lost_shard_comes_from_its_replica(name: str, tmp_path: Path) -> None:
    result = harness.run(
        *ARGS, f"--checkpoint-every={harness.EVERY}", f"--checkpoint-dir={tmp_path / 'run'}",
        script=EXAMPLE, faults=RUNS[name], timeout=240,
    )  # fmt: skip
    assert result.code == 0, result.explain()
    assert result.proof == undisturbed().proof, result.explain()
    assert len(result.incidents) == len(RUNS[name]), result.explain()
    for incident, fault in zip(result.incidents, RUNS[name], strict=True):
        assert (incident["outcome"], incident["steps_lost"]) == ("recovered", 0), result.explain()
        kind, victim = fault.partition("@")[0], int(fault.partition("rank=")[2][0])
        assert set(incident["restarted"]) == ({victim} if kind in RESTARTED else set()), result.explain()


@pytest.mark.matrix
def test_the_only_holders_of_a_shard_are_waited_for_in_a_long_update() -> None:
    """Not only then: a first update takes half a second of processor time, on a busy machine more than a stop may."""
    script = harness.ROOT / "tests/torch/e2e/scripts/fsdp_long_update.py"
    result = harness.run(str(EXAMPLE), *ARGS, script=script, faults=("kill@step=1,rank=0,phase=forward",))
    assert result.code == 0, result.explain()
    assert result.proof == undisturbed().proof, result.explain()
    (incident,) = result.incidents
    assert (incident["outcome"], incident["steps_lost"], incident["restarted"]) == ("recovered", 0, [0])
    assert incident["phases_ms"]["stop"] > 2000, result.explain()


@pytest.mark.matrix
def test_both_holders_of_a_shard_lost(tmp_path: Path) -> None:
    """Ranks 1 and 3 hold shard 1; rank 3 dies when it is about to send it to the replacement of rank 1.

    Everybody loads the checkpoint of step 5, without a restart of the others.
    """
    result = harness.run(
        *ARGS, f"--checkpoint-every={harness.EVERY}", f"--checkpoint-dir={tmp_path / 'run'}",
        script=EXAMPLE, faults=("kill@step=7,rank=1,phase=backward", "kill@step=7,rank=3,phase=repair"),
    )  # fmt: skip
    assert result.code == 0, result.explain()
    assert result.proof == undisturbed().proof, result.explain()
    (incident,) = result.incidents
    assert (incident["step"], incident["steps_lost"], incident["restarted"]) == (5, 2, [1, 3]), result.explain()


@pytest.mark.matrix
def test_without_replicas_the_checkpoint_helps(tmp_path: Path) -> None:
    result = harness.run(
        "--mesh=1x2", f"--steps={harness.STEPS}", f"--checkpoint-every={harness.EVERY}",
        f"--checkpoint-dir={tmp_path / 'run'}",
        script=EXAMPLE, nproc=2, faults=("kill@step=7,rank=1,phase=backward",),
    )  # fmt: skip
    assert result.code == 0, result.explain()
    assert "the mesh has no replicas" in result.err
    assert result.proof == undisturbed("--mesh=1x2", nproc=2).proof, result.explain()
    assert [incident["steps_lost"] for incident in result.incidents] == [2], result.explain()


@pytest.mark.matrix
@pytest.mark.exhaustive
def test_accumulated_gradients(tmp_path: Path) -> None:
    more = ("--accumulate=2", "--batch-size=4")
    result = harness.run(*ARGS, *more, script=EXAMPLE, faults=("kill@step=6,rank=3,phase=backward",))
    assert result.code == 0, result.explain()
    assert result.proof == undisturbed(*more).proof, result.explain()


@pytest.mark.matrix
def test_an_update_that_only_some_shards_made_is_made_up_for(tmp_path: Path) -> None:
    result = harness.run(
        str(tmp_path), str(EXAMPLE), *ARGS, script=harness.ROOT / "tests/torch/e2e/scripts/fsdp_late.py"
    )
    assert result.code == 0, result.explain()
    assert result.proof == undisturbed().proof, result.explain()
    for incident in result.incidents:
        assert (incident["outcome"], incident["steps_lost"], incident["restarted"]) == ("recovered", 0, [])
    starts = [event["step"] for event in result.events if event["event"] == "generation"]
    assert starts[-1] == 6, "the ranks that had made the update were not the ones to go back"


@pytest.mark.matrix
@pytest.mark.exhaustive
def test_a_rank_is_lost_while_the_result_is_gathered() -> None:
    result = harness.run(str(EXAMPLE), *ARGS, script=harness.ROOT / "tests/torch/e2e/scripts/fsdp_gathering.py")
    assert result.code == 0, result.explain()
    assert result.proof == undisturbed().proof, result.explain()
    (incident,) = result.incidents
    assert (incident["outcome"], incident["steps_lost"], incident["restarted"]) == ("recovered", 0, [2])


@pytest.mark.matrix
@pytest.mark.exhaustive
def test_the_last_checkpoint_is_continued_from(tmp_path: Path) -> None:
    args = (*ARGS, f"--checkpoint-every={harness.EVERY}", f"--checkpoint-dir={tmp_path / 'run'}")
    ended = harness.run(*args, script=EXAMPLE, faults=("term@step=7,rank=0,phase=forward",))
    assert ended.code != 0 and not ended.ranks, ended.explain()
    result = harness.run(*args, script=EXAMPLE)
    assert result.code == 0, result.explain()
    assert "resuming from the checkpoint of step 7" in result.err
    assert result.proof == undisturbed().proof, result.explain()
