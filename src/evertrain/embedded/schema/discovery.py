"""What kubectl asks first: which groups, versions and resources are there."""

from __future__ import annotations

from evertrain.embedded.schema.kinds import Registry, Resource
from evertrain.kube.port import Object

SUBRESOURCE_VERBS: dict[str, tuple[str, ...]] = {
    "status": ("get", "patch", "update"),
    "log": ("get",),
    "proxy": ("get",),
    "binding": ("create",),
    "eviction": ("create",),
    "ephemeralcontainers": ("get", "patch", "update"),
    "finalize": ("update",),
}
_FOREIGN = {
    "binding": ("", "v1", "Binding"),
    "eviction": ("policy", "v1", "Eviction"),
    "proxy": ("", "v1", "NodeProxyOptions"),
}
"""Subresources whose body is of another kind than the object."""


def legacy_versions(registry: Registry, address: str = "") -> Object:
    """GET /api."""
    return {
        "kind": "APIVersions",
        "versions": registry.groups().get("", ["v1"]),
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}],
    }


def _group(group: str, versions: list[str]) -> Object:
    listed = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
    return {"name": group, "versions": listed, "preferredVersion": listed[0]}


def group_list(registry: Registry) -> Object:
    """GET /apis."""
    groups = [_group(group, versions) for group, versions in registry.groups().items() if group]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def group_document(registry: Registry, group: str) -> Object | None:
    """GET /apis/GROUP; None if there is no such group."""
    versions = registry.groups().get(group)
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, versions)} if group and versions else None


def _entries(resource: Resource) -> list[Object]:
    entry: Object = {
        "name": resource.plural,
        "singularName": resource.singular or resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    entries = [entry]
    for name in sorted(resource.subresources):
        sub: Object = {
            "name": f"{resource.plural}/{name}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": list(SUBRESOURCE_VERBS.get(name, ("get",))),
        }
        if name in _FOREIGN:
            group, version, kind = _FOREIGN[name]
            sub |= {"kind": kind, "version": version, "group": group} if group else {"kind": kind}
        entries.append(sub)
    return entries


def resource_list(registry: Registry, group: str, version: str) -> Object | None:
    """GET /api/v1 and /apis/GROUP/VERSION; None if there is no such version."""
    served = registry.served(group, version)
    if not served:
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": [entry for resource in served for entry in _entries(resource)],
    }


def _aggregated(resource: Resource) -> Object:
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    entry: Object = {
        "resource": resource.plural,
        "responseKind": kind,
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular or resource.kind.lower(),
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    if resource.subresources:
        entry["subresources"] = []
        for name in sorted(resource.subresources):
            answer = kind
            if name in _FOREIGN:
                answer = dict(zip(("group", "version", "kind"), _FOREIGN[name], strict=True))
            entry["subresources"].append(
                {
                    "subresource": name,
                    "responseKind": answer,
                    "verbs": list(SUBRESOURCE_VERBS.get(name, ("get",))),
                }
            )
    return entry


def aggregated_discovery(registry: Registry, *, legacy: bool, version: str = "v2") -> Object:
    """GET /api (`legacy`) or /apis with `Accept: application/json;g=apidiscovery.k8s.io;v=V;as=APIGroupDiscoveryList`,
    V being v2 (kubectl 1.30 and later) or v2beta1. The answer's Content-Type is that same text."""
    items: list[Object] = []
    for group, versions in registry.groups().items():
        if (group == "") is not legacy:
            continue
        metadata: Object = {"name": group} if group else {}
        listed = [
            {
                "version": name,
                "freshness": "Current",
                "resources": [_aggregated(resource) for resource in registry.served(group, name)],
            }
            for name in versions
        ]
        items.append({"metadata": metadata | {"creationTimestamp": None}, "versions": listed})
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"apidiscovery.k8s.io/{version}",
        "metadata": {},
        "items": items,
    }
