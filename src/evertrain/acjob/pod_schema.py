"""The OpenAPI schema of a pod template, from lightkube's models of Kubernetes' own types. Pure.

It has no descriptions: with them the definition would be too large for `kubectl apply`, which keeps what it applied in
an annotation of at most 256 KiB.
"""

from __future__ import annotations

import importlib
from typing import Any

from evertrain.kube.port import Object

QUANTITY: Object = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$",
    "x-kubernetes-int-or-string": True,
}
_PLAIN: dict[str, Object] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "bool": {"type": "boolean"},
    "float": {"type": "number"},
    "meta_v1.ObjectMeta": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    "meta_v1.Time": {"type": "string", "format": "date-time"},
    "resource.Quantity": QUANTITY,
    "util_intstr.IntOrString": {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True},
}
_OF_QUANTITIES = frozenset({"limits", "requests", "overhead"})
"""Mappings to quantities; all others map to texts."""


def pod_template() -> Object:
    """Of its metadata all fields are kept, known or not."""
    return {
        "type": "object",
        "properties": {
            "metadata": dict(_PLAIN["meta_v1.ObjectMeta"]),
            "spec": _class("core_v1", "PodSpec"),
        },
    }


def _class(module: str, name: str) -> Object:
    cls: Any = getattr(importlib.import_module(f"lightkube.models.{module}"), name)
    properties: Object = {}
    required = []
    for field, annotation in cls.__annotations__.items():
        text = str(annotation).strip("'\"")
        properties[field] = _type(text, module, field)
        if not text.startswith("Optional["):
            required.append(field)
    schema: Object = {"type": "object", "properties": dict(sorted(properties.items()))}
    if required:
        schema["required"] = sorted(required)
    return schema


def _type(annotation: str, module: str, field: str) -> Object:
    if annotation.startswith("Optional["):
        return _type(annotation[len("Optional[") : -1], module, field)
    if annotation.startswith("List["):
        return {"type": "array", "items": _type(annotation[len("List[") : -1], module, field)}
    if annotation == "dict":
        values = QUANTITY if field in _OF_QUANTITIES else {"type": "string"}
        return {"type": "object", "additionalProperties": dict(values)}
    where, _, name = annotation.rpartition(".")
    full = annotation if annotation in _PLAIN else f"{where or module}.{name}"
    return dict(_PLAIN[full]) if full in _PLAIN else _class(where or module, name)
