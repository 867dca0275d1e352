"""When to look again at what. Pure."""

from __future__ import annotations

import heapq


class Timers:
    def __init__(self) -> None:
        self._when: dict[tuple[str, str], int] = {}
        self._heap: list[tuple[int, tuple[str, str]]] = []

    def set(self, key: tuple[str, str], when: int | None) -> None:
        if when is None:
            self._when.pop(key, None)
        elif self._when.get(key) != when:
            self._when[key] = when
            heapq.heappush(self._heap, (when, key))

    def due(self, now: int) -> list[tuple[str, str]]:
        """What is due by now; it is no longer set."""
        found = []
        while self._heap and (self._heap[0][0] <= now or not self._current(self._heap[0])):
            entry = heapq.heappop(self._heap)
            if self._current(entry):
                del self._when[entry[1]]
                found.append(entry[1])
        return found

    def clock_set(self, by: int) -> None:
        self._when = {key: when + by for key, when in self._when.items()}
        self._heap = [(when, key) for key, when in self._when.items()]
        heapq.heapify(self._heap)

    @property
    def next(self) -> int | None:
        while self._heap and not self._current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _current(self, entry: tuple[int, tuple[str, str]]) -> bool:
        return self._when.get(entry[1]) == entry[0]
