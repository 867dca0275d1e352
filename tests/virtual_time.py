"""A loop on whose clock nothing takes time: when all wait, it jumps to the moment that the first of them waits for.

For parts that talk to nobody outside of the process. A test of timeouts is exact with it, however busy the machine is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from evertrain import aio


class VirtualLoop(asyncio.SelectorEventLoop):
    _ready: Any
    _scheduled: Any
    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        waiting = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if waiting and not self._ready:
            self._now = max(self._now, min(waiting))
        super()._run_once()  # type: ignore[misc]


def run(test: Coroutine[Any, Any, None]) -> None:
    aio.run(test, VirtualLoop)
