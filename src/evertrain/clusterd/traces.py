"""Which timings a job writes: the ConfigMap data-trace-<job>, and those who subscribe to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from evertrain.acjob import names
from evertrain.clusterd.model import Job
from evertrain.clusterd.services.publisher import Line
from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, AlreadyExists, Kube, NotFound, Object

PREFIX, KEY = "data-trace-", "profilingSwitch"
LABELS = {"reset": "true"}
Switches = Mapping[str, str]


class Traces:
    def __init__(self, kube: Kube, cache: Cache) -> None:
        self._kube, self._cache = kube, cache
        self._listeners: dict[Line[Switches], Callable[[], Job | None]] = {}
        cache.listen(self._changed)

    async def get(self, namespace: str, name: str) -> Switches | None:
        try:
            return read(await self._kube.get(CONFIG_MAP, PREFIX + name, namespace))
        except NotFound:
            return None

    async def set(self, namespace: str, name: str, uid: str, switches: Switches) -> None:
        """It goes with the job (`uid`), and the next one of that name begins without; unless somebody else has made
        it."""
        data = {KEY: json.dumps(dict(switches), separators=(",", ":"))}
        owners = [{"apiVersion": names.API_VERSION, "kind": names.KIND, "name": name, "uid": uid}]
        item = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": PREFIX + name, "namespace": namespace, "labels": LABELS, "ownerReferences": owners},
            "data": data,
        }
        try:
            await self._kube.create(CONFIG_MAP, item)
        except AlreadyExists:
            there = await self._kube.get(CONFIG_MAP, PREFIX + name, namespace)
            metadata: Object = {"labels": LABELS}
            if there["metadata"].get("ownerReferences"):
                metadata["ownerReferences"] = owners
            await self._kube.patch(CONFIG_MAP, PREFIX + name, namespace, {"metadata": metadata, "data": data})

    def subscribe(self, job: Callable[[], Job | None]) -> Line[Switches]:
        line: Line[Switches] = Line(key=lambda _: "", limit=None, left=lambda line: self._forget(line))
        self._listeners[line] = job
        found = job()
        item = None if found is None else self._cache.get(PREFIX + found.name, found.namespace)
        switches = None if item is None else read(item)
        if switches is not None:
            line.put(switches)
        return line

    def _forget(self, line: Line[Switches]) -> None:
        self._listeners.pop(line, None)

    def _changed(self, before: Object | None, after: Object | None) -> None:
        if after is None or not after["metadata"]["name"].startswith(PREFIX):
            return
        switches = read(after)
        if switches is None or (before is not None and read(before) == switches):
            return
        for line, find in list(self._listeners.items()):
            job = find()
            if job is not None and (PREFIX + job.name, job.namespace) == (
                after["metadata"]["name"],
                after["metadata"].get("namespace"),
            ):
                line.put(switches)


def read(item: Object) -> dict[str, str] | None:
    try:
        found = json.loads((item.get("data") or {}).get(KEY) or "{}")
    except (ValueError, RecursionError):
        return None
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else None
