"""Jobs whose optimizer is sharded: the same bits after every fault, and what happens when a shard is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import harness

STEPS = (f"--steps={harness.STEPS}", "--sharded")
EVERY = f"--checkpoint-every={harness.EVERY}"
FAULT_STEP = 6
RESTARTED = {"kill", "stop", "exit", "gil", "segv", "hang"}

Cell = tuple[str, str, int]  # kind, phase, victim

CELLS: list[list[Cell]] = [
    [("exception", "optimizer", 2), ("kill", "optimizer", 0), ("stop", "gather", 3), ("uce", "forward", 3)],
    [("kill", "allreduce", 3), ("exit", "checkpoint", 0), ("hccl", "allreduce", 2), ("segv", "gather", 2)],
    [("exception", "gather", 0), ("gil", "optimizer", 1), ("uce", "gather", 1), ("hang", "gather", 0)],
]
"""Each list is one run, its faults some steps apart; checkpoints are due every 5 steps."""
APART = 4


@pytest.mark.parametrize(
    "cells",
    [[("kill", "gather", 1)], *(pytest.param(cells, marks=pytest.mark.matrix) for cells in CELLS)],
    ids=lambda cells: "-".join(kind for kind, _, _ in cells),
)
def test_the_run_ends_in_the_same_bits(cells: list[Cell], tmp_path: Path) -> None:
    faults = [
        f"{kind}@step={FAULT_STEP + APART * index},rank={victim},phase={phase}"
        for index, (kind, phase, victim) in enumerate(cells)
    ]
    steps = (f"--steps={FAULT_STEP + APART * (len(cells) + 1)}", "--sharded")
    result = harness.run(*steps, EVERY, f"--checkpoint-dir={tmp_path}", faults=tuple(faults))
    harness.assert_same_end(result, *steps)
    for incident in result.incidents:
        assert (incident["outcome"], incident["steps_lost"]) == ("recovered", 0), result.explain()
    restarted = sorted(rank for incident in result.incidents for rank in incident["restarted"])
    assert restarted == sorted(victim for kind, _, victim in cells if kind in RESTARTED), result.explain()
    caused = [each for each in result.incidents if any(fault["kind"] != "link" for fault in each["faults"])]
    assert len(caused) == len(cells), result.explain()


@pytest.mark.matrix
def test_a_step_that_one_rank_has_completed_is_completed_by_all(tmp_path: Path) -> None:
    """Rank 0 alone has the new weights; the others have their own shards of that step, and take the weights from it."""
    script = Path(__file__).parent / "scripts" / "half_gathered.py"
    result = harness.run(str(tmp_path), str(FAULT_STEP), *STEPS, script=script)
    harness.assert_same_end(result, *STEPS)
    (incident,) = result.incidents
    assert (incident["step"], incident["steps_lost"], incident["restarted"]) == (FAULT_STEP + 1, 0, [3])


@pytest.mark.exhaustive
def test_deaths_in_one_gathering_after_the_other() -> None:
    faults = tuple(f"kill@step={step},rank={step % harness.RANKS},phase=gather" for step in (1, 4, 7, 10))
    result = harness.run(*STEPS, faults=faults)
    harness.assert_same_end(result, *STEPS)
    assert [incident["steps_lost"] for incident in result.incidents] == [0] * 4, result.explain()


@pytest.mark.matrix
def test_a_shard_with_flipped_bits_is_found_out(tmp_path: Path) -> None:
    """Rank 3 is lost and gets its weights from rank 0, in whose memory bits flip."""
    faults = (f"corrupt@step={FAULT_STEP},rank=0,phase=backward", f"hang@step={FAULT_STEP + 1},rank=3,phase=forward")
    result = harness.run(*STEPS, faults=faults)
    harness.assert_same_end(result, *STEPS)
    assert any(f["kind"] == "repair" for i in result.incidents for f in i["faults"]), result.explain()


@pytest.mark.matrix
def test_without_a_copy_of_a_shard_all_load_the_checkpoint_online(tmp_path: Path) -> None:
    """Rank 1 is lost, and rank 3, the other holder of its shard, dies when it is about to send it.

    Who gets to the update has the gradients of all ranks, so all of them have completed the step before.
    """
    faults = (f"kill@step={FAULT_STEP},rank=1,phase=optimizer", f"kill@step={FAULT_STEP},rank=3,phase=repair")
    result = harness.run(*STEPS, EVERY, f"--checkpoint-dir={tmp_path}", faults=faults)
    harness.assert_same_end(result, *STEPS)
    (incident,) = result.incidents
    assert (incident["outcome"], incident["step"], incident["steps_lost"]) == ("recovered", 5, 1), result.explain()
    assert sorted(incident["restarted"]) == [1, 3], result.explain()
    assert any("no rank has a clean copy of shard:1" in e.get("reason", "") for e in result.events), result.explain()


@pytest.mark.matrix
def test_one_copy_only_means_the_checkpoint(tmp_path: Path) -> None:
    args = (*STEPS, "--replica-cnt=1")
    fault = f"kill@step={FAULT_STEP},rank=2,phase=optimizer"
    result = harness.run(*args, EVERY, f"--checkpoint-dir={tmp_path}", faults=(fault,))
    harness.assert_same_end(result, *args)
    (incident,) = result.incidents
    assert (incident["step"], incident["steps_lost"], incident["restarted"]) == (5, 1, [2]), result.explain()


@pytest.mark.matrix
def test_terminated_and_continued(tmp_path: Path) -> None:
    """SIGTERM makes the ranks write their parts; the next start goes on from there, also cut in another way."""
    where = f"--checkpoint-dir={tmp_path}"
    first = harness.run(*STEPS, where, faults=(f"term@step={FAULT_STEP},rank=1,phase=backward",))
    assert first.code == 143, first.explain()
    (manifest,) = tmp_path.glob("*.ckpt")
    names = sorted(path.name.partition(".")[0] for path in manifest.with_suffix(".parts").iterdir())
    assert names == ["shard-0", "shard-1", "state"], first.explain()
    second = harness.run(*STEPS, where)
    harness.assert_same_end(second, *STEPS)
    assert "resuming from the checkpoint of step" in second.out + second.err, second.explain()


@pytest.mark.matrix
def test_a_checkpoint_is_cut_anew_for_other_numbers(tmp_path: Path) -> None:
    """Written with two copies of each shard, loaded with four, and without sharding: the same run to the last bit.

    Element-wise updates don't depend on where the shards begin, so the end is that of any sharded run.
    """
    where = f"--checkpoint-dir={tmp_path}"
    first = harness.run(f"--steps={FAULT_STEP}", "--sharded", where, f"--checkpoint-every={FAULT_STEP}")
    assert first.code == 0, first.explain()
    ends = set()
    for cut in (("--sharded", "--replica-cnt=2"), ("--sharded", "--replica-cnt=4"), ()):
        result = harness.run(f"--steps={FAULT_STEP}", *cut, where)
        assert result.code == 0, result.explain()
        assert "resuming from the checkpoint of step" in result.out + result.err, result.explain()
        ends |= set(result.proof.values())
    assert ends == set(first.proof.values())


def test_what_can_not_be_sharded_is_told_at_once() -> None:
    result = harness.run("--steps=2", "--sharded", "--replica-cnt=3", nproc=2)
    assert result.code == 1 and "multiple of replica_cnt" in result.err + result.out, result.explain()
