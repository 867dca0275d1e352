"""The kinds of volcano, by which the operator and a gang scheduler understand each other: PodGroup and Queue."""

from __future__ import annotations

from typing import Any

from evertrain.kube.port import POD_GROUP, QUEUE, Kind, Object

_STRING, _INTEGER, _DATE = (
    {"type": "string"},
    {"type": "integer", "format": "int32"},
    {"type": "string", "format": "date-time"},
)
_QUANTITY = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
}
_RESOURCES = {"type": "object", "additionalProperties": _QUANTITY}


def definitions() -> list[Object]:
    return [
        _definition(
            POD_GROUP,
            short_names=["pg", "podgroup-v1beta1"],
            columns=[
                _column("STATUS", ".status.phase"),
                _column("minMember", ".spec.minMember", "integer"),
                _column("RUNNINGS", ".status.running", "integer"),
                _column("AGE", ".metadata.creationTimestamp", "date"),
                _column("QUEUE", ".spec.queue", priority=1),
            ],
            spec={
                "minMember": _INTEGER | {"description": "Pods that have to be scheduled together, or none of them."},
                "minTaskMember": {
                    "type": "object",
                    "additionalProperties": _INTEGER,
                    "description": "The same for each kind of replica.",
                },
                "queue": _STRING | {"description": "The queue that the group waits in."},
                "priorityClassName": _STRING,
                "minResources": _RESOURCES | {"description": "What the group needs at least to begin."},
            },
            status={
                "phase": _STRING | {"description": "Pending, Inqueue, Running, Unknown or Completed."},
                "running": _INTEGER,
                "succeeded": _INTEGER,
                "failed": _INTEGER,
                "conditions": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "type": _STRING,
                            "status": _STRING,
                            "reason": _STRING,
                            "message": _STRING,
                            "transitionID": _STRING,
                            "lastTransitionTime": _DATE,
                        },
                    },
                },
            },
        ),
        _definition(
            QUEUE,
            short_names=["q", "queue-v1beta1"],
            columns=[
                _column("WEIGHT", ".spec.weight", "integer"),
                _column("STATE", ".status.state"),
                _column("AGE", ".metadata.creationTimestamp", "date"),
            ],
            spec={
                "weight": _INTEGER | {"minimum": 1, "maximum": 65535},
                "capability": _RESOURCES | {"description": "What all groups of the queue may use together."},
                "reclaimable": {"type": "boolean"},
                "priority": _INTEGER,
                "parent": _STRING,
            },
            status={
                "state": _STRING,
                "pending": _INTEGER,
                "running": _INTEGER,
                "inqueue": _INTEGER,
                "unknown": _INTEGER,
                "completed": _INTEGER,
                "allocated": _RESOURCES,
            },
        ),
    ]


def default_queue() -> Object:
    return {
        "apiVersion": QUEUE.api_version,
        "kind": QUEUE.kind,
        "metadata": {"name": "default"},
        "spec": {"weight": 1, "reclaimable": True},
        "status": {"state": "Open"},
    }


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> Object:
    return {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}


def _definition(
    kind: Kind, *, short_names: list[str], columns: list[Object], spec: dict[str, Any], status: dict[str, Any]
) -> Object:
    group, version = kind.api_version.split("/")
    schema = {
        "type": "object",
        "properties": {
            "apiVersion": _STRING,
            "kind": _STRING,
            "metadata": {"type": "object"},
            "spec": {"type": "object", "properties": spec},
            "status": {"type": "object", "properties": status},
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": short_names,
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }
