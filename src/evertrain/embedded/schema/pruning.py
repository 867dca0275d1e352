"""Fields that the schema doesn't know: reported, and left out of what is stored."""

from __future__ import annotations

from typing import Any

from evertrain.embedded.schema.kinds import Resource, Schema
from evertrain.embedded.schema.structure import field_schema, item_schema
from evertrain.kube.port import Object


def prune(resource: Resource, item: Object) -> tuple[Object, list[str]]:
    """The object without unknown fields, and their paths."""
    unknown: list[str] = []
    pruned: Object = _pruned(resource, resource.schema, item, "", unknown)
    return pruned, unknown


def _pruned(resource: Resource, schema: Schema, value: Any, path: str, unknown: list[str]) -> Any:
    if isinstance(value, dict):
        kept: Object = {}
        for key, item in value.items():
            of_field = field_schema(resource, schema, key)
            where = f"{path}.{key}" if path else key
            if of_field is None:
                unknown.append(where)
            else:
                kept[key] = _pruned(resource, of_field, item, where, unknown)
        return kept
    if isinstance(value, list):
        of_item = item_schema(resource, schema)
        return [_pruned(resource, of_item, item, f"{path}[{index}]", unknown) for index, item in enumerate(value)]
    return value


def without_nulls(value: Any) -> Any:
    """Built-in kinds take null for "not given", in every field."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
