"""Events about faults, for `kubectl get events -n kube-system`: one when a fault occurs, one when it is over.

They are told in the background and dropped where they can't be told: publishing must not wait for them. A fault that
comes and goes is counted on the Events that there are, and after a while no longer told of (`evertrain.kube.events`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from evertrain.kube.events import MAX_MESSAGE, Correlator, Told, Words, again, timestamp
from evertrain.kube.port import EVENT, AlreadyExists, ApiError, Kube, NotFound, Object
from evertrain.noded.faults import AnyFault, ChipFault, Key, NodeFault

logger = logging.getLogger(__name__)

OCCUR, RECOVERY, NOTICE = "Occur", "Recovery", "Notice"
NAMESPACE = "kube-system"
MAX_WAITING = 200
BURST, SIMILAR = 100, 32
"""All chips of a node may fail at once, and be well again."""
REFILL_SECONDS = 60.0
"""When all of 10 000 nodes have a fault that comes and goes, that is 170 Events a second."""

News = tuple[str, AnyFault, str]
"""Reason, fault and level."""


def differences(before: Mapping[Key, tuple[AnyFault, str]], after: Mapping[Key, tuple[AnyFault, str]]) -> list[News]:
    """What has happened between two lists of faults with their levels. Pure."""
    found: list[News] = []
    for key, (fault, level) in after.items():
        if key not in before or before[key][1] != level:
            found.append((OCCUR if fault.until_ms is None else NOTICE, fault, level))
    for key, (fault, level) in before.items():
        if key not in after and fault.until_ms is None:
            found.append((RECOVERY, fault, level))
    return found


def message(fault: AnyFault, level: str) -> str:
    match fault:
        case ChipFault():
            place = f"chip {fault.chip}"
        case NodeFault():
            place = f"{fault.device} {fault.id}"
        case _:
            place = f"switch chip {fault.chip} port {fault.port}"
    return f"{place}: fault {fault.code}, level {level}" + (f" ({fault.note})" if fault.note else "")


@dataclass(frozen=True, slots=True)
class _Node:
    name: str

    @property
    def uid(self) -> str:
        """It may not be known yet."""
        return self.name


class Announcer:
    def __init__(self, kube: Kube, node: str, *, clock: Callable[[], float] = time.time) -> None:
        self._kube = kube
        self._node = node
        self._clock = clock
        self._correlator = Correlator(burst=BURST, refill=REFILL_SECONDS, similar=SIMILAR)
        self._waiting: asyncio.Queue[tuple[Told, str, str]] = asyncio.Queue(MAX_WAITING)

    def tell(self, news: News, uid: str) -> None:
        reason, fault, level = news
        said = Words("Warning", reason, message(fault, level)[:MAX_MESSAGE])
        told = self._correlator.tell(_Node(self._node), said, self._clock())
        if told is None:
            return
        try:
            self._waiting.put_nowait((told, level, uid))
        except asyncio.QueueFull:
            logger.info("too many events at once; one is dropped")

    async def run(self) -> None:
        while True:
            told, level, uid = await self._waiting.get()
            try:
                await self._write(told, level, uid)
            except (ApiError, OSError, TimeoutError) as error:
                logger.info("an event could not be written: %s", error)

    async def _write(self, told: Told, level: str, uid: str) -> None:
        patch = {**again(told), "action": level}
        if told.count > 1:
            try:
                await self._kube.patch(EVENT, told.name, NAMESPACE, patch)
                return
            except NotFound:
                pass  # it has expired, or was dropped
        try:
            await self._kube.create(EVENT, self._event(told, level, uid))
        except AlreadyExists:
            await self._kube.patch(EVENT, told.name, NAMESPACE, patch)

    def _event(self, told: Told, level: str, uid: str) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": told.name, "namespace": NAMESPACE},
            # The API server takes events of this namespace only about objects that claim to be in it.
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Node",
                "namespace": NAMESPACE,
                "name": self._node,
                "uid": uid,
            },
            "type": told.words.type,
            "reason": told.words.reason,
            "action": level,
            "message": told.words.message,
            "count": told.count,
            "firstTimestamp": timestamp(told.first),
            "lastTimestamp": timestamp(told.last),
            "source": {"component": "noded", "host": self._node},
            "reportingComponent": "noded",
            "reportingInstance": self._node,
        }
