"""The faults of a node that are known now, by who told of them. Pure.

A source tells all that it sees each time, so that a fault which it no longer names is over; a fault that goes on keeps
the time at which it began. Faults with an end (events, and what was injected for a while) leave by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from evertrain.noded.faults import AnyFault, Key

BEFORE = ""
"""The source of what was known before this board was. Others know better."""


class Board:
    def __init__(self) -> None:
        self._sources: dict[str, dict[Key, AnyFault]] = {}
        self._remembered: dict[Key, int] = {}

    def remember(self, key: Key, since_ms: int) -> None:
        """It was there since then, before this board was: so it is, if the first word of its source says so."""
        self._remembered[key] = since_ms

    def put(self, source: str, faults: Iterable[AnyFault], *, timed: bool = False) -> bool:
        """All that the source sees; True if that is something new. `timed`: it knows itself since when."""
        before = self._sources.get(source, {})
        first = source not in self._sources
        after: dict[Key, AnyFault] = {}
        for fault in faults:
            old = before.get(fault.key)
            if timed:
                pass
            elif old is not None and old.until_ms == fault.until_ms:
                fault = replace(fault, since_ms=old.since_ms)
            elif first and fault.until_ms is None and fault.key in self._remembered:
                fault = replace(fault, since_ms=min(fault.since_ms, self._remembered[fault.key]))
            after[fault.key] = fault
        self._sources[source] = after
        return after != before

    def expire(self, now_ms: int) -> bool:
        """Removes what is over by time; True if something was."""
        found = False
        for faults in self._sources.values():
            for key in [key for key, f in faults.items() if f.until_ms is not None and f.until_ms <= now_ms]:
                del faults[key]
                found = True
        return found

    @property
    def next_ms(self) -> int | None:
        """When something is over by time alone."""
        ends = [f.until_ms for faults in self._sources.values() for f in faults.values() if f.until_ms is not None]
        return min(ends, default=None)

    def faults(self) -> list[AnyFault]:
        """Each once, in a fixed order. Of two sources that tell of the same fault the earlier time counts."""
        found: dict[Key, AnyFault] = {}
        for source in sorted(self._sources, key=lambda name: (name == BEFORE, name)):
            for key, fault in self._sources[source].items():
                other = found.get(key)
                if other is not None and source == BEFORE:
                    continue
                if other is None:
                    found[key] = fault
                    continue
                since = min(fault.since_ms, other.since_ms)
                found[key] = replace(other, since_ms=since, level=other.level or fault.level)
        return [found[key] for key in sorted(found, key=lambda key: tuple(map(str, key)))]
