"""Which level a fault code has by itself: what is shipped (`data/fault_codes.toml`), and lookups in it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from evertrain.faultcodes.levels import (
    CHIP_LEVELS,
    MANUAL,
    NODE_LEVELS,
    NORMAL,
    NOT_HANDLE,
    PRE_SEPARATE_CHIP,
    SEPARATE_CHIP,
    SUB_HEALTH,
    SWITCH_LEVELS,
    switch_level,
    worst,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MINOR = 1
"""Of the severities by which a chip's driver calls an event: 0 is a suggestion, 2 major, 3 critical."""
NETWORK_LEVELS = frozenset({NOT_HANDLE, SUB_HEALTH, PRE_SEPARATE_CHIP, SEPARATE_CHIP})
PUBLIC_LEVELS = (NOT_HANDLE, SUB_HEALTH, PRE_SEPARATE_CHIP, SEPARATE_CHIP)


@dataclass(frozen=True, slots=True)
class Frequency:
    """`times` within `window_s` make a chip worse, until `release_s` after the last has gone (None: for good)."""

    codes: frozenset[str]
    window_s: int
    times: int
    level: str
    release_s: int | None = None


@dataclass(frozen=True, slots=True)
class Duration:
    """A fault that has stayed for `timeout_s` is worse, until it has been gone for `recover_s`."""

    codes: frozenset[str]
    timeout_s: int
    recover_s: int
    level: str


@dataclass(frozen=True, slots=True)
class Codes:
    """Level by code. Codes of chips and nodes are in capitals."""

    chip: Mapping[str, str] = field(default_factory=dict)
    switch: Mapping[str, str] = field(default_factory=dict)
    node: Mapping[str, str] = field(default_factory=dict)
    public: Mapping[str, str] = field(default_factory=dict)
    resources: frozenset[str] = frozenset()
    """Who may report public faults."""
    network: frozenset[str] = frozenset()
    """Codes of chips that are about the parameter plane."""
    frequency: tuple[Frequency, ...] = ()
    duration: tuple[Duration, ...] = ()

    def chip_level(self, code: str, driver: int | None = None) -> str:
        """`driver`: how severe the chip's driver calls it, for codes that nobody knows."""
        code = normal(code)
        level = self.chip.get(code)
        if self.is_network(code):
            if level is None:
                return PRE_SEPARATE_CHIP
            return level if level in NETWORK_LEVELS else NOT_HANDLE
        if level is not None:
            return level
        return NOT_HANDLE if driver is not None and driver <= MINOR else SEPARATE_CHIP

    def chip_levels(self, codes: Iterable[str]) -> str:
        """The worst of several codes of a chip; NormalNPU if there are none."""
        return worst([self.chip_level(code) for code in codes] or [NORMAL])

    def is_network(self, code: str) -> bool:
        return normal(code) in self.network

    def switch_level(self, code: str) -> str | None:
        """None: nobody asked for such a code, it is not reported."""
        return self.switch.get(code.replace(" ", ""))

    def node_level(self, code: str) -> str | None:
        """None: nobody asked for such a code, it is not reported."""
        return self.node.get(normal(code))

    def public_level(self, code: str) -> str | None:
        """None: nobody may report such a code."""
        return self.public.get(code)


def normal(code: str) -> str:
    """Codes in capitals, without 0x."""
    code = code.strip().upper()
    return code.removeprefix("0X")


def read(text: str) -> Codes:
    """A file of our own kind. Raises ValueError, with what is wrong, for any other."""
    try:
        found = tomllib.loads(text)
        chip = levels_by_code({level: map(normal, codes) for level, codes in found["chip"].items()}, CHIP_LEVELS)
        switch = levels_by_code({switch_level(level): codes for level, codes in found["switch"].items()}, SWITCH_LEVELS)
        node = levels_by_code({level: map(normal, codes) for level, codes in found["node"].items()}, NODE_LEVELS)
        public = levels_by_code(found["public"], PUBLIC_LEVELS)
        return Codes(
            chip,
            switch,
            node,
            public,
            frozenset(map(str, found["public_resources"]["names"])),
            frozenset(map(normal, found["network"]["codes"])),
            tuple(
                Frequency(
                    frozenset(map(normal, rule["codes"])),
                    int(rule["window"]),
                    int(rule["times"]),
                    chip_level(rule["level"]),
                    int(rule["release"]) if "release" in rule else None,
                )
                for rule in found.get("frequency", ())
            ),
            tuple(
                Duration(
                    frozenset(map(normal, rule["codes"])),
                    int(rule["timeout"]),
                    int(rule["recover"]),
                    chip_level(rule["level"], but=MANUAL),
                )
                for rule in found.get("duration", ())
            ),
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a table of fault codes: {error!r}") from error


def levels_by_code(lists: Mapping[str, Iterable[str]], order: Iterable[str]) -> dict[str, str]:
    """From lists of codes by level. A code that is in several has the worst."""
    ranks = {level: rank for rank, level in enumerate(order)}
    unknown = set(lists) - set(ranks)
    if unknown:
        raise ValueError(f"unknown levels: {', '.join(sorted(unknown))}")
    return {code: level for level in sorted(lists, key=ranks.__getitem__) for code in lists[level]}


def chip_level(level: object, but: str = "") -> str:
    if level not in CHIP_LEVELS or level == but:
        raise ValueError(f"{level!r} is no level for a rule")
    assert isinstance(level, str)
    return level


@cache
def shipped() -> Codes:
    return read((resources.files(__package__) / "data" / "fault_codes.toml").read_text())
