"""Ascend chips, by what `npu-smi` says about their health. Not tried on hardware.

It is meant for machines without the original's device plugin, which asks the driver itself and hears of faults at
once; here they are asked for every few seconds. What a card was heard to have it has until it is heard again: hardware
that fails takes the tool with it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from evertrain.noded import codes
from evertrain.noded.detectors.base import Tell, now_ms
from evertrain.noded.detectors.tool import Tool
from evertrain.noded.faults import CHIP_CODE, AnyFault, ChipFault, NodeFault

CARD_DROP = "40F84E00"
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


class Cards:
    """What is wrong with the chips, by the last word about each card. Pure.

    The number of a chip is its place in the list of cards. A card that is missing later must not shift those behind it,
    so only a list with no fewer chips than the one before is counted anew.
    """

    def __init__(self) -> None:
        self.before: tuple[ChipFault, ...] = ()
        """What a noded before us has found: so it is until the card of the chip is heard."""
        self._chips: dict[int, range] = {}
        self._missing: set[int] = set()
        self._heard: dict[int, list[Health]] = {}

    @property
    def known(self) -> bool:
        """There are some."""
        return bool(self._chips)

    def listed(self, cards: Iterable[tuple[int, int]]) -> list[int]:
        """The cards that are there, of those that are known."""
        counts = dict(cards)
        if sum(counts.values()) >= sum(map(len, self._chips.values())):
            self._chips, first = {}, 0
            for card, chips in counts.items():
                self._chips[card] = range(first, first + chips)
                first += chips
        self._missing = set(self._chips) - set(counts)
        return [card for card in self._chips if card in counts]

    def hear(self, card: int, chips: list[Health]) -> None:
        self._heard[card] = chips
        self.before = tuple(fault for fault in self.before if fault.chip not in self._chips[card])

    def faults(self, now: int) -> list[ChipFault]:
        found = list(self.before)
        for card, numbers in self._chips.items():
            if card in self._missing:
                note = f"npu-smi no longer lists card {card}"
                found += [ChipFault(code=CARD_DROP, chip=number, since_ms=now, note=note) for number in numbers]
            for health in self._heard.get(card, ()):
                for code in health.error_codes:
                    chip, note = numbers.start + health.chip, f"health {health.state}"
                    found.append(ChipFault(code=code, chip=chip, since_ms=now, note=note))
        return found


class Ascend:
    name = "ascend"

    def __init__(self, *, tool: str = "npu-smi", every: float = POLL_SECONDS) -> None:
        self._tool, self._every = tool, every
        self._cards = Cards()
        self._failures = 0
        """In a row."""

    def resume(self, faults: Iterable[AnyFault]) -> None:
        faults = list(faults)
        self._cards.before = tuple(fault for fault in faults if isinstance(fault, ChipFault))
        if any(fault.code == codes.NPU_TOOL for fault in faults):
            self._failures = FAILURES

    async def run(self, tell: Tell) -> None:
        """Ends at once where there is no such tool."""
        path = shutil.which(self._tool)
        if path is None:
            return
        tool = Tool(path)
        if self._cards.before or self._failures:  # it may take long to hear that they are over
            self._tell(tell, "npu-smi doesn't answer")
        while True:
            silent = await self._look(tool)
            self._failures = self._failures + 1 if silent else 0
            self._tell(tell, silent)
            await asyncio.sleep(self._every)

    def _tell(self, tell: Tell, silent: str) -> None:
        faults: list[AnyFault] = [*self._cards.faults(now_ms())]
        if self._failures >= FAILURES:
            faults.append(NodeFault(code=codes.NPU_TOOL, device="NPU", since_ms=now_ms(), note=silent))
        tell(faults)

    async def _look(self, tool: Tool) -> str:
        """What was asked and not answered, in words; empty if all was."""
        listing = await tool.ask("info", "-l")
        cards = parse_list(listing or "")
        if listing is None or not cards and self._cards.known:
            return "npu-smi doesn't answer"
        silent = ""
        for card in self._cards.listed(cards):
            chips = parse_health(await tool.ask("info", "-t", "health", "-i", str(card)) or "")
            if chips:
                self._cards.hear(card, chips)
            else:
                silent = silent or f"npu-smi doesn't answer about card {card}"
        return silent
