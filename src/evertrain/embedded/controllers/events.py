"""Events are kept for an hour, as on Kubernetes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timezone

from evertrain.kube.port import EVENT, ApiError, Kube, NotFound, Object
from evertrain.kube.times import parse_time

logger = logging.getLogger(__name__)


def last_seen(event: Object) -> float:
    """When it happened last, in seconds of the epoch. Pure."""
    times = [
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("series") or {}).get("lastObservedTime"),
        event["metadata"].get("creationTimestamp"),
    ]
    found = [moment for moment in map(_seconds, times) if moment is not None]
    return max(found, default=0.0)


def _seconds(text: object) -> float | None:
    try:
        moment = parse_time(str(text))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


class EventExpiry:
    def __init__(
        self,
        kube: Kube,
        *,
        keep_seconds: float = 3600.0,
        every_seconds: float = 60.0,
        now: Callable[[], float] = lambda: datetime.now(timezone.utc).timestamp(),
    ) -> None:
        self._kube = kube
        self._keep = keep_seconds
        self._every = every_seconds
        self._now = now

    async def run(self) -> None:
        while True:
            try:
                await self.sweep()
            except (ApiError, OSError, TimeoutError) as error:
                logger.info("old events stay for now: %s", error)
            await asyncio.sleep(self._every)

    async def sweep(self) -> int:
        """Deletes what is too old; how many."""
        limit = self._now() - self._keep
        old = [event["metadata"] for event in (await self._kube.list(EVENT)).items if last_seen(event) < limit]
        for metadata in old:
            try:
                await self._kube.delete(EVENT, metadata["name"], metadata.get("namespace"), uid=metadata["uid"])
            except NotFound:
                continue
        return len(old)
