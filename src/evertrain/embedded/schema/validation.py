"""An object against its schema."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from evertrain.embedded.schema.errors import (
    FieldError,
    duplicate,
    invalid,
    required,
    too_long,
    too_many,
    unsupported,
    wrong_type,
)
from evertrain.embedded.schema.formats import fits
from evertrain.embedded.schema.kinds import Resource, Schema
from evertrain.embedded.schema.quantity import parse_quantity
from evertrain.embedded.schema.structure import (
    INT_OR_STRING,
    QUANTITY,
    below,
    field_schema,
    is_set,
    item_key,
    item_schema,
    map_keys,
)
from evertrain.kube.port import Object

MAX_ERRORS = 30
"""Nobody reads more, and an object with thousands of wrong fields must not make an answer of megabytes."""


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def schema_errors(resource: Resource, item: Object) -> list[FieldError]:
    """Everything in which the object doesn't follow its schema."""
    return value_errors(resource, resource.schema, item, "")


def value_errors(resource: Resource, schema: Schema, value: Any, path: str) -> list[FieldError]:
    """The same for a part of an object."""
    found: list[FieldError] = []
    _check(resource, schema, value, path, found)
    return found[:MAX_ERRORS]


def _check(resource: Resource, schema: Schema, value: Any, path: str, found: list[FieldError]) -> None:
    if len(found) >= MAX_ERRORS:
        return
    if value is None and schema.get("nullable"):
        return
    kind = json_type(value)
    if schema.get(INT_OR_STRING):
        if kind not in ("integer", "string", *(("number",) if schema.get(QUANTITY) else ())):
            found.append(wrong_type(path, kind, f'{path} in body must be of type integer,string: "{kind}"'))
            return
        if schema.get(QUANTITY):
            try:
                parse_quantity(value)
            except ValueError as error:
                found.append(invalid(path, value, str(error)))
                return
    elif not _type_fits(schema.get("type"), kind):
        found.append(wrong_type(path, kind, f'{path or "object"} in body must be of type {schema["type"]}: "{kind}"'))
        return
    if "enum" in schema and not any(same(value, allowed) for allowed in schema["enum"]):
        found.append(unsupported(path, value, schema["enum"]))
        return
    if kind == "object":
        _check_object(resource, schema, value, path, found)
    elif kind == "array":
        _check_list(resource, schema, value, path, found)
    elif kind == "string":
        _check_string(schema, value, path, found)
    elif kind in ("integer", "number"):
        _check_number(schema, value, path, found)
    _check_combined(resource, schema, value, path, found)


def _type_fits(wanted: Any, kind: str) -> bool:
    return not wanted or wanted == kind or (wanted == "number" and kind == "integer")


def same(one: Any, other: Any) -> bool:
    """Equality of JSON: true is no 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def _check_object(resource: Resource, schema: Schema, value: Object, path: str, found: list[FieldError]) -> None:
    for key in schema.get("required", ()):
        if key not in value:
            found.append(required(below(path, key)))
    if len(value) > schema.get("maxProperties", len(value)):
        found.append(too_many(path, len(value), schema["maxProperties"]))
    if len(value) < schema.get("minProperties", 0):
        found.append(invalid(path, value, f"{path} in body should have at least {schema['minProperties']} properties"))
    for key, item in value.items():
        of_field = field_schema(resource, schema, key)
        if of_field is not None:
            _check(resource, of_field, item, below(path, key), found)


def _check_list(resource: Resource, schema: Schema, value: list[Any], path: str, found: list[FieldError]) -> None:
    if len(value) > schema.get("maxItems", len(value)):
        found.append(too_many(path, len(value), schema["maxItems"]))
    if len(value) < schema.get("minItems", 0):
        found.append(invalid(path, len(value), f"{path} in body should have at least {schema['minItems']} items"))
    of_item = item_schema(resource, schema)
    for index, item in enumerate(value):
        _check(resource, of_item, item, f"{path}[{index}]", found)
    if not resource.custom:
        return
    seen: set[str] = set()
    for index, item in enumerate(value):
        if map_keys(schema):
            if not isinstance(item, dict):
                continue
            keys = item_key(resource, schema, item)
            if keys is None:
                continue
            identity: Any = dict(keys)
        elif is_set(schema) or schema.get("uniqueItems"):
            identity = item
        else:
            return
        text = json.dumps(identity, sort_keys=True)
        if text in seen:
            found.append(duplicate(f"{path}[{index}]", identity))
        seen.add(text)


@lru_cache(maxsize=512)
def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except re.error:
        return None


def _check_string(schema: Schema, value: str, path: str, found: list[FieldError]) -> None:
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        found.append(too_long(path, schema["maxLength"]))
    if len(value) < schema.get("minLength", 0):
        found.append(invalid(path, value, f"{path} in body should be at least {schema['minLength']} chars long"))
    if "pattern" in schema:
        pattern = _pattern(schema["pattern"])
        if pattern is not None and not pattern.search(value):
            found.append(invalid(path, value, f"{path} in body should match '{schema['pattern']}'"))
    name = schema.get("format", "")
    if name and not fits(name, value):
        found.append(invalid(path, value, f"{path} in body must be of type {name}: {json.dumps(value)}"))


def _check_number(schema: Schema, value: int | float, path: str, found: list[FieldError]) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and (value < low or (schema.get("exclusiveMinimum") and value == low)):
        words = "greater than" if schema.get("exclusiveMinimum") else "greater than or equal to"
        found.append(invalid(path, value, f"{path} in body should be {words} {low}"))
    if high is not None and (value > high or (schema.get("exclusiveMaximum") and value == high)):
        words = "less than" if schema.get("exclusiveMaximum") else "less than or equal to"
        found.append(invalid(path, value, f"{path} in body should be {words} {high}"))
    bits = {"int32": 31, "int-or-string": 31, "int64": 63}.get(schema.get("format", ""))
    if bits and not -(2**bits) <= value < 2**bits:
        found.append(invalid(path, value, f"{path} in body must be of type {schema['format']}: {json.dumps(value)}"))
    step = schema.get("multipleOf")
    if step and value % step:
        found.append(invalid(path, value, f"{path} in body should be a multiple of {step}"))


def _check_combined(resource: Resource, schema: Schema, value: Any, path: str, found: list[FieldError]) -> None:
    """allOf, anyOf, oneOf and not, as far as structural schemas have them."""

    def errors(part: Schema) -> list[FieldError]:
        problems: list[FieldError] = []
        _check(resource, part, value, path, problems)
        return problems

    for part in schema.get("allOf", ()):
        if "$ref" not in part:
            found.extend(errors(part))
    if schema.get("anyOf") and all(errors(part) for part in schema["anyOf"]):
        found.append(invalid(path, value, f"{path} in body must validate at least one schema (anyOf)"))
    if schema.get("oneOf"):
        fitting = sum(not errors(part) for part in schema["oneOf"])
        if fitting != 1:
            words = "Found none valid" if not fitting else f"Found {fitting} valid alternatives"
            found.append(invalid(path, value, f"{path} in body must validate one and only one schema (oneOf). {words}"))
    if schema.get("not") and not errors(schema["not"]):
        found.append(invalid(path, value, f"{path} in body must not validate the schema (not)"))
