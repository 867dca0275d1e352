"""What a recovery changes in the cluster without waiting for it: one change after the other of each object.

Labels of pods, annotations of the PodGroup and the reset file inform others, who look at them when they come to it. So
neither the training nor a decision waits until they are written. All jobs together have only so many places, for while
a whole cluster has faults the API server has better to do; and what something newer has overtaken while it waited for
a place is not written at all. What waits is kept with the recovery until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from evertrain.clusterd.recover.events import Effect, IsolateNode, PatchGroup, PatchPod, ReplacePods, WriteReset
from evertrain.clusterd.reset import FAULT, RESTART_ALL

RESET, GROUP, POD = "reset", "group", "pod"
Key = tuple[str, str]


def lane_of(effect: Effect) -> Key | None:
    """The object that it changes; None if what comes after it has to wait until it is done."""
    match effect:
        case WriteReset():
            return RESET, ""
        case PatchGroup() if not effect.labels:
            return GROUP, ""
        case PatchPod() if not effect.annotations:
            return POD, effect.uid
    return None


def waits_for(effect: Effect) -> tuple[str, ...]:
    """The lanes that have to be empty before. A launcher that finds its own rank at fault in the reset file after it
    has started exits: so that has to be there before the pod's successor is. Schedulers act on labels, and are told
    when everybody else is."""
    match effect:
        case ReplacePods():
            return (RESET,)
        case IsolateNode() | PatchGroup() | PatchPod():
            return RESET, GROUP
    return ()


def merged(waiting: Sequence[Effect], newest: Effect) -> list[Effect]:
    """What is left to be done of them, all of the same object. Pure."""
    match newest:
        case WriteReset():
            return [each for each in waiting if not _overtaken(each, newest)] + [newest]
        case PatchGroup() if waiting and isinstance(last := waiting[-1], PatchGroup):
            if newest.annotations.keys().isdisjoint(last.annotations):  # each result is said, for whoever watches
                return [*waiting[:-1], replace(newest, annotations={**last.annotations, **newest.annotations})]
        case PatchPod() if waiting and isinstance(last := waiting[-1], PatchPod):
            return [*waiting[:-1], replace(newest, labels={**last.labels, **newest.labels})]
    return [*waiting, newest]


def _overtaken(before: Effect, newest: WriteReset) -> bool:
    """Which ranks are at fault is said at least once, and a restart is never forgotten."""
    if not isinstance(before, WriteReset) or RESTART_ALL in (before.operation, newest.operation):
        return False
    return newest.operation == FAULT or before.operation != FAULT


@dataclass(slots=True)
class _Lane:
    waiting: list[Effect] = field(default_factory=list)
    now: Effect | None = None
    """What is being done."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Future[None] | None = None


class Lanes:
    """Of one job."""

    def __init__(
        self, do: Callable[[Effect], Awaitable[None]], places: asyncio.Semaphore, idle: Callable[[], None]
    ) -> None:
        """`idle` is called when nothing is left to be done."""
        self._do, self._places, self._idle = do, places, idle
        self._lanes: dict[Key, _Lane] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    @property
    def undone(self) -> list[Effect]:
        found: list[Effect] = []
        for lane in self._lanes.values():
            found += [] if lane.now is None else [lane.now]
            found += lane.waiting
        return found

    def put(self, effect: Effect) -> bool:
        """Whether it is taken."""
        key = lane_of(effect)
        if key is None:
            return False
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane()
            lane.task = asyncio.ensure_future(self._run(key, lane))
        lane.waiting = merged(lane.waiting, effect)
        return True

    async def told(self, *kinds: str) -> None:
        """Until the reset file, say, is as it should be. A signal may wait for it, so it takes no place, for which the
        changes of all other jobs wait. Pods' labels may be thousands."""
        for key, lane in list(self._lanes.items()):
            while key[0] in kinds and (lane.waiting or lane.now is not None):
                await self._next(lane)

    def close(self) -> None:
        for lane in list(self._lanes.values()):
            if lane.task is not None:
                lane.task.cancel()

    async def _run(self, key: Key, lane: _Lane) -> None:
        try:
            while True:
                async with lane.turn:
                    pass  # who needs it at once has perhaps taken what was first
                if not lane.waiting:
                    break
                async with self._places:
                    await self._next(lane)
        finally:
            del self._lanes[key]
        if not self._lanes:
            self._idle()

    async def _next(self, lane: _Lane) -> None:
        async with lane.turn:
            if lane.waiting:
                lane.now = lane.waiting.pop(0)
                await self._do(lane.now)
                lane.now = None
