"""Sets of fields, as managedFields keeps them.

A path is a tuple of elements: `f:NAME` for a field, `k:{"name":"a"}` for an item of a keyed list, `v:"x"` for a value
in a set. In FieldsV1 they nest, and `.` says that the place itself belongs to the set, not only what is below it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from evertrain.embedded.schema.kinds import Resource, Schema
from evertrain.embedded.schema.structure import (
    ANYTHING,
    declared,
    field_schema,
    is_atomic,
    is_set,
    item_key,
    item_schema,
    map_keys,
)
from evertrain.kube.port import Object

Path = tuple[str, ...]
Fields = frozenset[Path]


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def item_element(resource: Resource, schema: Schema, item: Any) -> str | None:
    """How an item of a keyed list or a set is named in a path; None if it can't be."""
    if map_keys(schema):
        keys = item_key(resource, schema, item) if isinstance(item, dict) else None
        return None if keys is None else "k:" + compact(dict(sorted(keys)))
    return "v:" + compact(item)


def fields_of(resource: Resource, item: Object) -> Fields:
    """All fields that an object sets."""
    found: set[Path] = set()
    _collect(resource, resource.schema, item, (), found)
    return frozenset(found)


def _collect(resource: Resource, schema: Schema, value: Any, path: Path, found: set[Path]) -> None:
    if is_atomic(schema, value) or not isinstance(value, dict | list):
        found.add(path)
    elif isinstance(value, dict):
        for key, item in value.items():
            below = (*path, f"f:{key}")
            if item is None or item == {} or not declared(schema, key):
                found.add(below)
            _collect(resource, field_schema(resource, schema, key) or ANYTHING, item, below, found)
    else:
        of_item = item_schema(resource, schema)
        for item in value:
            element = item_element(resource, schema, item)
            if element is None:
                found.add(path)
                continue
            found.add((*path, element))
            if not is_set(schema):
                _collect(resource, of_item, item, (*path, element), found)
    found.discard(())


def empty_places(resource: Resource, item: Object) -> Fields:
    """Objects and lists that are there but empty: they set no field, and yet somebody wants them."""
    found: set[Path] = set()

    def walk(schema: Schema, value: Any, path: Path) -> None:
        if value in ({}, []):
            found.add(path)
        elif isinstance(value, dict):
            for key, part in value.items():
                walk(field_schema(resource, schema, key) or ANYTHING, part, (*path, f"f:{key}"))
        elif isinstance(value, list) and map_keys(schema):
            for part in value:
                element = item_element(resource, schema, part)
                if element is not None:
                    walk(item_schema(resource, schema), part, (*path, element))

    walk(resource.schema, item, ())
    return frozenset(found)


def encode(fields: Iterable[Path]) -> Object:
    """As FieldsV1."""
    root: Object = {}
    for path in sorted(fields):
        node = root
        for element in path:
            node = node.setdefault(element, {})
        node["."] = {}
    return _trimmed(root)


def _trimmed(node: Object) -> Object:
    children = {key: _trimmed(value) for key, value in node.items() if key != "."}
    if children and "." in node:
        return {".": {}, **children}
    return children


def decode(node: Any) -> Fields:
    """From FieldsV1; what can't be read is left out."""
    found: set[Path] = set()

    def walk(part: Any, path: Path) -> None:
        if not isinstance(part, dict):
            return
        if path and (not part or "." in part):
            found.add(path)
        for key, value in part.items():
            if key != ".":
                walk(value, (*path, key))

    walk(node, ())
    return frozenset(found)


def shown(path: Path) -> str:
    """As messages name it: `.spec.containers[name="a"].image`."""
    text = ""
    for element in path:
        kind, _, rest = element.partition(":")
        if kind == "f":
            text += f".{rest}"
        elif kind == "k":
            keys = json.loads(rest)
            text += "[" + ",".join(f"{key}={compact(value)}" for key, value in sorted(keys.items())) + "]"
        else:
            text += f"[={rest}]"
    return text


def values_of(resource: Resource, item: Object) -> dict[Path, str]:
    """Every field that is one value, with that value as text: what a comparison compares."""
    found: dict[Path, str] = {}
    for path in fields_of(resource, item):
        found[path] = ""
    _values(resource, resource.schema, item, (), found)
    return found


def _values(resource: Resource, schema: Schema, value: Any, path: Path, found: dict[Path, str]) -> None:
    if type(value) is str:
        found[path] = f'"{value}'  # no other value begins like that; most are text, and this is quick
    elif is_atomic(schema, value) or not isinstance(value, dict | list):
        found[path] = json.dumps(value, sort_keys=True)
    elif isinstance(value, dict):
        for key, item in value.items():
            _values(resource, field_schema(resource, schema, key) or ANYTHING, item, (*path, f"f:{key}"), found)
    elif not is_set(schema):
        for item in value:
            element = item_element(resource, schema, item)
            if element is None:
                found[path] = json.dumps(value, sort_keys=True)
            else:
                _values(resource, item_schema(resource, schema), item, (*path, element), found)
