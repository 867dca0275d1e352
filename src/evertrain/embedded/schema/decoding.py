"""Request bodies into objects, noticing what a plain parser lets pass: keys given twice, depth, non-finite numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import yaml

from evertrain.embedded.schema.errors import bad_request

MAX_DEPTH = 200
"""Deeper than any object that somebody means. Everything after this is free to recurse."""


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


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def load_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader


def _find(value: Any, path: str, depth: int, found: list[str]) -> None:
    if depth > MAX_DEPTH:
        raise bad_request(f"the object is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        for key in getattr(value, "twice", ()):
            found.append(f"{path}.{key}" if path else key)
        for key, item in value.items():
            _find(item, f"{path}.{key}" if path else str(key), depth + 1, found)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _find(item, f"{path}[{index}]", depth + 1, found)


def decode(body: bytes, content_type: str = "application/json") -> Decoded:
    """Raises Refused (400) if it can't be read. YAML for `application/yaml` and server-side apply."""
    kind = content_type.partition(";")[0].strip()
    try:
        text = body.decode("utf-8")
        # kubectl sends JSON also where it says YAML, and the parser of YAML is slow.
        if kind.endswith("yaml") and not text.lstrip().startswith("{"):
            value = load_yaml(text)
        else:
            value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_constant)
    except RecursionError:
        raise bad_request(f"the object is nested more than {MAX_DEPTH} levels deep") from None
    except (ValueError, yaml.YAMLError) as error:
        raise bad_request(f"the object provided is unrecognized: {error}") from None
    if not isinstance(value, dict | list):
        raise bad_request("the object provided is unrecognized: it must be an object")
    found: list[str] = []
    _find(value, "", 0, found)
    return Decoded(value, found)
