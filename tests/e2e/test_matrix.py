"""Every fault kind in every phase of a step, on the first, a middle and the last rank: the end is the same bits."""

from __future__ import annotations

import pytest

from evertrain.mindio.faultspec import KINDS
from tests.e2e import harness

PHASES = ("data", "forward", "backward", "allreduce", "optimizer", "checkpoint")
FAULTS = tuple(kind for kind in KINDS if kind != "term")
VICTIMS = (0, 1, harness.RANKS - 1)
FAULT_STEP = 6  # steps 0 to 5 are history; the next checkpoint is due at step 10
RESTARTED = {"kill", "stop", "exit", "gil", "segv", "hang"}

# One cell for every kind, and every phase and victim at least once.
QUICK = {
    ("kill", "allreduce", 0),
    ("kill", "optimizer", 1),
    ("stop", "forward", 1),
    ("exit", "data", 3),
    ("exception", "backward", 0),
    ("uce", "forward", 1),
    ("hccl", "allreduce", 3),
    ("gil", "backward", 1),
    ("segv", "checkpoint", 0),
    ("hang", "forward", 3),
    ("corrupt", "backward", 1),
}


def _cells() -> list[object]:
    return [
        pytest.param(
            kind, phase, victim,
            id=f"{kind}-{phase}-rank{victim}",
            marks=() if (kind, phase, victim) in QUICK else (pytest.mark.matrix,),
        )
        for kind in FAULTS
        for phase in PHASES
        for victim in VICTIMS
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "phase", "victim"), _cells())
def test_the_run_ends_in_the_same_bits(kind: str, phase: str, victim: int, tmp_path) -> None:
    script_args = [f"--steps={harness.STEPS}", f"--checkpoint-every={harness.EVERY}"]
    faults = [f"{kind}@step={FAULT_STEP},rank={victim},phase={phase}"]
    failing = {victim}
    if kind == "corrupt":
        # Nothing is repaired unless another rank is lost; the victim is the first holder after it, and so the source.
        # That rank is lost by a hang: by the time it is declared lost, every other rank waits for it with the same step
        # done. After a kill it could be that only some had got so far, and the source would be one of these.
        lost = (victim - 1) % harness.RANKS
        step = 10 if phase == "checkpoint" else FAULT_STEP
        faults.append(f"hang@step={step + 1},rank={lost},phase=forward")
        failing = {lost}

    result = harness.run(*script_args, f"--checkpoint-dir={tmp_path / 'run'}", faults=tuple(faults))

    assert result.code == 0, result.explain()
    assert result.proof == _undisturbed(tmp_path).proof, result.explain()
    assert result.incidents, f"the fault was not noticed\n{result.explain()}"
    for incident in result.incidents:
        assert incident["outcome"] == "recovered", result.explain()
        assert incident["steps_lost"] == 0, result.explain()
    restarted = {rank for incident in result.incidents for rank in incident["restarted"]}
    if kind == "corrupt":
        assert any(f["kind"] == "repair" for i in result.incidents for f in i["faults"]), result.explain()
        assert restarted == failing, result.explain()
    else:
        if kind in ("gil", "hang"):
            stacks = [f.get("stack", "") for i in result.incidents for f in i["faults"] if f["kind"] == "hang"]
            assert any("inject.py" in stack for stack in stacks), "the report does not show where the rank hung"
        assert restarted == (failing if kind in RESTARTED else set()), result.explain()
        assert {f["rank"] for i in result.incidents for f in i["faults"] if f["kind"] != "link"} == failing


def _undisturbed(tmp_path) -> harness.Result:
    # Checkpoints don't change the bits, so the run to compare with is made without them and serves all cells.
    return harness.undisturbed(f"--steps={harness.STEPS}")
