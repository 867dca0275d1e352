"""Which timings the workers write: told to all of them, and again to those that do otherwise. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from evertrain.taskd import frames
from evertrain.taskd.codes import ACTION, PROFILING_RESULTS
from evertrain.taskd.manager.orders import Order, ToWorker
from evertrain.taskd.tracing import Switch

AGAIN = 30.0
"""Seconds after which a worker that has not done as it was told is told once more."""


@dataclass(slots=True)
class Profiling:
    wanted: Switch = field(default_factory=Switch)
    _told: dict[int, float] = field(default_factory=dict)
    """By worker that has not confirmed what is wanted: when it was told. The one told longest ago is the first."""
    _is: dict[int, Switch | None] = field(default_factory=dict)
    """By worker: what it does; None if nobody knows, because it could not do what it was told, or was there before."""
    _asked: bool = False

    def want(self, wanted: Switch, now: float) -> list[Order]:
        if wanted == self.wanted and self._asked:
            return []
        self.wanted, self._asked = wanted, True
        unsure, self._told = self._told, {}  # they may have done by now what they were told before
        return self._tell([rank for rank, state in sorted(self._is.items()) if state != wanted or rank in unsure], now)

    def known(self, rank: int) -> None:
        """A process that may have been there before this manager."""
        self._is.setdefault(rank, None)

    def joined(self, rank: int, now: float) -> list[Order]:
        """A new process: it does nothing yet."""
        self._is[rank] = Switch()
        self._told.pop(rank, None)
        return [] if self.wanted == Switch() else self._tell((rank,), now)

    def forget(self, rank: int) -> None:
        """A process that is not there any more."""
        self._is.pop(rank, None)
        self._told.pop(rank, None)

    def result(self, rank: int, code: int, now: float) -> list[Order]:
        """What a worker does: what it was told, or what it had read in a file before it was told anything."""
        if code not in PROFILING_RESULTS or rank not in self._is:
            return []
        default, communication = divmod(code - PROFILING_RESULTS.start, 10)
        failed = 2 in (default, communication)
        self._is[rank] = None if failed else Switch(default == 1, communication == 1)
        if failed or self._is[rank] == self.wanted:
            self._told.pop(rank, None)
        elif rank not in self._told:
            return self._tell((rank,), now)
        return []

    def _tell(self, ranks: Iterable[int], now: float) -> list[Order]:
        body = frames.body(ACTION, self.wanted.code)
        orders: list[Order] = []
        for rank in ranks:
            self._told.pop(rank, None)
            self._told[rank] = now
            orders.append(ToWorker(rank, body))
        return orders

    @property
    def deadline(self) -> float | None:
        oldest = next(iter(self._told.values()), None)
        return None if oldest is None else oldest + AGAIN

    def tick(self, now: float) -> list[Order]:
        return self._tell([rank for rank, at in self._told.items() if now >= at + AGAIN], now)
