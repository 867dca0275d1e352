"""Every fault kind in every phase of a step, on the first, a middle and the last rank: the end is the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.mindio.faultspec import KINDS
from tests.e2e import harness

PHASES = ("data", "forward", "backward", "allreduce", "optimizer", "checkpoint")
FAULTS = tuple(kind for kind in KINDS if kind != "term")
VICTIMS = (0, 1, harness.RANKS - 1)
FAULT_STEP = 6  # steps 0 to 5 are history; the next checkpoint is due at step 10
RESTARTED = {"kill", "stop", "exit", "gil", "segv", "hang"}

# One cell for every kind, and every phase and victim at least once.
QUICK = [
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
]


@pytest.mark.parametrize(("kind", "phase", "victim"), QUICK)
def test_the_run_ends_in_the_same_bits(kind: str, phase: str, victim: int, tmp_path) -> None:
    result = _run(tmp_path, harness.STEPS, _faults(kind, phase, victim, FAULT_STEP))

    assert len(_caused(result)) == 1, result.explain()
    _check(result, kind, victim)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_the_run_ends_in_the_same_bits_after_a_fault_in_every_phase(kind: str, victim: int, tmp_path) -> None:
    # One run with six faults some steps apart instead of six runs: each fault is an incident of its own, judged by
    # itself, and a wrong bit of any of them is in the end of the run.
    every_phase = [
        fault
        for index, phase in enumerate(PHASES)
        for fault in _faults(kind, phase, victim, FAULT_STEP + 4 * index)
    ]  # fmt: skip
    result = _run(tmp_path, FAULT_STEP + 4 * len(PHASES) + 4, every_phase)

    assert len(_caused(result)) == len(PHASES), result.explain()
    _check(result, kind, victim)


def _faults(kind: str, phase: str, victim: int, step: int) -> list[str]:
    faults = [f"{kind}@step={step},rank={victim},phase={phase}"]
    if kind == "corrupt":
        # Nothing is repaired unless another rank is lost; the victim is the first holder after it, and so the source.
        # That rank is lost by a hang: by the time it is declared lost, every other rank waits for it with the same step
        # done. After a kill it could be that only some had got so far, and the source would be one of these.
        if phase == "checkpoint":
            step += -step % harness.EVERY
        faults.append(f"hang@step={step + 1},rank={_lost_beside(victim)},phase=forward")
    return faults


def _lost_beside(victim: int) -> int:
    return (victim - 1) % harness.RANKS


def _run(tmp_path, steps: int, faults: list[str]) -> harness.Result:
    checkpoints = (f"--checkpoint-every={harness.EVERY}", f"--checkpoint-dir={tmp_path / 'run'}")
    result = harness.run(f"--steps={steps}", *checkpoints, faults=tuple(faults))
    # Checkpoints don't change the bits, so the run to compare with is made without them and serves all cells.
    harness.assert_same_end(result, f"--steps={steps}")
    return result


def _caused(result: harness.Result) -> list[dict[str, Any]]:
    """The incidents that a rank's own fault opened, not only what others saw of one."""
    return [i for i in result.incidents if any(f["kind"] != "link" for f in i["faults"])]


def _check(result: harness.Result, kind: str, victim: int) -> None:
    """Every incident was recovered from without loss, by the means that this kind of fault calls for."""
    failing = _lost_beside(victim) if kind == "corrupt" else victim
    for incident in result.incidents:
        assert incident["outcome"] == "recovered", result.explain()
        assert incident["steps_lost"] == 0, result.explain()
    for incident in _caused(result):
        kinds = {fault["kind"] for fault in incident["faults"]}
        restarted = incident["restarted"]
        assert restarted == ([failing] if kind in RESTARTED or kind == "corrupt" else []), result.explain()
        if kind == "corrupt":
            assert "repair" in kinds, result.explain()
        else:
            assert {f["rank"] for f in incident["faults"] if f["kind"] != "link"} == {victim}, result.explain()
        if kind in ("gil", "hang"):
            stacks = [fault.get("stack", "") for fault in incident["faults"] if fault["kind"] == "hang"]
            assert any("inject.py" in stack for stack in stacks), "the report does not show where the rank hung"
