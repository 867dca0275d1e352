"""The objects of one kind as the API server has them, kept current by a list and a watch.

Watches are cut: by the server every few minutes, by the network, by a restart. The cache goes on from the last version
that it saw; if the server has forgotten that one (410), it lists again and tells its listeners the difference. So
listeners miss no state, though they may miss states in between: they must look at what is, not at what happened.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator

from evertrain import aio
from evertrain.kube.port import ApiError, Change, Gone, Kind, Kube, NotFound, Object

logger = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace ("" for kinds without) and name."""
Listener = Callable[[Object | None, Object | None], None]
"""Called with the object before and after: None before its creation and after its deletion."""

SHORT_LIVED = 0.05
FIRST_DELAY, MAX_DELAY = 0.02, 2.0


def key_of(item: Object) -> Key:
    metadata = item["metadata"]
    return metadata.get("namespace") or "", metadata["name"]


class Cache:
    """Objects in it are shared: whoever wants to change one copies it first."""

    def __init__(
        self, kube: Kube, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> None:
        self._kube = kube
        self.kind = kind
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._items: dict[Key, Object] = {}
        self._listeners: list[Listener] = []
        self._indices: dict[str, tuple[Callable[[Object], str | None], dict[str, dict[Key, Object]]]] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self.synced = asyncio.Event()
        """Set once everything that existed at the start is here."""
        self.answered = asyncio.Event()
        """Set once that is so, or the server has said that it has no such kind."""
        self.is_served = True
        """Does the server have this kind? It may get it later."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._items.values()))

    @property
    def what(self) -> str:
        """For people."""
        chosen = " ".join(filter(None, (self._labels, self._fields)))
        place = f" in {self._namespace}" if self._namespace else ""
        return f"{self.kind.kind}s{place}" + (f" ({chosen})" if chosen else "")

    def get(self, name: str, namespace: str | None = None) -> Object | None:
        return self._items.get((namespace or "", name))

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def index(self, name: str, value: Callable[[Object], str | None]) -> None:
        """Makes `select(name, value)` find the objects for which `value` returns that value."""
        self._indices[name] = (value, {})
        for key, item in self._items.items():
            self._insert(name, key, item)

    def select(self, index: str, value: str) -> list[Object]:
        return list(self._indices[index][1].get(value, {}).values())

    async def until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until a change in the cache makes the condition true; False if it doesn't in time."""
        loop = asyncio.get_running_loop()
        try:
            async with aio.timeout(timeout):
                while not condition():
                    changed: asyncio.Future[None] = loop.create_future()
                    self._waiting.add(changed)
                    try:
                        await changed
                    finally:
                        self._waiting.discard(changed)
        except TimeoutError:
            return condition()
        return True

    async def run(self) -> None:
        """Keeps the cache current until it is cancelled."""
        version = ""
        failures = 0
        told = ""
        """That there is no such kind is said once."""
        while True:
            began = time.monotonic()
            try:
                if not version:
                    version = await self.refresh()
                async for change in self._kube.watch(
                    self.kind, self._namespace, resource_version=version, labels=self._labels, fields=self._fields
                ):
                    version = self._apply(change) or version
                    failures = 0
                error: Exception | None = None
            except Gone as gone:
                logger.info("%s: the watch is too old (%s); listing again", self.kind.kind, gone)
                version, error = "", None
            except ApiError as refused:
                # It may never take this version: one that was set up anew or from a backup doesn't know it.
                version, error = "", refused
            except (OSError, TimeoutError) as broken:
                error = broken
            # A watch that held for a while ended as watches do. One that ends at once is a server in trouble.
            if time.monotonic() - began >= SHORT_LIVED:
                failures = 0
            delay = min(MAX_DELAY, FIRST_DELAY * 2**failures) * random.uniform(0.5, 1.0)
            if error is not None and str(error) != told:
                logger.info("%s: %s; again in %.2f s", self.kind.kind, error, delay)
            told = str(error or "") if not self.is_served else ""
            failures = min(failures + 1, 16)
            await asyncio.sleep(delay)

    async def refresh(self) -> str:
        """Lists everything; the version of the list."""
        try:
            listing = await self._kube.list(self.kind, self._namespace, labels=self._labels, fields=self._fields)
        except NotFound:
            self.is_served = False
            self.answered.set()
            raise
        self.is_served = True
        current = {key_of(item): item for item in listing.items}
        for key in [key for key in self._items if key not in current]:
            self._set(key, None)
        for key, item in current.items():
            self._set(key, item)
        self.synced.set()
        self.answered.set()
        self._wake()
        return listing.resource_version

    def _apply(self, change: Change) -> str:
        if change.type != "BOOKMARK":
            self._set(key_of(change.object), None if change.type == "DELETED" else change.object)
            self._wake()
        return str((change.object.get("metadata") or {}).get("resourceVersion") or "")

    def _set(self, key: Key, item: Object | None) -> None:
        before = self._items.get(key)
        if before is None and item is None:
            return
        if before is not None and item is not None and _version(before) == _version(item):
            return
        if before is not None and item is not None and before["metadata"].get("uid") != item["metadata"].get("uid"):
            self._set(key, None)  # deleted and created again while nobody looked
            before = None
        for name in self._indices:
            if before is not None:
                self._remove(name, key, before)
            if item is not None:
                self._insert(name, key, item)
        if item is None:
            del self._items[key]
        else:
            self._items[key] = item
        for listener in self._listeners:
            try:
                listener(before, item)
            except Exception:
                # Users write these objects. One that a listener can't bear must not end the watch for all others.
                logger.exception("%s %s/%s", self.kind.kind, *key)

    def _insert(self, index: str, key: Key, item: Object) -> None:
        value_of, found = self._indices[index]
        value = value_of(item)
        if value is not None:
            found.setdefault(value, {})[key] = item

    def _remove(self, index: str, key: Key, item: Object) -> None:
        value_of, found = self._indices[index]
        value = value_of(item)
        if value is not None and key in found.get(value, {}):
            del found[value][key]
            if not found[value]:
                del found[value]

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)


def _version(item: Object) -> object:
    return item["metadata"].get("resourceVersion")
