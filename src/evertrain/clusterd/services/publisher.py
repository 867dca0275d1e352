"""Queues between who has something to say and who listens to it on a stream.

A listener that does not read costs a bounded amount of memory and nothing else. States are coalesced: of what has the
same key only the newest waits, so nothing that counts is ever dropped. What can't be coalesced, such as signals, is
queued, and when the queue is full the listener loses its stream rather than a message in the middle of it: it comes
back, and who speaks begins anew with what it has to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

LIMIT = 1000
"""Messages that wait for one listener."""


class Overrun(Exception):
    """The listener has not read for so long that it has lost its stream."""


class Line(Generic[T]):
    """What one listener has not heard yet. `left` is called once, when it does not listen any more."""

    def __init__(
        self,
        *,
        key: Callable[[T], Hashable] | None = None,
        limit: int | None = LIMIT,
        left: Callable[[Line[T]], None] = lambda line: None,
    ) -> None:
        """With `key` the newest of each key waits, at the place of the one it replaces. None: no limit."""
        self._key, self._limit, self._left = key, limit, left
        self._waiting: dict[Hashable, T] = {}
        self._count = 0
        self._ended = self._overrun = False
        self._wake = asyncio.Event()

    def put(self, item: T) -> None:
        if self._ended:
            return
        self._count += 1
        key: Hashable = self._count if self._key is None else self._key(item)
        if self._limit is not None and key not in self._waiting and len(self._waiting) >= self._limit:
            self._overrun = True
            self.close()
            return
        self._waiting[key] = item
        self._wake.set()

    def clear(self) -> None:
        """What waits is not read."""
        self._waiting.clear()

    def end(self) -> None:
        """Nothing comes any more. What waits is still read."""
        self._ended = True
        self._wake.set()

    def close(self) -> None:
        """Nothing is read any more."""
        self._waiting.clear()
        self.end()
        left, self._left = self._left, _ignore
        left(self)

    def __aiter__(self) -> Line[T]:
        return self

    async def __anext__(self) -> T:
        while not self._waiting:
            if self._overrun:
                raise Overrun("too many messages wait for you: read faster")
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._waiting.pop(next(iter(self._waiting)))


def _ignore(line: Line[T]) -> None:
    pass


class OneEach(Generic[T]):
    """One listener for each key, the newest: the stream of the one before ends when another comes.

    `left` hears of a key that has no listener any more.
    """

    def __init__(self, *, limit: int | None = LIMIT, left: Callable[[str], None] = lambda key: None) -> None:
        self._limit, self._left = limit, left
        self._lines: dict[str, Line[T]] = {}

    def subscribe(self, key: str, first: Iterable[T] = ()) -> Line[T]:
        line: Line[T] = Line(limit=self._limit, left=lambda line: self._leave(key, line))
        before = self._lines.get(key)
        self._lines[key] = line
        if before is not None:
            before.close()
        for item in first:
            line.put(item)
        return line

    def _leave(self, key: str, line: Line[T]) -> None:
        if self._lines.get(key) is line:
            del self._lines[key]
            self._left(key)

    def publish(self, key: str, item: T) -> bool:
        """False: nobody listens."""
        line = self._lines.get(key)
        if line is None:
            return False
        line.put(item)
        return self._lines.get(key) is line

    def clear(self, key: str) -> None:
        """What waits is not read."""
        if key in self._lines:
            self._lines[key].clear()

    def end(self, key: str) -> None:
        """What waits is still read. Nobody is told that the listener has left."""
        line = self._lines.pop(key, None)
        if line is not None:
            line.end()

    def __contains__(self, key: str) -> bool:
        return key in self._lines


class Everyone(Generic[T]):
    """Any number of listeners, each of whom hears all; with `key` the newest of each key, if it is slow."""

    def __init__(self, *, key: Callable[[T], Hashable] | None = None, limit: int | None = LIMIT) -> None:
        """States need no limit: there are as many as there are keys."""
        self._key = key
        self._limit = None if key is not None else limit
        self._lines: set[Line[T]] = set()

    def subscribe(self, first: Iterable[T] = ()) -> Line[T]:
        line: Line[T] = Line(key=self._key, limit=self._limit, left=self._lines.discard)
        self._lines.add(line)
        for item in first:
            line.put(item)
        return line

    def publish(self, item: T) -> None:
        for line in list(self._lines):
            line.put(item)

    def end(self) -> None:
        lines, self._lines = self._lines, set()
        for line in lines:
            line.end()

    def __len__(self) -> int:
        return len(self._lines)
