"""The kinds that are always there."""

from __future__ import annotations

from dataclasses import replace

from evertrain.embedded.schema import models
from evertrain.embedded.schema.columns import COLUMNS
from evertrain.embedded.schema.kinds import Resource

_STATUS = frozenset({"status"})
_MODULES = {
    "": "core_v1",
    "events.k8s.io": "events_v1",
    "coordination.k8s.io": "coordination_v1",
    "scheduling.k8s.io": "scheduling_v1",
    "apiextensions.k8s.io": "apiextensions_v1",
}


def definition_name(resource: Resource) -> str:
    """The name of a built-in kind's definition in OpenAPI documents."""
    return models.name_of(_MODULES[resource.group], resource.kind)


def _complete(resource: Resource) -> Resource:
    name = definition_name(resource)
    return replace(
        resource,
        singular=resource.kind.lower(),
        list_kind=resource.kind + "List",
        storage=resource.storage or f"{resource.group}/{resource.plural}",
        load=lambda: models.definition(name),
        definitions=models.definition,
        columns=COLUMNS.get((resource.group, resource.kind), ()),
    )


_DECLARED = (
    Resource("", "v1", "Namespace", "namespaces", False, short_names=("ns",), subresources=_STATUS | {"finalize"}),
    Resource("", "v1", "Node", "nodes", False, short_names=("no",), subresources=_STATUS | {"proxy"}),
    Resource(
        "",
        "v1",
        "Pod",
        "pods",
        short_names=("po",),
        categories=("all",),
        subresources=_STATUS | {"log", "binding", "eviction", "ephemeralcontainers"},
    ),
    Resource("", "v1", "Service", "services", short_names=("svc",), categories=("all",), subresources=_STATUS),
    Resource("", "v1", "ConfigMap", "configmaps", short_names=("cm",)),
    Resource("", "v1", "Secret", "secrets"),
    Resource("", "v1", "Event", "events", short_names=("ev",), storage="/events"),
    Resource("events.k8s.io", "v1", "Event", "events", short_names=("ev",), storage="/events"),
    Resource("coordination.k8s.io", "v1", "Lease", "leases"),
    Resource("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", False, short_names=("pc",)),
    Resource(
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        False,
        short_names=("crd", "crds"),
        categories=("api-extensions",),
        subresources=_STATUS,
    ),
)

RESOURCES = tuple(_complete(resource) for resource in _DECLARED)
