"""Errors of the main memory, as the kernel's EDAC drivers count them.

An uncorrected error is reason enough: the memory is damaged until it is exchanged, and the counter says so until the
next boot. Corrected ones happen; many of them in an hour are a warning. The counters tell nobody when they change, so
they are read every few seconds.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evertrain.noded import codes
from evertrain.noded.detectors.base import Tell, now_ms, number, read
from evertrain.noded.faults import NodeFault

POLL_SECONDS = 10.0
CORRECTED, WINDOW_MS = 100, 3_600_000
"""So many corrected errors of one module in that time are a fault."""
MEMORY = "Memory"
CONTROLLER = 1000
"""Modules of a memory controller are numbered from its number times this."""
WHOLE = 999
"""Errors that a controller can't lay at the door of a module."""


@dataclass(frozen=True, slots=True)
class Count:
    corrected: int
    uncorrected: int
    label: str = ""


def read_counts(sys: Path) -> dict[int, Count]:
    """By number of the module."""
    found: dict[int, Count] = {}
    root = sys / "devices" / "system" / "edac" / "mc"
    for controller in sorted(root.glob("mc[0-9]*")):
        base = int(controller.name[2:]) * CONTROLLER if controller.name[2:].isdecimal() else 0
        corrected = uncorrected = 0
        for module in sorted([*controller.glob("dimm[0-9]*"), *controller.glob("rank[0-9]*")]):
            index = int(re.sub(r"\D", "", module.name) or 0)
            count = Count(
                number(module / "dimm_ce_count") or 0,
                number(module / "dimm_ue_count") or 0,
                read(module / "dimm_label") or module.name,
            )
            corrected, uncorrected = corrected + count.corrected, uncorrected + count.uncorrected
            found[base + index] = count
        # The controller's own counters have all errors, also those of no module in particular.
        rest = Count(
            max(0, (number(controller / "ce_count") or 0) - corrected),
            max(0, (number(controller / "ue_count") or 0) - uncorrected),
            controller.name,
        )
        found[base + WHOLE] = rest
    return found


class Rates:
    """Which modules have had many corrected errors of late. Pure."""

    def __init__(self, most: int = CORRECTED, window_ms: int = WINDOW_MS) -> None:
        self._most, self._window = most, window_ms
        self._seen: dict[int, deque[tuple[int, int]]] = {}

    def faults(self, counts: Mapping[int, Count], now: int) -> list[NodeFault]:
        found = []
        for module, count in sorted(counts.items()):
            seen = self._seen.setdefault(module, deque())
            if seen and count.corrected < seen[-1][1]:
                seen.clear()  # somebody has reset the counter
            if not seen or count.corrected != seen[-1][1]:
                seen.append((now, count.corrected))
            while len(seen) > 1 and now - seen[1][0] > self._window:
                seen.popleft()
            # The first entry is the level from which this window began, unless it is young itself.
            recent = count.corrected - seen[0][1] if len(seen) > 1 and now - seen[-1][0] <= self._window else 0
            if count.uncorrected:
                note = f"{count.uncorrected} uncorrected errors in {count.label}"
                found.append(_fault(module, codes.MEMORY_UNCORRECTED, note))
            if recent >= self._most:
                found.append(_fault(module, codes.MEMORY_CORRECTED, f"many corrected errors in {count.label}"))
        return found


def _fault(module: int, code: str, note: str) -> NodeFault:
    return NodeFault(code=code, device=MEMORY, id=module, since_ms=now_ms(), note=note)


class MemoryErrors:
    name = "memory"

    def __init__(self, sys: Path = Path("/sys"), *, every: float = POLL_SECONDS, most: int = CORRECTED) -> None:
        self._sys = sys
        self._every = every
        self._rates = Rates(most)

    async def run(self, tell: Tell) -> None:
        while counts := read_counts(self._sys):
            tell(self._rates.faults(counts, now_ms()))
            await asyncio.sleep(self._every)
