"""Events about faults, for `kubectl get events -n kube-system`: one when a fault occurs, one when it is over.

They are told in the background and dropped where they can't be told: publishing must not wait for them.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Mapping

from evertrain.kube.port import EVENT, ApiError, Kube, Object
from evertrain.noded.faults import AnyFault, ChipFault, Key, NodeFault

logger = logging.getLogger(__name__)

OCCUR, RECOVERY, NOTICE = "Occur", "Recovery", "Notice"
NAMESPACE = "kube-system"
MAX_WAITING = 200

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


class Announcer:
    def __init__(self, kube: Kube, node: str) -> None:
        self._kube = kube
        self._node = node
        self._waiting: asyncio.Queue[tuple[News, str]] = asyncio.Queue(MAX_WAITING)

    def tell(self, news: News, uid: str) -> None:
        try:
            self._waiting.put_nowait((news, uid))
        except asyncio.QueueFull:
            logger.info("too many events at once; one is dropped")

    async def run(self) -> None:
        while True:
            news, uid = await self._waiting.get()
            try:
                await self._kube.create(EVENT, self._event(news, uid))
            except (ApiError, OSError, TimeoutError) as error:
                logger.info("an event could not be written: %s", error)

    def _event(self, news: News, uid: str) -> Object:
        reason, fault, level = news
        moment = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{self._node[:230]}.{time.time_ns():x}", "namespace": NAMESPACE},
            # The API server takes events of this namespace only about objects that claim to be in it.
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Node",
                "namespace": NAMESPACE,
                "name": self._node,
                "uid": uid,
            },
            "type": "Warning",
            "reason": reason,
            "action": level,
            "message": message(fault, level),
            "count": 1,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "source": {"component": "noded", "host": self._node},
            "reportingComponent": "noded",
            "reportingInstance": self._node,
        }
