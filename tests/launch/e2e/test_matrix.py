"""Every fault kind in every phase of a step, on the first, a middle and the last rank: the end is the same bits.

One run has several faults some steps apart: each is an incident of its own, judged by itself, and a wrong bit of any of
them is in the end of the run.
"""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.mindio.faultspec import KINDS
from tests.launch import harness

PHASES = ("data", "forward", "backward", "allreduce", "optimizer", "checkpoint")
FAULTS = tuple(kind for kind in KINDS if kind != "term")
VICTIMS = (0, 1, harness.RANKS - 1)
FIRST, APART = 6, 4  # steps 0 to 5 are history; checkpoints are due every 5 steps
RESTARTED = {"kill", "stop", "exit", "gil", "segv", "hang"}

Cell = tuple[str, str, int]  # kind, phase, victim

# Every kind, and every phase and victim at least once.
QUICK: dict[str, list[Cell]] = {
    "processes end": [
        ("kill", "allreduce", 0), ("exit", "data", 3), ("kill", "optimizer", 1), ("segv", "checkpoint", 0),
    ],
    "processes live": [("exception", "backward", 0), ("uce", "forward", 1), ("hccl", "allreduce", 3)],
    "processes stand still": [("stop", "forward", 1), ("gil", "backward", 1), ("hang", "forward", 3)],
    "a copy is bad": [("corrupt", "backward", 1)],
}  # fmt: skip


@pytest.mark.parametrize("cells", QUICK.values(), ids=QUICK)
def test_the_run_ends_in_the_same_bits(cells: list[Cell], tmp_path) -> None:
    _survives(cells, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FAULTS)
def test_the_run_ends_in_the_same_bits_after_a_fault_in_every_phase(kind: str, tmp_path) -> None:
    """Every kind in every phase, and every phase on every victim, though not every kind in every phase on each."""
    first = FAULTS.index(kind)
    victims = [VICTIMS[(first + index) % len(VICTIMS)] for index in range(len(PHASES))]
    _survives([(kind, phase, victim) for phase, victim in zip(PHASES, victims, strict=True)], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_the_run_ends_in_the_same_bits_after_a_fault_in_every_phase_on_one_rank(
    kind: str, victim: int, tmp_path
) -> None:
    _survives([(kind, phase, victim) for phase in PHASES], tmp_path)


def _survives(cells: list[Cell], tmp_path) -> None:
    steps = FIRST + APART * (max(len(cells), 4) + 1)  # few lengths, so that few undisturbed runs are needed
    faults = [fault for index, cell in enumerate(cells) for fault in _faults(cell, FIRST + APART * index)]
    checkpoints = (f"--checkpoint-every={harness.EVERY}", f"--checkpoint-dir={tmp_path / 'run'}")
    result = harness.run(f"--steps={steps}", *checkpoints, faults=tuple(faults))

    # Checkpoints don't change the bits, so the run to compare with is made without them.
    harness.assert_same_end(result, f"--steps={steps}")
    for incident in result.incidents:
        assert incident["outcome"] == "recovered", result.explain()
        assert incident["steps_lost"] == 0, result.explain()
    caused = [i for i in result.incidents if any(f["kind"] != "link" for f in i["faults"])]
    assert len(caused) == len(cells), result.explain()
    for cell, incident in zip(cells, caused, strict=True):
        problem = _problem(cell, incident)
        assert not problem, f"{cell}: {problem}\n{result.explain()}"


def _faults(cell: Cell, step: int) -> list[str]:
    kind, phase, victim = cell
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


def _problem(cell: Cell, incident: dict[str, Any]) -> str:
    """What was not done as this kind of fault calls for."""
    kind, _, victim = cell
    failing = _lost_beside(victim) if kind == "corrupt" else victim
    if incident["restarted"] != ([failing] if kind in RESTARTED or kind == "corrupt" else []):
        return f"restarted: {incident['restarted']}"
    if kind == "corrupt":
        return "" if any(fault["kind"] == "repair" for fault in incident["faults"]) else "the bad copy was not noticed"
    if {fault["rank"] for fault in incident["faults"] if fault["kind"] != "link"} != {victim}:
        return "somebody else was blamed"
    if kind in ("gil", "hang"):
        stacks = [fault.get("stack", "") for fault in incident["faults"] if fault["kind"] == "hang"]
        if not any("inject.py" in stack for stack in stacks):
            return "the report does not show where the rank hung"
    return ""
