"""A recovery by the training's own clock, beside what ClusterD recorded of it. Pure.

The phases of an incident add up to its total by the way they are made, also if it was opened too late or closed too
early. What can contradict it are the moments at which the ranks had done their steps, which they write down
themselves, by the same machine's clock: training goes on when the incident is over, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evertrain.clusterd.timeline.incident import Incident

GOING_ON = ("", "hotSwitch", "elastic-training")
"""Decisions, none for an order, during which steps are done."""
MARGIN_MS = 3000
"""For the step that is the first to be done again, and for the report that the ranks are through: a step of the demo
is made to take as long as 1 s, and a machine may have other things to do."""


def next_step(incident: Incident, happened_ms: int | None, done: Sequence[int]) -> int | None:
    """The moment of the first step after the halt; `done` are those of all steps of all ranks, in order."""
    began = incident.opened_ms if happened_ms is None else happened_ms
    if incident.decision in GOING_ON:
        return next((at for at in done if at >= incident.updated_ms), None)
    # Some step may still have been done after the fault: the halt is the longest time without one.
    gaps = [
        (after - max(before, began), after)
        for before, after in pairwise([began, *done])
        if before <= incident.updated_ms and after > began
    ]
    return max(gaps)[1] if gaps else None


def agree(incident: Incident, at_ms: int | None) -> bool:
    """Whether training went on when the incident was over. Processes that all start again take their time after it."""
    if at_ms is None:
        return False
    late = at_ms - incident.updated_ms
    return late >= -MARGIN_MS and (late <= MARGIN_MS or incident.outcome != "recovered")
