"""JSON patch, JSON merge patch and strategic merge patch."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from evertrain.embedded.schema.decoding import MAX_SIZE, check_depth, check_size, size
from evertrain.embedded.schema.errors import Refused, bad_request
from evertrain.embedded.schema.kinds import Resource
from evertrain.embedded.schema.strategic import strategic_merge
from evertrain.embedded.schema.validation import same
from evertrain.kube.port import Object

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
MAX_OPERATIONS = 10_000
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")


def patched(resource: Resource, old: Object, patch: Any, content_type: str) -> Object:
    """A new object; `old` isn't touched. Raises Refused: 400 or 422 for a bad patch, 413 for one that makes too large
    an object, 415 for an unsupported type (also a strategic merge patch of a custom resource)."""
    kind = content_type.partition(";")[0].strip()
    accepted = [JSON_PATCH, MERGE_PATCH, APPLY_PATCH]
    if not resource.custom:
        accepted.insert(2, STRATEGIC_MERGE_PATCH)
    if kind not in accepted or kind == APPLY_PATCH:
        raise Refused(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: " + ", ".join(accepted),
        )
    if kind == JSON_PATCH:
        made = json_patch(old, patch)
    elif not isinstance(patch, dict):
        raise bad_request("error decoding patch: the patch must be an object")
    else:
        made = merge_patch(old, patch) if kind == MERGE_PATCH else strategic_merge(resource, old, patch)
    if not isinstance(made, dict):
        raise _unusable("the result of the patch is no object")
    check_size(made)
    return made


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    made = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merge_patch(made.get(key), value)
    return made


def _unusable(message: str) -> Refused:
    return Refused(422, "Invalid", f"the server rejected our request due to an error in our request: {message}")


def _pointer(text: Any) -> list[str]:
    if not isinstance(text, str) or (text and not text.startswith("/")):
        raise _unusable(f"{json.dumps(text)} is no JSON pointer")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _index(parent: list[Any], part: str, *, insert: bool = False) -> int:
    if insert and part == "-":
        return len(parent)
    if not _INDEX.fullmatch(part):
        raise _unusable(f"invalid array index {json.dumps(part)}")
    index = int(part)
    if not index < len(parent) + insert:
        raise _unusable(f"array index {part} is out of bounds")
    return index


def _get(root: Any, parts: list[str], path: str) -> Any:
    value = root
    for part in parts:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list):
            value = value[_index(value, part)]
        else:
            raise _unusable(f"doc is missing path: {json.dumps(path)}: missing value")
    return value


def _add(root: Any, parts: list[str], value: Any, path: str) -> Any:
    if not parts:
        return value
    parent = _get(root, parts[:-1], path)
    if isinstance(parent, dict):
        parent[parts[-1]] = value
    elif isinstance(parent, list):
        parent.insert(_index(parent, parts[-1], insert=True), value)
    else:
        raise _unusable(f"add operation does not apply: doc is missing path: {json.dumps(path)}: missing value")
    return root


def _remove(root: Any, parts: list[str], path: str) -> Any:
    if not parts:
        return None
    parent = _get(root, parts[:-1], path)
    if isinstance(parent, dict) and parts[-1] in parent:
        del parent[parts[-1]]
    elif isinstance(parent, list):
        del parent[_index(parent, parts[-1])]
    else:
        raise _unusable(f"remove operation does not apply: doc is missing path: {json.dumps(path)}: missing value")
    return root


def json_patch(target: Any, operations: Any) -> Any:
    """RFC 6902."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: a JSON patch must be a list")
    if len(operations) > MAX_OPERATIONS:
        raise Refused(
            413,
            "RequestEntityTooLarge",
            f"The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {len(operations)}",
        )
    root = copy.deepcopy(target)
    copied = 0
    for operation in operations:
        if not isinstance(operation, dict):
            raise bad_request("error decoding patch: an operation must be an object")
        if operation.get("op") == "copy":
            # A few copies of a thing into itself fill every memory.
            copied += size(_get(root, _pointer(operation.get("from")), operation["from"]))
            if copied > MAX_SIZE:
                raise _unusable(f"the copies are larger than {MAX_SIZE} bytes together")
        root = _operate(root, operation)
    check_depth(root)
    return root


def _operate(root: Any, operation: Object) -> Any:
    name, path = operation.get("op"), operation.get("path", "")
    parts = _pointer(path)
    if name in ("add", "replace", "test") and "value" not in operation:
        if name != "test":
            raise _unusable(f"{name} operation of {path} has no value")
        operation = {**operation, "value": None}
    if name == "add":
        return _add(root, parts, copy.deepcopy(operation["value"]), path)
    if name == "remove":
        return _remove(root, parts, path)
    if name == "replace":
        _get(root, parts, path)
        if parts and isinstance(parent := _get(root, parts[:-1], path), list):
            parent[_index(parent, parts[-1])] = copy.deepcopy(operation["value"])
            return root
        return _add(root, parts, copy.deepcopy(operation["value"]), path)
    if name in ("move", "copy"):
        source = _pointer(operation.get("from"))
        value = copy.deepcopy(_get(root, source, operation["from"]))
        if name == "move":
            if parts[: len(source)] == source and parts != source:
                raise _unusable(f"can't move {operation['from']} into itself")
            root = _remove(root, source, operation["from"])
        return _add(root, parts, value, path)
    if name == "test":
        try:
            value = _get(root, parts, path)
        except Refused:
            value = None
        if not _equal(value, operation["value"]):
            raise _unusable(f"testing value {path} failed")
        return root
    raise _unusable(f"unexpected kind: {json.dumps(name)}")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return same(one, other)
