"""Events about objects, for `kubectl describe` and `kubectl get events`.

Telling is never in the way of doing: events wait in a queue, are dropped if it is full, and a refused one is only
logged. The same event again raises the count of the first.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from evertrain.kube.port import EVENT, ApiError, Kube, NotFound, Object

logger = logging.getLogger(__name__)

NORMAL, WARNING = "Normal", "Warning"
MAX_WAITING = 2000
MAX_REMEMBERED = 2000


def rfc3339(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True)
class _News:
    item: Object
    type: str
    reason: str
    message: str
    time: float
    host: str


class Recorder:
    """`run()` carries to the API server what `tell()` was told."""

    def __init__(self, kube: Kube, component: str) -> None:
        self._kube = kube
        self._component = component
        self._waiting: asyncio.Queue[_News] = asyncio.Queue(MAX_WAITING)
        self._known: OrderedDict[tuple[str, ...], tuple[str, int]] = OrderedDict()

    def tell(self, item: Object, type: str, reason: str, message: str, host: str = "") -> None:
        """`item` is the object that the event is about; its apiVersion and kind have to be in it."""
        try:
            self._waiting.put_nowait(_News(item, type, reason, message[:1024], time.time(), host))
        except asyncio.QueueFull:
            logger.warning("too many events: dropped %s: %s", reason, message)

    async def run(self) -> None:
        while True:
            news = await self._waiting.get()
            try:
                await self._write(news)
            except (ApiError, OSError, TimeoutError) as error:
                logger.info("event %s: %s", news.reason, error)

    async def flush(self) -> None:
        """Writes what is waiting, for an orderly end."""
        while not self._waiting.empty():
            try:
                await self._write(self._waiting.get_nowait())
            except (ApiError, OSError, TimeoutError):
                return

    async def _write(self, news: _News) -> None:
        metadata = news.item["metadata"]
        uid = metadata.get("uid", "")
        namespace = metadata.get("namespace") or "default"
        key = (uid, metadata["name"], news.type, news.reason, news.message, news.host)
        name, count = self._known.pop(key, ("", 0))
        if name:
            try:
                again = {"count": count + 1, "lastTimestamp": rfc3339(news.time)}
                await self._kube.patch(EVENT, name, namespace, again)
                self._known[key] = (name, count + 1)
                return
            except NotFound:
                pass  # expired
        name = f"{metadata['name'][:230]}.{time.time_ns():x}"
        about = {
            "apiVersion": news.item.get("apiVersion", "v1"),
            "kind": news.item.get("kind", ""),
            "name": metadata["name"],
            "uid": uid,
        }
        if metadata.get("namespace"):
            about["namespace"] = metadata["namespace"]
        if metadata.get("resourceVersion"):
            about["resourceVersion"] = metadata["resourceVersion"]
        source = {"component": self._component, **({"host": news.host} if news.host else {})}
        event: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": about,
            "type": news.type,
            "reason": news.reason,
            "message": news.message,
            "count": 1,
            "firstTimestamp": rfc3339(news.time),
            "lastTimestamp": rfc3339(news.time),
            "source": source,
            "reportingComponent": self._component,
            "reportingInstance": news.host,
        }
        await self._kube.create(EVENT, event)
        self._known[key] = (name, 1)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
