"""Reports on their way: sent one after the other, kept while nobody takes them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from evertrain import aio

log = logging.getLogger(__name__)

LIMIT = 1000
"""Reports that are kept; then the oldest are dropped."""

Entry = tuple[str, Any, "asyncio.Future[None]"]


class Outbox:
    """`put` from the loop; `run` is the task that sends, `deliver(method, message)` what one report needs."""

    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, method: str, message: Any) -> asyncio.Future[None]:
        """Done when it has been taken, refused for good, or dropped."""
        if len(self._waiting) >= LIMIT:
            log.error("ClusterD is away for too long: the oldest report is dropped")
            _done(self._waiting.popleft())
        entry = (method, message, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._filled.set()
        self._empty.clear()
        return entry[2]

    def forget(self, methods: frozenset[str]) -> None:
        """What has not been sent of these: it is not true any more."""
        waiting, self._waiting = self._waiting, deque()
        if waiting and waiting[0][0] in methods and self._sending is not None:
            self._sending.cancel()
        for entry in waiting:
            if entry[0] in methods:
                _done(entry)
            else:
                self._waiting.append(entry)

    async def run(self, deliver: Callable[[str, Any], Coroutine[Any, Any, None]]) -> None:
        while True:
            await self._filled.wait()
            while self._waiting:
                entry = self._waiting[0]
                await self._send(deliver(entry[0], entry[1]))
                if self._waiting and self._waiting[0] is entry:
                    self._waiting.popleft()
                _done(entry)
            self._filled.clear()
            self._empty.set()

    async def _send(self, work: Coroutine[Any, Any, None]) -> None:
        self._sending = asyncio.ensure_future(work)
        try:
            await asyncio.wait({self._sending})
        finally:
            self._sending.cancel()
            await asyncio.wait({self._sending})
            if not self._sending.cancelled() and (error := self._sending.exception()) is not None:
                log.error("a report could not be sent: %s", str(error), exc_info=error)

    async def flush(self, seconds: float) -> bool:
        """Until all is sent; False if that takes longer."""
        try:
            async with aio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


def _done(entry: Entry) -> None:
    if not entry[2].done():
        entry[2].set_result(None)
