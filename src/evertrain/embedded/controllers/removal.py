"""Empties what is being deleted and holds other objects: namespaces and CustomResourceDefinitions."""

from __future__ import annotations

import logging

from evertrain import aio
from evertrain.embedded.controllers.kinds import BUILTIN, kind_of
from evertrain.kube.cache import Cache
from evertrain.kube.port import (
    CUSTOM_RESOURCE_DEFINITION,
    NAMESPACE,
    ApiError,
    Conflict,
    Kind,
    Kube,
    NotFound,
    Object,
)
from evertrain.kube.queue import WorkQueue

CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
logger = logging.getLogger(__name__)


class Removal:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._namespaces = Cache(kube, NAMESPACE)
        self._definitions = Cache(kube, CUSTOM_RESOURCE_DEFINITION)
        # What is left are pods that end and objects with finalizers: there is nothing to wait for but time.
        self._queue: WorkQueue[tuple[str, str]] = WorkQueue(first_delay=0.02, max_delay=1.0)

    async def run(self) -> None:
        for cache in (self._namespaces, self._definitions):
            cache.listen(lambda before, after, kind=cache.kind.kind: self._changed(kind, after))  # type: ignore[misc]
        async with aio.TaskGroup() as group:
            group.create_task(self._namespaces.run())
            group.create_task(self._definitions.run())
            await self._namespaces.synced.wait()
            await self._definitions.synced.wait()
            while True:
                key = await self._queue.get()
                try:
                    if await (self._namespace if key[0] == NAMESPACE.kind else self._definition)(key[1]):
                        self._queue.forget(key)
                    else:
                        self._queue.retry(key)
                except NotFound:
                    self._queue.forget(key)
                except (ApiError, OSError, TimeoutError) as error:
                    if not isinstance(error, Conflict):
                        logger.info("%s %s is not empty yet: %s", *key, error)
                    self._queue.retry(key)
                finally:
                    self._queue.done(key)

    def _changed(self, kind: str, after: Object | None) -> None:
        if after is not None and after["metadata"].get("deletionTimestamp"):
            self._queue.add((kind, after["metadata"]["name"]))

    async def _namespace(self, name: str) -> bool:
        """True if nothing is left to do."""
        found = self._namespaces.get(name)
        if found is None:
            return True
        kinds = [*BUILTIN, *filter(None, map(kind_of, self._definitions))]
        left = 0
        for kind in kinds:
            if kind.namespaced:
                left += await self._empty(kind, name)
        if left:
            return False
        # The server lets it go only if it is really empty.
        await self._kube.delete(NAMESPACE, name, uid=found["metadata"]["uid"])
        return True

    async def _definition(self, name: str) -> bool:
        found = self._definitions.get(name)
        finalizers = (found or {}).get("metadata", {}).get("finalizers") or []
        if found is None or CLEANUP not in finalizers:
            return True
        kind = kind_of(found)
        if kind is not None and await self._empty(kind, None):
            return False
        metadata = found["metadata"]
        left = [finalizer for finalizer in finalizers if finalizer != CLEANUP]
        patch = {
            "metadata": {
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
                "finalizers": left or None,
            }
        }
        await self._kube.patch(CUSTOM_RESOURCE_DEFINITION, name, None, patch)
        return True

    async def _empty(self, kind: Kind, namespace: str | None) -> int:
        """Deletes all objects of a kind; how many are still there afterwards."""
        try:
            listing = await self._kube.list(kind, namespace)
        except NotFound:
            return 0
        for item in listing.items:
            metadata = item["metadata"]
            if metadata.get("deletionTimestamp"):
                continue
            try:
                await self._kube.delete(kind, metadata["name"], metadata.get("namespace"), uid=metadata["uid"])
            except (NotFound, Conflict):
                continue
        if not listing.items:
            return 0
        return len((await self._kube.list(kind, namespace)).items)
