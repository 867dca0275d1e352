"""OpenAPI v2 in protobuf, in the messages of gnostic's openapi.v2: the one form of it that kubectl reads.

Only what Kubernetes' documents use is written; the numbers are those of gnostic's OpenAPIv2.proto.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from evertrain.embedded.schema.kinds import Schema
from evertrain.kube.port import Object


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: Any) -> bytes:
    return _bytes(field, str(value).encode()) if value else b""


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value)) if value else b""


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", float(value)) if value else b""


def _any(value: Any) -> bytes:
    """An Any message holds YAML, and JSON is YAML."""
    return _text(2, json.dumps(value) + "\n")


def _named(field: int, name: str, value: bytes) -> bytes:
    return _bytes(field, _text(1, name) + _bytes(2, value))


def _extensions(field: int, item: Object) -> bytes:
    return b"".join(_named(field, key, _any(value)) for key, value in sorted(item.items()) if key.startswith("x-"))


def _schema(schema: Schema) -> bytes:
    parts = [
        _text(1, schema.get("$ref")),
        _text(2, schema.get("format")),
        _text(3, schema.get("title")),
        _text(4, schema.get("description")),
    ]
    if "default" in schema:
        parts.append(_bytes(5, _any(schema["default"])))
    for field, key in ((6, "multipleOf"), (7, "maximum"), (9, "minimum")):
        if key in schema:
            parts.append(_double(field, schema[key]))
    for field, key in (
        (8, "exclusiveMaximum"),
        (10, "exclusiveMinimum"),
        (11, "maxLength"),
        (12, "minLength"),
        (14, "maxItems"),
        (15, "minItems"),
        (16, "uniqueItems"),
        (17, "maxProperties"),
        (18, "minProperties"),
    ):
        if key in schema:
            parts.append(_integer(field, schema[key]))
    parts.append(_text(13, schema.get("pattern")))
    parts.extend(_text(19, name) for name in schema.get("required", ()))
    parts.extend(_bytes(20, _any(value)) for value in schema.get("enum", ()))
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        parts.append(_bytes(21, _bytes(1, _schema(extra))))
    elif extra is not None:
        parts.append(_bytes(21, _integer(2, bool(extra))))
    if schema.get("type"):
        parts.append(_bytes(22, _text(1, schema["type"])))
    if isinstance(schema.get("items"), dict):
        parts.append(_bytes(23, _bytes(1, _schema(schema["items"]))))
    if schema.get("properties"):
        listed = b"".join(_named(1, name, _schema(part)) for name, part in sorted(schema["properties"].items()))
        parts.append(_bytes(25, listed))
    parts.append(_extensions(31, schema))
    return b"".join(parts)


def _parameter(parameter: Object) -> bytes:
    """A query parameter, in its three wrappers."""
    inner = (
        _text(2, parameter.get("in"))
        + _text(3, parameter.get("description"))
        + _text(4, parameter.get("name"))
        + _text(6, parameter.get("type"))
        + _integer(20, bool(parameter.get("uniqueItems")))
    )
    return _bytes(1, _bytes(2, _bytes(3, inner)))


def _operation(operation: Object) -> bytes:
    parts = [_text(3, operation.get("description")), _text(5, operation.get("operationId"))]
    parts.extend(_text(6, kind) for kind in operation.get("produces", ()))
    parts.extend(_text(7, kind) for kind in operation.get("consumes", ()))
    parts.extend(_bytes(8, _parameter(parameter)) for parameter in operation.get("parameters", ()))
    answers = b""
    for code, answer in operation.get("responses", {}).items():
        body = _text(1, answer.get("description"))
        if "schema" in answer:
            body += _bytes(2, _bytes(1, _schema(answer["schema"])))
        answers += _named(1, code, _bytes(1, body))
    parts.append(_bytes(9, answers))
    parts.append(_extensions(13, operation))
    return b"".join(parts)


def _path(item: Object) -> bytes:
    numbers = {"get": 2, "put": 3, "post": 4, "delete": 5, "patch": 8}
    return b"".join(_bytes(number, _operation(item[name])) for name, number in numbers.items() if name in item)


def encode_document(document: Object) -> bytes:
    """A whole OpenAPI v2 document."""
    info = _text(1, document["info"]["title"]) + _text(2, document["info"]["version"])
    paths = b"".join(_named(2, name, _path(item)) for name, item in sorted(document["paths"].items()))
    listed = b"".join(_named(1, name, _schema(schema)) for name, schema in sorted(document["definitions"].items()))
    return _text(1, document["swagger"]) + _bytes(2, info) + _bytes(8, paths) + _bytes(9, listed)
