"""How a schema and a value are walked together. Everything that treats objects field by field goes through here."""

from __future__ import annotations

from typing import Any

from evertrain.embedded.schema.kinds import Resource, Schema, reference
from evertrain.kube.port import Object

OPEN = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"
EMBEDDED = "x-kubernetes-embedded-resource"
OURS = "x-evertrain-"
"""What only this server reads in a schema begins like that, and isn't published."""
QUANTITY = f"{OURS}quantity"
MICRO_TIME = f"{OURS}micro-time"
OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
ANYTHING: Schema = {OPEN: True}
_OF_EMBEDDED: dict[str, Schema] = {
    "apiVersion": {"type": "string"},
    "kind": {"type": "string"},
    "metadata": {"$ref": f"#/components/schemas/{OBJECT_META}"},
}


def resolved(resource: Resource, schema: Schema) -> Schema:
    """What a reference points to, with what stands beside the reference (how a list merges, a default)."""
    known = resource.resolved.get(id(schema))
    if known is not None:
        return known[1]
    meaning = schema
    if reference(schema):
        target = resource.resolve(schema)
        beside = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "description")}
        meaning = target | beside if beside else target
    resource.resolved[id(schema)] = schema, meaning
    return meaning


def field_schema(resource: Resource, schema: Schema, key: str) -> Schema | None:
    """The schema of one field of an object, resolved; None if the schema knows no such field."""
    known = schema.get("properties", {}).get(key)
    if known is None and schema.get(EMBEDDED):
        known = _OF_EMBEDDED.get(key)
    if known is not None:
        return resolved(resource, known)
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        return resolved(resource, extra)
    if extra is True or schema.get(OPEN) or _untyped(schema):
        return ANYTHING
    return None


def declared(schema: Schema, key: str) -> bool:
    """Whether this is a field by name, not an entry of a mapping."""
    return key in schema.get("properties", {}) or bool(schema.get(EMBEDDED) and key in _OF_EMBEDDED)


def _untyped(schema: Schema) -> bool:
    return not schema.get("type") and "properties" not in schema


def item_schema(resource: Resource, schema: Schema) -> Schema:
    items = schema.get("items")
    return resolved(resource, items) if isinstance(items, dict) else ANYTHING


def map_keys(schema: Schema) -> list[str]:
    """The keys by which the items of a list are known; empty if it is no such list."""
    return list(schema.get("x-kubernetes-list-map-keys") or ()) if schema.get("x-kubernetes-list-type") == "map" else []


def is_set(schema: Schema) -> bool:
    return schema.get("x-kubernetes-list-type") == "set"


def is_atomic(schema: Schema, value: Any) -> bool:
    """Whether this object or list is one value for server-side apply."""
    if isinstance(value, dict):
        return schema.get("x-kubernetes-map-type") == "atomic"
    return isinstance(value, list) and not map_keys(schema) and not is_set(schema)


def item_key(resource: Resource, schema: Schema, item: Object) -> tuple[tuple[str, Any], ...] | None:
    """The key values of an item of a keyed list, defaults included; None if one is missing."""
    found: list[tuple[str, Any]] = []
    of_item = item_schema(resource, schema)
    for key in map_keys(schema):
        value = item.get(key)
        if value is None:
            value = (of_item.get("properties", {}).get(key) or {}).get("default")
        if value is None:
            return None
        found.append((key, value))
    return tuple(found)


def below(path: str, key: str) -> str:
    """The path of a field. Keys that are no plain words stand in brackets, as Kubernetes writes them."""
    if path and ("." in key or "/" in key):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key
