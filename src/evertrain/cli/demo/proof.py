"""What two runs of a job have in common: the proof that a fault made no difference. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from evertrain.cli.columns import columns


@dataclass(frozen=True)
class Step:
    number: int
    samples: tuple[int, ...]
    loss: float


@dataclass(frozen=True)
class Outcome:
    """Of a run, by rank: its last line, and its steps in the order in which it has done them."""

    results: Mapping[int, Mapping[str, Any]]
    steps: Mapping[int, Sequence[Step]]

    def samples(self, rank: int) -> str:
        """SHA-256 of which samples the rank had in which step; of a step that was done again the last time counts."""
        found = {step.number: step.samples for step in self.steps[rank]}
        return sha256(repr(sorted(found.items())).encode()).hexdigest()

    def repeated(self) -> int:
        """Steps that had to be done again."""
        return max((len(done) - len({step.number for step in done}) for done in self.steps.values()), default=0)


def same_bits(calm: Outcome, run: Outcome) -> tuple[bool, list[str]]:
    """Whether all is equal, and lines that show it."""
    rows = [["rank", "weights: undisturbed", "here", "samples: undisturbed", "here", ""]]
    same = bool(calm.results)
    for rank in sorted(calm.results):
        then, now = calm.results[rank], run.results.get(rank, {})
        equal = then == now and calm.samples(rank) == run.samples(rank)
        same = same and equal
        cells = [str(then["weights"]), str(now.get("weights", "none")), calm.samples(rank), run.samples(rank)]
        rows.append([str(rank), *(cell[:16] for cell in cells), "=" if equal else "DIFFERENT"])
    return same, columns(rows, left=set(rows[0]))


def same_samples(calm: Outcome, run: Outcome, bound: float) -> tuple[bool, list[str]]:
    """For a run with fewer ranks for a while: each step has the same samples, and a loss that differs by rounding."""
    then, now = _by_step(calm), _by_step(run)
    same = then.keys() == now.keys() and all(then[step][0] == now[step][0] for step in then)
    worst = max(
        (abs(now[s][1] - then[s][1]) / max(1.0, abs(then[s][1])) for s in then.keys() & now.keys()), default=0.0
    )
    weights = {str(result["weights"]) for result in run.results.values()}
    alike = len(weights) == 1 and run.results.keys() == calm.results.keys()
    lines = [
        f"samples of all ranks, step by step: {'the same' if same else 'DIFFERENT'}",
        f"loss, step by step: differs by {worst:.1e} at most, which is {'within' if worst <= bound else 'BEYOND'} the "
        f"{bound:g} that other orders of summing make",
        f"weights of the {len(run.results)} ranks in the end: {'the same' if alike else 'DIFFERENT'}",
    ]
    return same and worst <= bound and alike, lines


def _by_step(outcome: Outcome) -> dict[int, tuple[list[int], float]]:
    """Samples of all ranks together, and the loss."""
    found: dict[int, tuple[list[int], float]] = {}
    for done in outcome.steps.values():
        for step in {each.number: each for each in done}.values():
            samples, _ = found.get(step.number, ([], 0.0))
            found[step.number] = (sorted([*samples, *step.samples]), step.loss)
    return found
