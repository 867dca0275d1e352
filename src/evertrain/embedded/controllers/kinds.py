"""Which kinds there are, as seen through the port: the built-in ones and those of the CustomResourceDefinitions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import cast

from evertrain.kube.port import (
    CONFIG_MAP,
    EVENT,
    LEASE,
    NAMESPACE,
    NODE,
    POD,
    SECRET,
    SERVICE,
    Change,
    Kind,
    Kube,
    Listing,
    Object,
)

BUILTIN = (NAMESPACE, NODE, POD, SERVICE, CONFIG_MAP, SECRET, EVENT, LEASE)


def kind_of(definition: Object) -> Kind | None:
    """The kind that a CustomResourceDefinition makes, in the first version that is served."""
    spec = definition["spec"]
    for version in spec["versions"]:
        if version.get("served", True):
            names = spec["names"]
            namespaced = spec.get("scope", "Namespaced") == "Namespaced"
            return Kind(f"{spec['group']}/{version['name']}", names["kind"], names["plural"], namespaced)
    return None


class _Slim:
    """Lists and watches of another port, with only a part of every object: whoever keeps all objects keeps little."""

    def __init__(self, kube: Kube, part: Callable[[Object], Object]) -> None:
        self._kube = kube
        self._part = part

    async def list(self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Listing:
        found = await self._kube.list(kind, namespace, labels=labels, fields=fields)
        return Listing([self._part(item) for item in found.items], found.resource_version)

    async def watch(
        self, kind: Kind, namespace: str | None = None, *, resource_version: str, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Change]:
        changes = self._kube.watch(kind, namespace, resource_version=resource_version, labels=labels, fields=fields)
        async for change in changes:
            yield Change(change.type, self._part(change.object))


def slim(kube: Kube, part: Callable[[Object], Object]) -> Kube:
    """A port for caches only."""
    return cast(Kube, _Slim(kube, part))


_METADATA = ("name", "namespace", "uid", "resourceVersion", "ownerReferences", "finalizers", "deletionTimestamp")


def metadata_only(item: Object) -> Object:
    metadata = item["metadata"]
    return {"metadata": {key: metadata[key] for key in _METADATA if key in metadata}}
