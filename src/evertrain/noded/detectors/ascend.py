"""Ascend chips, by what `npu-smi` says about their health. Not tried on hardware.

It is meant for machines without the original's device plugin, which asks the driver itself and hears of faults at
once; here they are asked for every few seconds.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from evertrain.noded import codes
from evertrain.noded.detectors.base import Tell, now_ms
from evertrain.noded.detectors.nvidia import ask
from evertrain.noded.faults import CHIP_CODE, AnyFault, ChipFault, NodeFault

POLL_SECONDS = 10.0
FAILURES = 3
_PAIR = re.compile(r"^\s*([A-Za-z][A-Za-z ()]*?)\s*:\s*(.*?)\s*$")


@dataclass(frozen=True, slots=True)
class Health:
    chip: int
    """Of the card."""
    state: str
    """OK, Warning, Alarm, Critical or UNKNOWN."""
    error_codes: tuple[str, ...] = ()


def parse_list(text: str) -> list[tuple[int, int]]:
    """`npu-smi info -l`: the number of each card, and how many chips it has."""
    found: list[tuple[int, int]] = []
    for name, value in _pairs(text):
        if name == "npu id" and value.isdecimal():
            found.append((int(value), 1))
        elif name == "chip count" and value.isdecimal() and found:
            found[-1] = (found[-1][0], max(1, int(value)))
    return found


def parse_health(text: str) -> list[Health]:
    """`npu-smi info -t health -i CARD`: for each chip its health, its error codes and, last, its number."""
    found: list[Health] = []
    state, chip = "", None
    error_codes: tuple[str, ...] = ()
    for name, value in _pairs(text):
        if name.startswith("health"):
            if state:
                found.append(Health(len(found) if chip is None else chip, state, error_codes))
            state, error_codes, chip = value, (), None
        elif name == "error code":
            words = (word.upper().removeprefix("0X") for word in re.split(r"[\s,;]+", value))
            error_codes = tuple(word for word in words if CHIP_CODE.fullmatch(word))
        elif name == "chip id" and value.isdecimal():
            chip = int(value)
    if state:
        found.append(Health(len(found) if chip is None else chip, state, error_codes))
    return found


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    for line in text.splitlines():
        if match := _PAIR.match(line):
            yield match[1].lower(), match[2]


class Ascend:
    name = "ascend"

    def __init__(self, *, tool: str = "npu-smi", every: float = POLL_SECONDS) -> None:
        self._tool, self._every = tool, every

    async def run(self, tell: Tell) -> None:
        """Ends at once where there is no such tool."""
        tool = shutil.which(self._tool)
        if tool is None:
            return
        failures = 0
        while True:
            faults = await self._look(tool)
            failures = 0 if faults is not None else failures + 1
            if faults is not None:
                tell(faults)
            elif failures == FAILURES:
                note = "npu-smi doesn't answer"
                tell([NodeFault(code=codes.NPU_TOOL, device="NPU", since_ms=now_ms(), note=note)])
            await asyncio.sleep(self._every)

    async def _look(self, tool: str) -> list[AnyFault] | None:
        """None if the tool doesn't work."""
        listing = await ask(tool, "info", "-l")
        if listing is None:
            return None
        faults: list[AnyFault] = []
        first = 0
        for card, chips in parse_list(listing):
            text = await ask(tool, "info", "-t", "health", "-i", str(card))
            for health in parse_health(text or ""):
                for code in health.error_codes:
                    chip = first + health.chip
                    faults.append(ChipFault(code=code, chip=chip, since_ms=now_ms(), note=f"health {health.state}"))
            first += chips
        return faults
