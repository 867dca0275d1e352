"""A look at one node: its faults on their way through the processors, and when to look again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from evertrain.clusterd.faults.jobview import JobView, Place
from evertrain.wire.faultinfo import ChipFault

# Why a scheduler doesn't see a fault.
YOUNG = "young"
"""The job asked for it, by its annotations."""
RETRIED = "retried"
"""Running the step again may help."""
IN_PLACE = "in place"
"""Restarting the process where it is may help."""
NO_FAULT = "no fault"
"""It only accompanies another, or a test brought it about. Nobody hears of it."""


def number(chip: str) -> str:
    """Ascend910-4 is chip 4."""
    return chip.rpartition("-")[2]


@dataclass(slots=True)
class Seen:
    fault: ChipFault
    view: JobView | None = None
    """The job that has the chip."""
    place: Place | None = None
    hidden: str = ""
    added: bool = False
    """The node's own lists of chips don't know of it yet."""

    @property
    def visible(self) -> bool:
        return not self.hidden


@dataclass(slots=True)
class Look:
    node: str
    now: int
    owners: Mapping[str, tuple[JobView, Place]]
    """By number of the chip."""
    wakes: list[int] = field(default_factory=list)

    def see(self, fault: ChipFault, added: bool = False) -> Seen:
        view, place = self.owners.get(number(fault.chip), (None, None))
        return Seen(fault, view, place, added=added)

    def until(self, when: int) -> bool:
        """That moment is still to come, and something changes then."""
        if when > self.now:
            self.wakes.append(when)
            return True
        return False


def visible(seen: Iterable[Seen]) -> list[Seen]:
    return [each for each in seen if not each.hidden]
