"""Fields that the schema doesn't know are reported, and left out of what is stored; so are nulls that say nothing."""

from __future__ import annotations

from typing import Any

from evertrain.embedded.schema.kinds import Resource, Schema
from evertrain.embedded.schema.structure import ANYTHING, field_schema, item_schema
from evertrain.kube.port import Object


def prune(resource: Resource, item: Object) -> tuple[Object, list[str]]:
    """The object without unknown fields, and their paths. Null means "not given" in every field of a built-in kind, and
    in a custom resource in those that can't be null; where they have a default, that one comes in then."""
    unknown: list[str] = []
    if not resource.custom:
        item = _without_nulls(item)
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
            elif item is not None or of_field is ANYTHING or of_field.get("nullable"):
                kept[key] = _pruned(resource, of_field, item, where, unknown)
        return kept
    if isinstance(value, list):
        of_item = item_schema(resource, schema)
        return [_pruned(resource, of_item, item, f"{path}[{index}]", unknown) for index, item in enumerate(value)]
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
