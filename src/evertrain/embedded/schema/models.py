"""OpenAPI schemas of the built-in kinds, made from lightkube's model classes and their docs when they are asked for.

The classes know names, types and what is required, and the docs describe every field. What they don't know (how lists
merge, which texts are allowed, what a mapping maps to) stands in `facts`.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from functools import cache
from typing import Any

from evertrain.embedded.schema import facts
from evertrain.embedded.schema.kinds import Schema

PREFIXES = {
    "meta_v1": "io.k8s.apimachinery.pkg.apis.meta.v1",
    "core_v1": "io.k8s.api.core.v1",
    "events_v1": "io.k8s.api.events.v1",
    "coordination_v1": "io.k8s.api.coordination.v1",
    "scheduling_v1": "io.k8s.api.scheduling.v1",
    "policy_v1": "io.k8s.api.policy.v1",
    "autoscaling_v1": "io.k8s.api.autoscaling.v1",
    "apiextensions_v1": "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1",
    "resource": "io.k8s.apimachinery.pkg.api.resource",
    "util_intstr": "io.k8s.apimachinery.pkg.util.intstr",
    "runtime": "io.k8s.apimachinery.pkg.runtime",
}
_MODULES = {prefix: module for module, prefix in PREFIXES.items()}
_ANYTHING: Schema = {"x-kubernetes-preserve-unknown-fields": True}
_SCALARS: dict[str, Schema] = {
    "str": {"type": "string"},
    "bool": {"type": "boolean"},
    "float": {"type": "number", "format": "double"},
}
PLAIN: dict[str, Schema] = {
    "meta_v1.Time": {
        "type": "string",
        "format": "date-time",
        "description": "Time is a wrapper around time.Time which supports correct marshaling to YAML and JSON.",
    },
    "meta_v1.MicroTime": {
        "type": "string",
        "format": "date-time",
        "description": "MicroTime is version of Time with microsecond level precision.",
        "x-evertrain-micro-time": True,
    },
    "meta_v1.FieldsV1": {
        "type": "object",
        "description": "FieldsV1 stores a set of fields in a data structure like a Trie, in JSON format.",
        **_ANYTHING,
    },
    "resource.Quantity": {
        "x-kubernetes-int-or-string": True,
        "x-evertrain-quantity": True,
        "description": "Quantity is a fixed-point representation of a number, such as 500m, 2 or 16Gi.",
    },
    "util_intstr.IntOrString": {
        "x-kubernetes-int-or-string": True,
        "format": "int-or-string",
        "description": "IntOrString is a type that can hold an int32 or a string.",
    },
    "runtime.RawExtension": {"type": "object", "description": "Any object.", **_ANYTHING},
    "apiextensions_v1.JSON": {"description": "JSON represents any valid JSON value.", **_ANYTHING},
    "apiextensions_v1.CustomResourceSubresourceStatus": {
        "type": "object",
        "description": "CustomResourceSubresourceStatus defines how to serve the status subresource.",
        **_ANYTHING,
    },
}
"""Types that are no classes."""
_OR_SCHEMA = {
    "JSONSchemaPropsOrBool": "A schema, or true or false.",
    "JSONSchemaPropsOrArray": "A schema, or a list of schemas.",
    "JSONSchemaPropsOrStringArray": "A schema, or a list of texts.",
}
"""What may stand instead of a schema in a schema. It has no type, but if it is an object, it has the fields of one."""

_FIELD = re.compile(r"^\s*\* \*\*(\w+)\*\* ``.*?``(?: - ?(.*))?$")


def name_of(module: str, cls: str) -> str:
    """The name of a definition: `io.k8s.api.core.v1.Pod`."""
    return f"{PREFIXES[module]}.{cls}"


def _pointer(module: str, cls: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name_of(module, cls)}"}


def _docs(cls: type) -> tuple[str, dict[str, str]]:
    """What the class is, and what each of its fields is."""
    about, _, listed = (cls.__doc__ or "").partition("**parameters**")
    fields: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listed.splitlines():
        found = _FIELD.match(line)
        if found:
            lines = fields.setdefault(found.group(1), [])
            lines.append((found.group(2) or "").strip())
        elif line.strip():
            lines.append(line.strip())
    return " ".join(about.split()), {name: " ".join(text).strip() for name, text in fields.items()}


def _type(annotation: str, module: str, owner: str, field: str) -> Schema:
    annotation = annotation.strip().strip("'\"")
    for wrapper in ("Optional", "List"):
        if annotation.startswith(wrapper + "["):
            inner = _type(annotation[len(wrapper) + 1 : -1], module, owner, field)
            return {"type": "array", "items": inner} if wrapper == "List" else inner
    if annotation == "int":
        return {"type": "integer", "format": "int64" if field in facts.LONG else "int32"}
    if annotation in _SCALARS:
        return dict(_SCALARS[annotation])
    if annotation == "dict":
        return {"type": "object", "additionalProperties": facts.mapped(module, owner, field, _pointer)}
    where, _, name = annotation.rpartition(".")
    return _pointer(where or module, name)


def _fields(cls: Any) -> list[tuple[str, str, str]]:
    """Attribute, name in JSON and annotation. Models of lightkube are structs of msgspec; before 1.0, dataclasses."""
    annotations = {name: str(text).strip("'") for name, text in cls.__annotations__.items()}
    if dataclasses.is_dataclass(cls):
        return [
            (item.name, item.metadata.get("json", item.name), annotations[item.name])
            for item in dataclasses.fields(cls)
        ]
    names = zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True)
    return [(attribute, name, annotations[attribute]) for attribute, name in names]


@cache
def definition(name: str) -> Schema:
    """By its full name. The schemas are shared: nobody may change them."""
    prefix, _, cls_name = name.rpartition(".")
    module = _MODULES[prefix]
    plain = PLAIN.get(f"{module}.{cls_name}")
    if plain is not None:
        return plain
    if cls_name in _OR_SCHEMA:
        properties = definition(name_of(module, "JSONSchemaProps"))["properties"]
        return {"description": _OR_SCHEMA[cls_name], "properties": properties}
    cls: Any = getattr(importlib.import_module(f"lightkube.models.{module}"), cls_name)
    about, described = _docs(cls)
    properties = {}
    required: list[str] = []
    for attribute, field, annotation in _fields(cls):
        schema = _type(annotation, module, cls_name, field)
        schema |= facts.FIELDS.get(f"{cls_name}.{field}", {})
        description = described.get(attribute, "")
        if "$ref" in schema and (len(schema) > 1 or description):
            schema = {"allOf": [{"$ref": schema.pop("$ref")}], **schema}
        if description:
            schema["description"] = description
        properties[field] = schema
        if not annotation.startswith("Optional["):
            required.append(field)
    made: Schema = {"type": "object", "properties": properties}
    if about:
        made["description"] = about
    required = [field for field in required if f"{cls_name}.{field}" not in facts.NOT_REQUIRED]
    if required:
        made["required"] = sorted(required)
    return made | facts.CLASSES.get(cls_name, {})


def closure(roots: list[str]) -> dict[str, Schema]:
    """The definitions of these names, and all that they point to."""
    found: dict[str, Schema] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = definition(name)
        waiting.extend(pointers(found[name]))
    return dict(sorted(found.items()))


def pointers(schema: Any) -> list[str]:
    found: list[str] = []
    if isinstance(schema, dict):
        target = schema.get("$ref")
        if isinstance(target, str):
            found.append(target.rsplit("/", 1)[-1])
        for value in schema.values():
            if isinstance(value, dict | list):
                found.extend(pointers(value))
    elif isinstance(schema, list):
        for value in schema:
            found.extend(pointers(value))
    return found
