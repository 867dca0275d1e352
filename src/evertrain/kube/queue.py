"""A queue of keys to be looked at: each key once, by one worker at a time, later if it failed.

A key that is added while it is worked on is handed out again afterwards, so no change gets lost; one that is added ten
times while it waits is handed out once.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from evertrain import aio

Key = TypeVar("Key", bound=Hashable)

FIRST_DELAY, MAX_DELAY = 0.005, 20.0


class WorkQueue(Generic[Key]):
    def __init__(self, *, first_delay: float = FIRST_DELAY, max_delay: float = MAX_DELAY) -> None:
        self._first_delay = first_delay
        self._max_delay = max_delay
        self._ready: deque[Key] = deque()
        self._wanted: set[Key] = set()
        """Keys to be handed out: those in `_ready`, and those that changed while a worker has them."""
        self._working: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._due: dict[Key, float] = {}
        self._later: list[tuple[float, int, Key]] = []
        self._serial = 0
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._wanted)

    def add(self, key: Key) -> None:
        if key in self._wanted:
            return
        self._wanted.add(key)
        if key not in self._working:
            self._ready.append(key)
            self._news.set()

    def add_after(self, key: Key, delay: float) -> None:
        """Adds the key after that many seconds; of several such wishes for a key the earliest counts."""
        if delay <= 0:
            self.add(key)
            return
        due = asyncio.get_running_loop().time() + delay
        if self._due.get(key, float("inf")) <= due:
            return
        self._due[key] = due
        self._serial += 1
        heapq.heappush(self._later, (due, self._serial, key))
        self._news.set()

    def retry(self, key: Key) -> float:
        """Adds a key that failed, each time later; returns the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = min(failures + 1, 30)
        delay: float = min(self._max_delay, self._first_delay * 2**failures) * random.uniform(0.8, 1.0)
        self.add_after(key, delay)
        return delay

    def forget(self, key: Key) -> None:
        """The key is fine: its next failure is its first."""
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """The next key. The worker calls `done` with it afterwards."""
        while True:
            delay = self._take_due()
            if self._ready:
                key = self._ready.popleft()
                self._wanted.discard(key)
                self._working.add(key)
                if self._ready:
                    self._news.set()
                return key
            self._news.clear()
            try:
                async with aio.timeout(delay):
                    await self._news.wait()
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        self._working.discard(key)
        if key in self._wanted:
            self._ready.append(key)
            self._news.set()

    def _take_due(self) -> float | None:
        """Adds what is due; how long until the next."""
        now = asyncio.get_running_loop().time()
        while self._later:
            due, _, key = self._later[0]
            if self._due.get(key) != due:
                heapq.heappop(self._later)  # an earlier wish took its place
                continue
            if due > now:
                return due - now
            heapq.heappop(self._later)
            del self._due[key]
            self.add(key)
        return None
