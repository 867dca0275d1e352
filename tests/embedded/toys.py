"""A custom kind for tests: toys.example.com, with a field of every sort."""

from __future__ import annotations

import copy
from typing import Any

_PARTS: dict[str, Any] = {
    "type": "array",
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["name"],
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "color": {"type": "string"}},
    },
}
_SPEC: dict[str, Any] = {
    "type": "object",
    "description": "What is wanted.",
    "properties": {
        "size": {"type": "integer", "description": "How big it is.", "minimum": 1, "maximum": 9, "format": "int32"},
        "color": {"type": "string", "enum": ["red", "blue"], "default": "red"},
        "port": {"x-kubernetes-int-or-string": True},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "note": {"type": "string", "nullable": True, "pattern": "^n", "maxLength": 4},
        "when": {"type": "string", "format": "date-time"},
        "deep": {"type": "object", "default": {}, "properties": {"a": {"type": "integer", "default": 7}}},
        "items": {
            **_PARTS,
            "maxItems": 3,
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "value": {"type": "integer", "default": 1}},
            },
        },
        "parts": _PARTS,
        "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
    },
}
_STATUS: dict[str, Any] = {
    "type": "object",
    "x-kubernetes-preserve-unknown-fields": True,
    "properties": {"phase": {"type": "string"}},
}
_COLUMNS = [
    {"name": "State", "type": "string", "jsonPath": ".status.conditions[-1:].type"},
    {"name": "Size", "type": "integer", "jsonPath": ".spec.size", "priority": 1},
    {"name": "All", "type": "string", "jsonPath": ".status.conditions[*].type", "priority": 1},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]


def definition(*, size_required: bool = False) -> dict[str, Any]:
    """The CustomResourceDefinition, the caller's own."""
    spec = {**_SPEC, "required": ["size"]} if size_required else _SPEC
    version: dict[str, Any] = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": "Something to play with.",
                "properties": {"spec": spec, "status": _STATUS},
            }
        },
        "additionalPrinterColumns": _COLUMNS,
    }
    return copy.deepcopy(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": "toys.example.com"},
            "spec": {
                "group": "example.com",
                "scope": "Namespaced",
                "names": {"plural": "toys", "kind": "Toy", "shortNames": ["ty"], "categories": ["all"]},
                "versions": [version],
            },
        }
    )


def toy(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "example.com/v1", "kind": "Toy", "metadata": {"name": name}, "spec": spec}
