"""Faults that a job asks not to be judged by while they are young. Pure.

Its annotations name codes and levels, `key[:seconds],…`. Those who subscribe to faults hear of them at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from evertrain.faultcodes.levels import RESTART_REQUEST

CODES, LEVELS = "huawei.com/schedule.filter.faultCode", "huawei.com/schedule.filter.faultLevel"
DEFAULT_S, LONGEST_S = 60, 86_400
_ITEM = re.compile(r"(?:\[[^\]]*\]|[^,])+")


@dataclass(frozen=True, slots=True)
class Filter:
    codes: Mapping[str, int] = field(default_factory=dict)
    """Milliseconds by code."""
    levels: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.codes or self.levels)

    def hides_for(self, code: str, level: str) -> int:
        """Milliseconds from when the fault came."""
        return max(self.codes.get(code.upper(), 0), self.levels.get(level, 0))


NONE = Filter()
SERVER = Filter(levels={RESTART_REQUEST: DEFAULT_S * 1000})
"""Of a server of a MindIE service whose controller hears of faults: it has its time to mend them by itself."""


def both(one: Filter, other: Filter) -> Filter:
    """Where both say something, the first counts."""
    return Filter({**other.codes, **one.codes}, {**other.levels, **one.levels})


def read_filter(annotations: Mapping[str, str]) -> Filter:
    codes, levels = annotations.get(CODES, ""), annotations.get(LEVELS, "")
    if not codes and not levels:
        return NONE
    return Filter({code.upper(): ms for code, ms in _items(codes).items()}, _items(levels))


def _items(text: str) -> dict[str, int]:
    """A number that can't be read, or is out of its range, is the default."""
    found = {}
    for item in _ITEM.findall(text.replace("\uff0c", ",").replace("\uff1a", ":")):
        key, _, number = item.strip().rpartition(":")
        if not key:
            key, number = number, ""
        number = number.strip()
        seconds = int(number) if number.isascii() and number.isdecimal() and len(number) < 8 else DEFAULT_S
        if key.strip():
            found[key.strip()] = (seconds if seconds <= LONGEST_S else DEFAULT_S) * 1000
    return found
