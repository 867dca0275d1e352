"""The JSONPath of printer columns and scale paths: fields, indexes, slices, wildcards, filters. Parsed once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union

Step = Union["_Field", "_Slice", "_Filter", "_Everything", "_Recursive"]

_LONGEST = 1000
"""Characters of a path: more than anybody writes, and few enough for the expressions below."""
_FIELD = re.compile(r"(?:\\.|[^.\[\]\\(){}'\"\s])+")
_SLICE = re.compile(r"(-?\d+)?(?::(-?\d+)?)?(?::(-?\d+)?)?")
_FILTER = re.compile(
    r"\?\(\s*@(?P<path>(?:[^=!<>~\s\\]|\\.)*)\s*(?:(?P<operator>==|!=|<=|>=|<|>)\s*(?P<value>\S(?:.*\S)?))?\s*\)"
)


@dataclass(frozen=True)
class _Field:
    name: str

    def of(self, value: Any) -> Iterator[Any]:
        if isinstance(value, dict) and self.name in value:
            yield value[self.name]


@dataclass(frozen=True)
class _Slice:
    start: int | None
    stop: int | None
    step: int | None
    single: bool

    def of(self, value: Any) -> Iterator[Any]:
        if not isinstance(value, list):
            return
        if self.single:
            index = self.start or 0
            if -len(value) <= index < len(value):
                yield value[index]
        else:
            yield from value[self.start : self.stop : self.step]


@dataclass(frozen=True)
class _Everything:
    def of(self, value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list):
            yield from value


@dataclass(frozen=True)
class _Recursive:
    name: str

    def of(self, value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            if self.name in value:
                yield value[self.name]
            for item in value.values():
                yield from self.of(item)
        elif isinstance(value, list):
            for item in value:
                yield from self.of(item)


@dataclass(frozen=True)
class _Filter:
    path: JSONPath
    operator: str
    wanted: Any

    def of(self, value: Any) -> Iterator[Any]:
        items = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
        for item in items:
            found = self.path.find(item)
            if not self.operator:
                if found:
                    yield item
            elif found and self._holds(found[0]):
                yield item

    def _holds(self, value: Any) -> bool:
        if self.operator == "==":
            return bool(value == self.wanted)
        if self.operator == "!=":
            return bool(value != self.wanted)
        try:
            if self.operator == "<":
                return bool(value < self.wanted)
            if self.operator == "<=":
                return bool(value <= self.wanted)
            if self.operator == ">":
                return bool(value > self.wanted)
            return bool(value >= self.wanted)
        except TypeError:
            return False


@dataclass(frozen=True)
class JSONPath:
    steps: tuple[Step, ...]

    @classmethod
    def parse(cls, text: str) -> JSONPath:
        """Raises ValueError. Accepts also the form in braces, `{.spec.x}`."""
        text = text.strip()
        if text.startswith("{") and text.endswith("}"):
            text = text[1:-1].strip()
        if not text:
            raise ValueError("must not be empty")
        if len(text) > _LONGEST:
            raise ValueError(f"must not be longer than {_LONGEST} characters")
        text = text.removeprefix("$")
        if text and text[0] not in ".[":
            text = "." + text
        steps: list[Step] = []
        at = 0
        while at < len(text):
            step, at = cls._step(text, at)
            if step is not None:
                steps.append(step)
        return cls(tuple(steps))

    @staticmethod
    def _step(text: str, at: int) -> tuple[Step | None, int]:
        if text[at] == "[":
            end = _closing(text, at)
            return _bracket(text[at + 1 : end].strip()), end + 1
        if text[at] != ".":
            raise ValueError(f"unexpected {text[at]!r} at {at} in {text!r}")
        recursive = text.startswith("..", at)
        at += 2 if recursive else 1
        if at >= len(text) or text[at] == "[":
            return None, at
        if text[at] == "*":
            return _Everything(), at + 1
        found = _FIELD.match(text, at)
        if found is None:
            raise ValueError(f"a field name is missing at {at} in {text!r}")
        name = re.sub(r"\\(.)", r"\1", found.group())
        return (_Recursive(name) if recursive else _Field(name)), found.end()

    def find(self, item: Any) -> list[Any]:
        """Everything the path leads to."""
        values = [item]
        for step in self.steps:
            values = [found for value in values for found in step.of(value)]
        return values


def _closing(text: str, at: int) -> int:
    quote = ""
    depth = 0
    for index in range(at, len(text)):
        char = text[index]
        if quote:
            if char == quote and text[index - 1] != "\\":
                quote = ""
        elif char in "'\"":
            quote = char
        elif char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
            if not depth:
                return index
    raise ValueError(f"unterminated '[' in {text!r}")


def _bracket(inside: str) -> Step:
    if inside == "*":
        return _Everything()
    if inside[:1] in ("'", '"') and inside[-1:] == inside[:1] and len(inside) > 1:
        return _Field(inside[1:-1].replace("\\" + inside[0], inside[0]))
    if inside.startswith("?"):
        found = _FILTER.fullmatch(inside)
        if found is None:
            raise ValueError(f"can't read the filter [{inside}]")
        value = found["value"]
        path = JSONPath.parse(found["path"]) if found["path"] else JSONPath(())
        return _Filter(path, found["operator"] or "", _literal(value) if value is not None else None)
    found = _SLICE.fullmatch(inside)
    if found is None or not inside:
        raise ValueError(f"invalid array index [{inside}]")
    start, stop, step = (int(part) if part else None for part in found.groups())
    if step == 0:
        raise ValueError(f"step must be > 0 in [{inside}]")
    return _Slice(start, stop, step, ":" not in inside)


def _literal(text: str) -> Any:
    if text[:1] == "'" and text[-1:] == "'" and len(text) > 1:
        return text[1:-1]
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"can't read the value {text} in a filter") from None
