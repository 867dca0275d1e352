"""A Kubernetes API in memory behind the port, for tests of parts that talk to one. It fails when it is told to."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping

from evertrain.kube.port import (
    ASCEND_JOB,
    POD,
    SERVICE,
    AlreadyExists,
    ApiError,
    Change,
    Conflict,
    Gone,
    Kind,
    Listing,
    NotFound,
    Object,
)

WITH_STATUS = {"AscendJob", "Pod", "PodGroup"}


def merged(target: object, patch: object) -> object:
    """JSON merge patch."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class FakeKube:
    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, str, str], Object] = {}
        self.history: list[tuple[Kind, Change]] = []
        self.version = 0
        self.oldest = 0
        """Watches from before this version are answered with 410."""
        self.serial = 0
        self.calls: list[tuple[str, str, str]] = []
        """Every write: verb, kind, name."""
        self.graces: list[int | None] = []
        """The grace period of every deletion."""
        self.before: Callable[[str, Kind, str], None] = lambda verb, kind, name: None
        """Called before each request; what it raises is what the caller gets."""
        self.after: Callable[[str, Kind, str], None] = lambda verb, kind, name: None
        """Called after a write took effect; what it raises is what the caller gets instead of the answer."""
        self.lingering = False
        """Deleted pods stay until `finish_deletion`."""
        self._watchers: set[asyncio.Queue[None]] = set()
        self._cut = 0

    # What a test does.

    def items(self, kind: Kind) -> list[Object]:
        return [item for (each, _, _), item in self.objects.items() if each == kind]

    def find(self, kind: Kind, name: str, namespace: str = "default") -> Object:
        return self.objects[kind, namespace if kind.namespaced else "", name]

    def set_status(self, kind: Kind, name: str, status: Object, namespace: str = "default") -> None:
        item = copy.deepcopy(self.find(kind, name, namespace))
        item["status"] = merged(item.get("status") or {}, status)
        self._store(kind, item, "MODIFIED")

    def annotate(self, kind: Kind, name: str, annotations: dict[str, str], namespace: str = "default") -> None:
        item = copy.deepcopy(self.find(kind, name, namespace))
        item["metadata"].setdefault("annotations", {}).update(annotations)
        self._store(kind, item, "MODIFIED")

    def remove(self, kind: Kind, name: str, namespace: str = "default") -> None:
        """At once, and with it what it owns."""
        item = self.objects.pop((kind, namespace if kind.namespaced else "", name))
        self.version += 1
        item = copy.deepcopy(item)
        item["metadata"]["resourceVersion"] = str(self.version)
        self._tell(kind, Change("DELETED", item))
        for (owned, space, owned_name), dependent in list(self.objects.items()):
            owners = dependent["metadata"].get("ownerReferences") or ()
            if any(owner["uid"] == item["metadata"]["uid"] for owner in owners):
                self.remove(owned, owned_name, space)

    def cut_watches(self) -> None:
        self._cut += 1
        for watcher in self._watchers:
            watcher.put_nowait(None)

    def forget_history(self) -> None:
        self.oldest = self.version
        self.history.clear()

    # What the port has.

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        self.before("get", kind, name)
        await asyncio.sleep(0)
        return copy.deepcopy(self._find(kind, namespace, name))

    async def list(self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Listing:
        self.before("list", kind, "")
        await asyncio.sleep(0)
        found = [
            copy.deepcopy(item)
            for (each, space, _), item in self.objects.items()
            if each == kind and namespace in (None, space) and _selected(item, labels, fields)
        ]
        return Listing(found, str(self.version))

    async def watch(
        self, kind: Kind, namespace: str | None = None, *, resource_version: str, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Change]:
        self.before("watch", kind, "")
        if int(resource_version) < self.oldest:
            raise Gone(410, "Expired", "too old resource version")
        news: asyncio.Queue[None] = asyncio.Queue()
        self._watchers.add(news)
        seen, cut = int(resource_version), self._cut
        try:
            while True:
                for each, change in list(self.history):
                    metadata = change.object["metadata"]
                    if int(metadata["resourceVersion"]) <= seen:
                        continue
                    seen = int(metadata["resourceVersion"])
                    here = namespace in (None, metadata.get("namespace", ""))
                    if each == kind and here and _selected(change.object, labels, fields):
                        yield Change(change.type, copy.deepcopy(change.object))
                    if self._cut != cut:
                        return
                await news.get()
                if self._cut != cut:
                    return
        finally:
            self._watchers.discard(news)

    async def create(self, kind: Kind, item: Object) -> Object:
        name = item["metadata"]["name"]
        self.before("create", kind, name)
        await asyncio.sleep(0)
        namespace = item["metadata"].get("namespace") or "" if kind.namespaced else ""
        if (kind, namespace, name) in self.objects:
            raise AlreadyExists(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
        item = copy.deepcopy(item)
        self.serial += 1
        item["metadata"] |= {"uid": f"uid-{self.serial}", "creationTimestamp": f"2026-01-01T00:00:{self.serial:06d}Z"}
        if kind == SERVICE:
            item["spec"].setdefault("clusterIP", f"10.96.0.{self.serial % 250 + 1}")
        if kind == POD:
            item.setdefault("status", {"phase": "Pending"})
        return self._wrote("create", kind, self._store(kind, item, "ADDED"))

    async def replace(self, kind: Kind, item: Object) -> Object:
        return await self._replace(kind, item, status=False)

    async def replace_status(self, kind: Kind, item: Object) -> Object:
        return await self._replace(kind, item, status=True)

    async def _replace(self, kind: Kind, item: Object, status: bool) -> Object:
        metadata = item["metadata"]
        verb = "replace_status" if status else "replace"
        self.before(verb, kind, metadata["name"])
        await asyncio.sleep(0)
        current = self._find(kind, metadata.get("namespace"), metadata["name"])
        if metadata.get("resourceVersion") not in (None, current["metadata"]["resourceVersion"]):
            raise Conflict(409, "Conflict", "the object has been modified")
        new = copy.deepcopy(current)
        if status:
            new["status"] = copy.deepcopy(item.get("status"))
        else:
            kept = {key: current["metadata"][key] for key in ("uid", "creationTimestamp")}
            new = {**copy.deepcopy(item), "status": current.get("status")}
            new["metadata"] |= kept
        return self._wrote(verb, kind, self._store(kind, new, "MODIFIED"))

    async def patch(
        self, kind: Kind, name: str, namespace: str | None, patch: Object, *, status: bool = False
    ) -> Object:
        self.before("patch", kind, name)
        await asyncio.sleep(0)
        current = self._find(kind, namespace, name)
        wanted = (patch.get("metadata") or {}).get("resourceVersion")
        if wanted not in (None, current["metadata"]["resourceVersion"]):
            raise Conflict(409, "Conflict", "the object has been modified")
        new = merged(current, patch)
        assert isinstance(new, dict)
        return self._wrote("patch", kind, self._store(kind, new, "MODIFIED"))

    async def apply(self, kind: Kind, item: Object, *, manager: str, force: bool = False) -> Object:
        raise AssertionError("nothing that is tested here applies")

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        version: str = "",
        grace: int | None = None,
    ) -> None:
        self.before("delete", kind, name)
        await asyncio.sleep(0)
        current = self._find(kind, namespace, name)
        if uid and current["metadata"]["uid"] != uid:
            raise Conflict(409, "Conflict", "the uid is another one")
        if version and current["metadata"]["resourceVersion"] != version:
            raise Conflict(409, "Conflict", "the version is another one")
        self.calls.append(("delete", kind.kind, name))
        self.graces.append(grace)
        if kind == POD and self.lingering and grace != 0:
            item = copy.deepcopy(current)
            item["metadata"].setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")
            self._store(kind, item, "MODIFIED")
        else:
            self.remove(kind, name, namespace or "")
        self.after("delete", kind, name)

    async def bind(self, pod: Object, node: str, annotations: Mapping[str, str] | None = None) -> None:
        raise AssertionError("nothing that is tested here binds")

    async def close(self) -> None:
        return None

    def _find(self, kind: Kind, namespace: str | None, name: str) -> Object:
        try:
            return self.objects[kind, (namespace or "") if kind.namespaced else "", name]
        except KeyError:
            group = kind.api_version.rpartition("/")[0]
            raise NotFound(404, "NotFound", f'{kind.plural}{"." if group else ""}{group} "{name}" not found') from None

    def _store(self, kind: Kind, item: Object, change: str) -> Object:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if kind == ASCEND_JOB:
            item.setdefault("status", {})
        self.objects[
            kind, (item["metadata"].get("namespace") or "") if kind.namespaced else "", item["metadata"]["name"]
        ] = item
        self._tell(kind, Change(change, copy.deepcopy(item)))
        return copy.deepcopy(item)

    def _tell(self, kind: Kind, change: Change) -> None:
        self.history.append((kind, change))
        for watcher in self._watchers:
            watcher.put_nowait(None)

    def _wrote(self, verb: str, kind: Kind, item: Object) -> Object:
        self.calls.append((verb, kind.kind, item["metadata"]["name"]))
        self.after(verb, kind, item["metadata"]["name"])
        return item


def _selected(item: Object, labels: str, fields: str) -> bool:
    found = item["metadata"].get("labels") or {}
    for key, equals, value in (part.partition("=") for part in labels.split(",") if part):
        if key not in found or (equals and found[key] != value):
            return False
    return not fields or fields == f"metadata.name={item['metadata']['name']}"


def refused(code: int, reason: str, message: str) -> ApiError:
    return ApiError(code, reason, message)
