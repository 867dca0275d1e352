"""Watches: every change after a version that concerns the watcher, once and in order.

A change is handed over in the middle of the write that makes it, so nothing can be missed between history and now. A
watcher that doesn't keep up is ended, not waited for; it lists again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from evertrain import aio
from evertrain.embedded.api.listing import Matcher, shown, storage_of
from evertrain.embedded.api.status import Expired
from evertrain.embedded.schema import Resource
from evertrain.embedded.store import ADDED, DELETED, MODIFIED, Record, Store, StoredChange, TooOld
from evertrain.kube.port import Object

BOOKMARK = "BOOKMARK"
BOOKMARK_SECONDS = 60.0
BOOKMARK_CHANGES = 1000
"""So many changes that didn't concern the watcher make a bookmark, lest its version grows too old."""
MAX_PENDING = 20_000
MAX_PENDING_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
"""So much is handed over at a time; what a slow watcher has not asked for yet can still be dropped."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchEvent:
    type: str
    record: Record
    """Of a bookmark: one whose object has nothing but a version."""


def _nothing(watch: Watch) -> None:
    """Before anybody wants to know."""


class Watch:
    def __init__(
        self,
        store: Store,
        resource: Resource,
        namespace: str | None,
        matches: Matcher | None,
        *,
        version: int | None,
        quick: Matcher | None = None,
        bookmarks: bool = False,
        initial_end: bool = False,
    ) -> None:
        """Without a version it begins with everything that is there; with `initial_end` a bookmark marks the end of
        that. Raises Expired."""
        self._store = store
        self._resource = resource
        self._storage = storage_of(resource)
        self._namespace = namespace
        self._matches = matches
        self._quick = quick
        self._bookmarks = bookmarks
        self._pending: deque[WatchEvent] = deque()
        self._pending_bytes = 0
        self._max_pending, self._max_bytes = MAX_PENDING, MAX_PENDING_BYTES
        self._wake = asyncio.Event()
        self._passed = 0
        self._closed = False
        self._on_close: Callable[[Watch], None] = _nothing
        if version is None:
            for record in store.records(self._storage, namespace):
                if matches is None or matches(shown(resource, record)):
                    self._pending.append(WatchEvent(ADDED, record))
            if initial_end:
                self._pending.append(self._bookmark({"k8s.io/initial-events-end": "true"}))
            self._pending_bytes = sum(len(event.record.data) for event in self._pending)
            # The store keeps all that anyway, and it doesn't get less by another beginning.
            self._max_pending += len(self._pending)
            self._max_bytes += self._pending_bytes
        else:
            if version > store.version:
                # Of a store that has lost its last changes to a power cut, or of another one.
                raise Expired(f"too large resource version: {version} ({store.version})")
            try:
                for change in store.since(self._storage, version):
                    self._consider(change)
                    change.record.forget()
                    if change.previous is not None:
                        change.previous.forget()
            except TooOld:
                raise Expired(f"too old resource version: {version} ({store.version})") from None
        if self._pending:
            self._wake.set()
        if not self._closed:
            store.listen(self._storage, self, self._consider)

    def on_close(self, callback: Callable[[Watch], None]) -> None:
        self._on_close = callback

    def close(self) -> None:
        """Ends the iteration after what is pending; may be called again."""
        self._closed = True
        self._on_close(self)
        self._store.unlisten(self._storage, self)
        self._wake.set()

    def _consider(self, change: StoredChange) -> None:
        if self._namespace is not None and change.record.namespace != self._namespace:
            return
        try:
            event = self._event(change)
        except Exception:
            # The change is made, and others must hear of it. This watcher lists again.
            log.exception("a watch of %s can't tell a change of %s", self._storage, change.record.name)
            self._drop()
            return
        if event is None:
            self._passed += 1
            if self._passed < BOOKMARK_CHANGES or not self._bookmarks:
                return
        else:
            self._pending.append(event)
            self._pending_bytes += len(event.record.data)
            if len(self._pending) > self._max_pending or self._pending_bytes > self._max_bytes:
                self._drop()
        self._wake.set()

    def _drop(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0
        self.close()

    def _take(self) -> list[WatchEvent]:
        """The next piece of what is pending."""
        events: list[WatchEvent] = []
        size = 0
        while self._pending and size < PIECE_BYTES:
            events.append(self._pending.popleft())
            size += len(events[-1].record.data)
        self._pending_bytes -= size
        return events

    def _event(self, change: StoredChange) -> WatchEvent | None:
        if self._matches is None:
            return WatchEvent(change.type, change.record)
        if self._quick is not None and not any(
            self._quick(record.object) for record in (change.record, change.previous) if record is not None
        ):
            return None
        before = change.previous is not None and self._matches(shown(self._resource, change.previous))
        if change.type == DELETED:
            return WatchEvent(DELETED, change.record) if before else None
        after = self._matches(shown(self._resource, change.record))
        if after:
            return WatchEvent(MODIFIED if before else ADDED, change.record)
        if not before or change.previous is None:
            return None
        last = change.previous.copy()
        last["metadata"]["resourceVersion"] = str(change.version)
        record = change.record
        return WatchEvent(DELETED, Record(record.namespace, record.name, change.version, msgspec.json.encode(last)))

    def _bookmark(self, annotations: Object | None = None) -> WatchEvent:
        self._passed = 0
        item: Object = {
            "kind": self._resource.kind,
            "apiVersion": self._resource.api_version,
            "metadata": {"resourceVersion": str(self._store.version), "creationTimestamp": None},
        }
        if annotations:
            item["metadata"]["annotations"] = annotations
        return WatchEvent(BOOKMARK, Record("", "", self._store.version, msgspec.json.encode(item)))

    async def batches(self, seconds: float | None = None) -> AsyncIterator[list[WatchEvent]]:
        """What there is, whenever there is something. Ends after `seconds`, or when the watch is closed."""
        loop = asyncio.get_running_loop()
        end = None if seconds is None else loop.time() + seconds
        bookmark_at = loop.time() + BOOKMARK_SECONDS if self._bookmarks else None
        try:
            while True:
                if not self._pending and not self._closed:
                    times = [time for time in (end, bookmark_at) if time is not None]
                    try:
                        async with aio.timeout_at(min(times) if times else None):
                            await self._wake.wait()
                    except TimeoutError:
                        pass
                self._wake.clear()
                events = self._take()
                if self._pending:
                    yield events
                    continue
                now = loop.time()
                ending = self._closed or (end is not None and now >= end)
                due = bookmark_at is not None and now >= bookmark_at
                if self._bookmarks and (due or self._passed >= BOOKMARK_CHANGES or (ending and not self._closed)):
                    events.append(self._bookmark())
                    bookmark_at = now + BOOKMARK_SECONDS
                if events:
                    yield events
                if ending and not self._pending:
                    return
        finally:
            self.close()
