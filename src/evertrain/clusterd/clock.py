"""Wall-clock time that goes on at the pace of the monotonic clock.

What is kept must mean something to a ClusterD on another machine, and faults carry times of their nodes: so a recovery
has times of the wall clock. But that one can be set, and a wait must last as long as it is, whatever becomes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SET = 1.0
"""Seconds by which the two clocks differ before the wall clock counts as set. Less is adjusted all the time."""


class SteadyClock:
    """Of one event loop."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._offset: float | None = None
        """What has to be added to the monotonic clock."""

    def now(self) -> float:
        here = asyncio.get_running_loop().time()
        if self._offset is None:
            self._offset = self._wall() - here
        return here + self._offset

    def was_set(self) -> float:
        """By how many seconds since this was asked last: `now` is the new time, and all that waits has to go along."""
        by = self._wall() - self.now()
        if self._offset is None or abs(by) < SET:
            return 0.0
        self._offset += by
        return by
