"""The garbage collector: what belongs to an object goes with it.

`ownerReferences` say who belongs to whom. When an owner is gone its dependents are deleted (background); an owner with
the finalizer `foregroundDeletion` waits until those are gone that block it; with `orphan` they are released first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from evertrain import aio
from evertrain.embedded.controllers.kinds import BUILTIN, kind_of, metadata_only, slim
from evertrain.kube.cache import Cache
from evertrain.kube.port import (
    CUSTOM_RESOURCE_DEFINITION,
    EVENT,
    ApiError,
    Conflict,
    Kind,
    Kube,
    NotFound,
    Object,
)
from evertrain.kube.queue import WorkQueue

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
REMEMBERED = 10_000
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item:
    """An object and where it is."""

    kind: Kind
    namespace: str
    name: str


@dataclass(frozen=True)
class Owners:
    """What has become of the owners that an object names."""

    solid: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    """They are being deleted and wait for this object."""
    unknown: tuple[str, ...] = ()


def verdict(owners: Owners) -> tuple[str, tuple[str, ...]]:
    """What to do with an object: `keep`, `delete`, or `release` from these owners. Pure."""
    if owners.solid or owners.unknown:
        leave = owners.gone + (owners.waiting if owners.solid else ())
        return ("release", leave) if leave else ("keep", ())
    if owners.gone or owners.waiting:
        return "delete", ()
    return "keep", ()


def references(item: Object) -> list[Object]:
    return list(item["metadata"].get("ownerReferences") or ())


def without(item: Object, uids: Iterable[str]) -> Object:
    """A merge patch that removes these owners, if the object is still the one that was looked at."""
    gone = set(uids)
    metadata = item["metadata"]
    left = [reference for reference in references(item) if reference.get("uid") not in gone]
    return {
        "metadata": {
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
            "ownerReferences": left or None,
        }
    }


def _group(api_version: str) -> str:
    return api_version.rpartition("/")[0]


class GarbageCollector:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._slim = slim(kube, metadata_only)
        self._queue: WorkQueue[Item] = WorkQueue(max_delay=5.0)
        self._caches: dict[Kind, Cache] = {}
        self._tasks: dict[Kind, asyncio.Task[None]] = {}
        self._place: dict[str, Item] = {}
        """By uid: where each object is."""
        self._dependents: dict[str, set[Item]] = {}
        """By uid of the owner, which may not be there (any more)."""
        self._gone: dict[str, None] = {}
        """Uids of what was deleted lately: the kind may be gone with it, and then nobody can be asked any more."""

    async def run(self) -> None:
        definitions = Cache(self._kube, CUSTOM_RESOURCE_DEFINITION)
        try:
            async with aio.TaskGroup() as group:
                definitions.listen(lambda before, after: self._defined(group, before, after))
                group.create_task(definitions.run())
                for kind in (*BUILTIN, CUSTOM_RESOURCE_DEFINITION):
                    if kind != EVENT:
                        self._follow(group, kind)
                await definitions.synced.wait()
                for cache in list(self._caches.values()):
                    await cache.synced.wait()
                await self._work()
        finally:
            self._tasks.clear()

    def _follow(self, group: aio.TaskGroup, kind: Kind) -> None:
        if kind in self._caches:
            return
        cache = self._caches[kind] = Cache(self._slim, kind)
        cache.listen(lambda before, after: self._changed(kind, before, after))
        self._tasks[kind] = group.create_task(cache.run())

    def _defined(self, group: aio.TaskGroup, before: Object | None, after: Object | None) -> None:
        kind = kind_of(after) if after else None
        old = kind_of(before) if before else None
        if old is not None and old != kind and old in self._tasks:
            self._tasks.pop(old).cancel()
            for item in self._caches.pop(old):
                # A definition goes after its objects. Without it, they are only out of sight.
                self._changed(old, item, None, gone=after is None)
        if kind is not None:
            self._follow(group, kind)

    def _changed(self, kind: Kind, before: Object | None, after: Object | None, *, gone: bool = True) -> None:
        known = after or before
        assert known is not None
        metadata = known["metadata"]
        item = Item(kind, metadata.get("namespace") or "", metadata["name"])
        uid = metadata["uid"]
        old = {reference.get("uid", "") for reference in references(before)} if before else set()
        new = {reference.get("uid", "") for reference in references(after)} if after else set()
        for owner in old - new:
            left = self._dependents.get(owner, set())
            left.discard(item)
            if not left:
                self._dependents.pop(owner, None)
            # It may have waited for this one.
            if owner in self._place:
                self._queue.add(self._place[owner])
        for owner in new - old:
            self._dependents.setdefault(owner, set()).add(item)
        if after is None:
            self._place.pop(uid, None)
            if gone:
                self._gone[uid] = None
                if len(self._gone) > REMEMBERED:
                    del self._gone[next(iter(self._gone))]
            for dependent in self._dependents.get(uid, ()):
                self._queue.add(dependent)
        else:
            self._place[uid] = item
            if new or metadata.get("deletionTimestamp"):
                self._queue.add(item)

    async def _work(self) -> None:
        while True:
            item = await self._queue.get()
            try:
                await self._look_at(item)
                self._queue.forget(item)
            except NotFound:
                self._queue.forget(item)
            except (ApiError, OSError, TimeoutError) as error:
                if not isinstance(error, Conflict):
                    logger.info("%s %s/%s: %s; again later", item.kind.kind, item.namespace, item.name, error)
                self._queue.retry(item)
            finally:
                self._queue.done(item)

    def _known(self, item: Item) -> Object | None:
        cache = self._caches.get(item.kind)
        return cache.get(item.name, item.namespace) if cache else None

    async def _look_at(self, item: Item) -> None:
        found = self._known(item)
        if found is None:
            return
        metadata = found["metadata"]
        finalizers = metadata.get("finalizers") or []
        if metadata.get("deletionTimestamp"):
            if ORPHAN in finalizers:
                await self._orphan(item, found)
                return
            if FOREGROUND in finalizers:
                await self._finish_foreground(item, found)
            return
        what, uids = verdict(await self._owners(item, found))
        if what == "delete":
            await self._kube.delete(item.kind, item.name, item.namespace or None, uid=metadata["uid"])
        elif what == "release":
            await self._kube.patch(item.kind, item.name, item.namespace or None, without(found, uids))

    async def _owners(self, item: Item, found: Object) -> Owners:
        kinds: dict[str, list[str]] = {"solid": [], "gone": [], "waiting": [], "unknown": []}
        for reference in references(found):
            uid = str(reference.get("uid", ""))
            kinds[await self._state(item, reference, uid)].append(uid)
        return Owners(**{name: tuple(uids) for name, uids in kinds.items()})

    async def _state(self, item: Item, reference: Object, uid: str) -> str:
        if uid in self._gone:
            return "gone"
        place = self._place.get(uid)
        owner = self._known(place) if place and place.namespace in ("", item.namespace) else None
        if owner is None:
            wanted = _group(str(reference.get("apiVersion", ""))), reference.get("kind")
            kind = next((kind for kind in self._caches if (_group(kind.api_version), kind.kind) == wanted), None)
            if kind is None:
                return "unknown"
            # The cache may be behind: the server decides.
            try:
                owner = await self._kube.get(
                    kind, str(reference.get("name", "")), item.namespace if kind.namespaced else None
                )
            except NotFound:
                return "gone"
            if owner["metadata"]["uid"] != uid:
                return "gone"
        metadata = owner["metadata"]
        if (
            metadata.get("deletionTimestamp")
            and FOREGROUND in (metadata.get("finalizers") or ())
            and reference.get("blockOwnerDeletion")
        ):
            return "waiting"
        return "solid"

    async def _orphan(self, item: Item, found: Object) -> None:
        """The caches may be behind, and a dependent that isn't released now is deleted when its owner is gone."""
        uid = found["metadata"]["uid"]
        for kind in list(self._caches):
            if item.namespace and not kind.namespaced:
                continue
            try:
                listing = await self._slim.list(kind, item.namespace or None)
            except NotFound:
                continue
            for dependent in listing.items:
                if any(reference.get("uid") == uid for reference in references(dependent)):
                    metadata = dependent["metadata"]
                    await self._kube.patch(kind, metadata["name"], metadata.get("namespace"), without(dependent, [uid]))
        await self._drop_finalizer(item, found, ORPHAN)

    async def _finish_foreground(self, item: Item, found: Object) -> None:
        uid = found["metadata"]["uid"]
        blocking = False
        for dependent in list(self._dependents.get(uid, ())):
            known = self._known(dependent)
            if known is None:
                continue
            self._queue.add(dependent)
            blocking |= any(
                reference.get("uid") == uid and reference.get("blockOwnerDeletion") for reference in references(known)
            )
        if not blocking:
            await self._drop_finalizer(item, found, FOREGROUND)

    async def _drop_finalizer(self, item: Item, found: Object, finalizer: str) -> None:
        metadata = found["metadata"]
        left = [name for name in metadata.get("finalizers") or () if name != finalizer]
        patch = {
            "metadata": {
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
                "finalizers": left or None,
            }
        }
        await self._kube.patch(item.kind, item.name, item.namespace or None, patch)
