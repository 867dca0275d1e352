"""What the server itself adds to objects of some kinds, or refuses, after the schema was content. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from ipaddress import IPv4Network

from evertrain.embedded.api.services import allocate
from evertrain.embedded.schema import FieldError, Registry, Resource
from evertrain.kube.port import Object

CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
"""Finalizer of a CustomResourceDefinition: its objects go first."""


def before_create(
    registry: Registry, resource: Resource, item: Object, siblings: Iterable[Object], now: str, services: IPv4Network
) -> list[FieldError]:
    """`services`: the addresses that they may have."""
    match resource.group, resource.kind:
        case "", "Pod":
            _pod(item)
        case "", "Service":
            return allocate(item, siblings, within=services)
        case "apiextensions.k8s.io", "CustomResourceDefinition":
            return _definition(registry, item, None, now)
    return []


def before_update(
    registry: Registry,
    resource: Resource,
    item: Object,
    old: Object,
    siblings: Iterable[Object],
    now: str,
    services: IPv4Network,
) -> list[FieldError]:
    match resource.group, resource.kind:
        case "", "Service":
            return allocate(item, siblings, old, within=services)
        case "apiextensions.k8s.io", "CustomResourceDefinition":
            return _definition(registry, item, old, now)
    return []


def needs_siblings(resource: Resource) -> bool:
    return (resource.group, resource.kind) == ("", "Service")


def _pod(item: Object) -> None:
    spec = item["spec"]
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("serviceAccount", spec["serviceAccountName"])


def _definition(registry: Registry, item: Object, old: Object | None, now: str) -> list[FieldError]:
    """Gives a CustomResourceDefinition the conditions that say that it is served."""
    spec, metadata = item["spec"], item["metadata"]
    names = spec["names"]
    for version in spec["versions"]:
        taken = registry.find(spec["group"], version["name"], names["plural"])
        if taken is not None and not taken.custom:
            message = f'Invalid value: "{spec["group"]}": {taken.qualified} is a built-in resource'
            return [FieldError("spec.group", "FieldValueInvalid", message)]
    finalizers = metadata.get("finalizers") or []
    if CLEANUP not in finalizers and not metadata.get("deletionTimestamp"):
        metadata["finalizers"] = [*finalizers, CLEANUP]
    status = item["status"] = copy.deepcopy(item.get("status") or {})
    status["acceptedNames"] = {
        key: names[key]
        for key in ("plural", "singular", "shortNames", "kind", "listKind", "categories")
        if names.get(key)
    }
    stored = status.setdefault("storedVersions", [])
    for version in spec["versions"]:
        if version.get("storage") and version["name"] not in stored:
            stored.append(version["name"])
    conditions = status.setdefault("conditions", [])
    have = {condition.get("type") for condition in conditions}
    if "NamesAccepted" not in have:
        conditions.append(_condition("NamesAccepted", "NoConflicts", "no conflicts found", now))
    if "Established" not in have:
        conditions.append(
            _condition("Established", "InitialNamesAccepted", "the initial names have been accepted", now)
        )
    if metadata.get("deletionTimestamp") and "Terminating" not in have:
        conditions.append(
            _condition("Terminating", "InstanceDeletionPending", "CustomResourceDefinition marked for deletion", now)
        )
    return []


def _condition(kind: str, reason: str, message: str, now: str) -> Object:
    return {"type": kind, "status": "True", "lastTransitionTime": now, "reason": reason, "message": message}
