"""Events: which are written, and how many. Pure.

As in Kubernetes itself: the same again raises the count of the first Event; of many that differ in their text only the
first few are told, the others are counted on one; an object of which too much is told in a short time is not heard of
for a while.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

from evertrain.kube.port import Object

MAX_MESSAGE = 1024

BURST = 25
"""Events of an object at once; the recovery of a job has about five."""
REFILL_SECONDS = 12.0
SIMILAR = 10
SIMILAR_SECONDS = 600.0
MAX_OBJECTS = 4096
"""Of which is remembered what they told."""
MAX_TEXTS = 64
"""Of one object."""


@dataclass(frozen=True, slots=True)
class Words:
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Told:
    """An Event to write: a new one, or the new count of one."""

    name: str
    words: Words
    count: int
    first: float
    last: float


class About(Protocol):
    """What Events are about."""

    @property
    def uid(self) -> str: ...

    @property
    def name(self) -> str: ...


class Correlator:
    """Decides what becomes of each Event of each object."""

    def __init__(self, *, burst: int = BURST, refill: float = REFILL_SECONDS, similar: int = SIMILAR) -> None:
        self._limits = burst, refill, similar
        self._objects: OrderedDict[str, _Told] = OrderedDict()

    def tell(self, about: About, said: Words, now: float) -> Told | None:
        known = self._objects.pop(about.uid, None) or _Told(now, *self._limits)
        self._objects[about.uid] = known
        while len(self._objects) > MAX_OBJECTS:
            self._objects.popitem(last=False)
        return known.tell(about, said, now)

    def forget(self, uid: str) -> None:
        self._objects.pop(uid, None)


class _Told:
    """What was told about one object."""

    def __init__(self, now: float, burst: int, refill: float, similar: int) -> None:
        self._burst, self._refill, self._most_similar = burst, refill, similar
        self._tokens = float(burst)
        self._at = now
        self._events: OrderedDict[Words, Told] = OrderedDict()
        self._similar: dict[tuple[str, str], list[float]] = {}

    def tell(self, about: About, said: Words, now: float) -> Told | None:
        self._tokens = min(float(self._burst), self._tokens + max(0.0, now - self._at) / self._refill)
        self._at = now
        if self._tokens < 1.0:
            return None
        self._tokens -= 1.0
        key = self._key(said, now)
        if key is not said:
            said = Words(said.type, said.reason, f"(combined from similar events): {said.message}"[:MAX_MESSAGE])
        known = self._events.pop(key, None)
        if known is None:
            told = Told(_name(about, key, now), said, 1, now, now)
        else:
            told = Told(known.name, said, known.count + 1, known.first, now)
        self._events[key] = told
        while len(self._events) > MAX_TEXTS:
            self._events.popitem(last=False)
        return told

    def _key(self, said: Words, now: float) -> Words:
        """Itself, or what stands for all that are like it, if there were many lately."""
        alike = said.type, said.reason
        times = [at for at in self._similar.get(alike, ()) if now - at < SIMILAR_SECONDS]
        if said not in self._events:
            times.append(now)
        self._similar[alike] = times[-self._most_similar - 1 :]
        return said if len(times) <= self._most_similar else Words(said.type, said.reason, "")


def again(told: Told) -> Object:
    """The patch for an Event that is there."""
    return {"count": told.count, "lastTimestamp": timestamp(told.last), "message": told.words.message}


def timestamp(now: float) -> str:
    try:
        at = datetime.fromtimestamp(now, timezone.utc)
    except (OverflowError, ValueError, OSError):  # a clock that is far off
        at = datetime.fromtimestamp(0, timezone.utc)
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def _name(about: About, key: Words, now: float) -> str:
    content = "\0".join((about.uid, key.type, key.reason, key.message, repr(now)))
    return f"{about.name[:230]}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
