"""Request bodies into objects, noticing what a plain parser lets pass and other clients could not read again: keys that
are given twice, depth, numbers beyond all bounds, half characters."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import yaml

from evertrain.embedded.schema.errors import Refused, bad_request

MAX_DEPTH = 200
"""Deeper than any object that somebody means. Everything after this is free to recurse."""
MAX_SIZE = 3 << 20
"""Bytes of a request, and of the object that patches make."""
_LARGEST = 2**64 - 1
_WHOLE = 1e21
"""Kubernetes writes whole numbers up to here without a point."""


@dataclass(frozen=True)
class Decoded:
    value: Any
    """The object (or, for a JSON patch, the list)."""
    duplicates: list[str] = field(default_factory=list)
    """Paths of fields that were given twice; the last one counts."""


class _Twice(dict[str, Any]):
    """A mapping that remembers which keys came again."""

    twice: tuple[str, ...] = ()


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) == len(pairs):
        return dict(pairs)
    seen: set[str] = set()
    again: list[str] = []
    for key, _ in pairs:
        if key in seen and key not in again:
            again.append(key)
        seen.add(key)
    made = _Twice(pairs)
    made.twice = tuple(again)
    return made


def _no_constant(text: str) -> Any:
    raise ValueError(f"invalid character '{text[0]}' looking for beginning of value")


def _number(text: str) -> float | int:
    """3.0 is 3: clients that expect an integer read no other form."""
    number = float(text)
    return int(number) if math.isfinite(number) and number.is_integer() and abs(number) < _WHOLE else number


class _Loader(yaml.SafeLoader):
    """YAML as kubectl reads it: no dates (they stay text), and keys are text.

    Aliases are refused: with them a small text makes a huge object, and clients resolve them before they send.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("anchors and aliases are not supported")
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    loader.flatten_mapping(node)
    return _pairs(
        [(_key(loader.construct_object(k, deep=True)), loader.construct_object(v, deep=True)) for k, v in node.value]
    )


def _key(key: Any) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    if isinstance(key, str | int | float):
        return str(key)
    raise yaml.YAMLError(f"unsupported map key of type {type(key).__name__}")


def _yaml_number(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    return _number(str(loader.construct_yaml_float(node)))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:float", _yaml_number)


def load_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader


def size(value: Any) -> int:
    """In bytes, as it is stored and sent."""
    return len(msgspec.json.encode(value))


def check_size(value: Any) -> None:
    """Raises Refused (413): request by request an object could grow until nobody can read it."""
    if size(value) > MAX_SIZE:
        raise Refused(413, "RequestEntityTooLarge", f"Request entity too large: limit is {MAX_SIZE}")


def check_depth(value: Any) -> None:
    """Raises Refused (400) if an object is too deep."""
    _find(value, "", 0, [])


def _find(value: Any, path: str, depth: int, found: list[str]) -> None:
    """Collects keys that were given twice. Raises Refused for what nobody could read again."""
    if depth > MAX_DEPTH:
        raise bad_request(f"the object is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        for key in getattr(value, "twice", ()):
            found.append(f"{path}.{key}" if path else key)
        for key, item in value.items():
            _check_text(key, path)
            _find(item, f"{path}.{key}" if path else str(key), depth + 1, found)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _find(item, f"{path}[{index}]", depth + 1, found)
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int | float) and not _in_range(value):
        raise bad_request(f"the object provided is unrecognized: {path}: the number is out of range")


def _in_range(number: int | float) -> bool:
    return math.isfinite(number) if isinstance(number, float) else -_LARGEST <= number <= _LARGEST


def _check_text(text: str, path: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(
            f"the object provided is unrecognized: {path or 'object'}: half of a surrogate pair is no character"
        ) from None


def decode(body: bytes, content_type: str = "application/json") -> Decoded:
    """Raises Refused (400) if it can't be read. YAML for `application/yaml` and server-side apply. (kubectl sends JSON
    also where it says YAML, and that is read far more quickly as what it is.)"""
    kind = content_type.partition(";")[0].strip()
    try:
        text = body.decode("utf-8")
        if kind.endswith("yaml"):
            value = load_yaml(text)
        else:
            value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_constant, parse_float=_number)
    except RecursionError:
        raise bad_request(f"the object is nested more than {MAX_DEPTH} levels deep") from None
    except (ValueError, yaml.YAMLError) as error:
        raise bad_request(f"the object provided is unrecognized: {error}") from None
    if not isinstance(value, dict | list):
        raise bad_request("the object provided is unrecognized: it must be an object")
    found: list[str] = []
    _find(value, "", 0, found)
    return Decoded(value, found)
