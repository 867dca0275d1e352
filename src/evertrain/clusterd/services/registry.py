"""Who has registered for a stream, and has it open: one for each key, the newest."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from evertrain.clusterd.services.ports import Subscription

K = TypeVar("K", bound=Hashable)


class Registry(Generic[K]):
    """A registration lasts until its stream ends, or another of the same key comes; then its stream ends."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[K, Subscription[object] | None] = {}

    def register(self, key: K) -> bool:
        """False: there are too many. Who registered and never came for its stream makes room, the oldest first."""
        if key not in self._open and len(self._open) >= self._most:
            unused = next((each for each, stream in self._open.items() if stream is None), None)
            if unused is None:
                return False
            del self._open[unused]
        before = self._open.get(key)
        self._open[key] = None
        if before is not None:
            before.close()
        return True

    def __contains__(self, key: K) -> bool:
        return key in self._open

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, key: K, stream: Subscription[object]) -> None:
        before = self._open.get(key)
        self._open[key] = stream
        if before is not None:
            before.close()

    def leave(self, key: K, stream: Subscription[object]) -> None:
        if self._open.get(key) is stream:
            del self._open[key]
