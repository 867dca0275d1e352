"""The kinds that are always there."""

from __future__ import annotations

from evertrain.embedded.schema.kinds import Resource

_STATUS = frozenset({"status"})

RESOURCES = (
    Resource("", "v1", "Namespace", "namespaces", False, short_names=("ns",), subresources=_STATUS | {"finalize"}),
    Resource("", "v1", "Node", "nodes", False, short_names=("no",), subresources=_STATUS),
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
