"""Events on a job. They inform; that one is lost does no harm, so nothing waits for them to succeed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from datetime import datetime

from evertrain.acjob import names
from evertrain.acjob.conditions import timestamp
from evertrain.kube.port import EVENT, AlreadyExists, ApiError, Kube, Object
from evertrain.operator.actions import Emit

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1024
MAX_ALIKE = 30


class Events:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._places = asyncio.Semaphore(8)

    async def emit(self, job: Object, events: Sequence[Emit], now: datetime) -> None:
        await asyncio.gather(*(self._emit(job, event, now) for event in shortened(events)))

    async def _emit(self, job: Object, event: Emit, now: datetime) -> None:
        item = event_object(job, event, now)
        try:
            async with self._places:
                try:
                    await self._kube.create(EVENT, item)
                except AlreadyExists:
                    await self._again(item)
        except (ApiError, OSError, TimeoutError) as error:
            logger.info("event %s of job %s is lost: %s", event.reason, job["metadata"]["name"], error)

    async def _again(self, item: Object) -> None:
        metadata = item["metadata"]
        found = await self._kube.get(EVENT, metadata["name"], metadata["namespace"])
        patch = {"count": int(found.get("count") or 1) + 1, "lastTimestamp": item["lastTimestamp"]}
        await self._kube.patch(EVENT, metadata["name"], metadata["namespace"], patch)


def shortened(events: Sequence[Emit]) -> list[Emit]:
    """Of a thousand events for the same reason nobody reads more than the first few."""
    counts: dict[tuple[str, str], int] = {}
    found = []
    for event in events:
        count = counts[event.type, event.reason] = counts.get((event.type, event.reason), 0) + 1
        if count <= MAX_ALIKE:
            found.append(event)
    for (kind, reason), count in counts.items():
        if count > MAX_ALIKE:
            found.append(Emit(kind, reason, f"and {count - MAX_ALIKE} more"))
    return found


def event_object(job: Object, event: Emit, now: datetime) -> Object:
    """The same thing said again is the same event: the name comes from the content."""
    metadata = job["metadata"]
    message = event.message[:MAX_MESSAGE]
    content = "\0".join((metadata["uid"], event.type, event.reason, message))
    at = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(content.encode()).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
        "type": event.type,
        "reason": event.reason,
        "message": message,
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "source": {"component": names.CONTROLLER},
        "reportingComponent": names.CONTROLLER,
        "reportingInstance": names.CONTROLLER,
    }
