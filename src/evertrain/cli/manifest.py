"""Objects in a YAML file, and in which line each field stands.

An API server names the field that it refuses; people look for it in a file. The tree that the YAML parser makes before
the objects still knows the lines, so both are kept.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LIMIT = 3 * 1024 * 1024  # what an API server takes in one request
_MANY = 200_000  # nodes, with all aliases written out
_DEEP = 200


class ManifestError(Exception):
    """The file is not what it should be. The text names file, line and field."""

    def __init__(self, source: str, line: int | None, what: str, field: str = "") -> None:
        place = source if line is None else f"{source}, line {line}"
        super().__init__(f"{place}: {field}: {what}" if field else f"{place}: {what}")
        self.line, self.field = line, field


@dataclass(frozen=True)
class Document:
    """One object of a file."""

    source: str
    object: dict[str, Any]
    node: yaml.Node

    @property
    def line(self) -> int:
        return int(self.node.start_mark.line) + 1

    def line_of(self, field: str) -> int:
        """The line of a field, written as Kubernetes writes it; of its nearest parent if it isn't there."""
        node, line, rest = self.node, self.line, field.strip()
        while rest and (step := _step(node, rest)):
            node, line, rest = step
        return line

    def refuse(self, field: str, what: str) -> ManifestError:
        return ManifestError(self.source, self.line_of(field), what, field)


def read(path: str) -> list[Document]:
    """The objects of a file; `-` is standard input."""
    source = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read(LIMIT + 1) if path == "-" else _read(Path(path))
    except OSError as error:
        raise ManifestError(source, None, f"cannot be read: {error.strerror}") from None
    if len(data) > LIMIT:
        raise ManifestError(source, None, f"larger than {LIMIT // 1024 // 1024} MiB, which no API server takes")
    try:
        return parse(data.decode(), source)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ManifestError(source, line, "not a text file in UTF-8") from None


def parse(text: str, source: str) -> list[Document]:
    found: list[Document] = []
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            node = loader.get_node()
            if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
                continue  # nothing between two lines of dashes
            found.append(_document(loader, node, source))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ManifestError(source, mark.line + 1 if mark else None, f"not YAML: {what}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ManifestError(source, line, f"not YAML: {error.reason}") from None
    except RecursionError:
        raise ManifestError(source, None, "nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()
    return found


def blame(reason: str, message: str) -> str:
    """The field that one of the operator's validations speaks of."""
    kind = re.match(r"(?:replicaType is )?(\w+)", message)
    replica = f"spec.replicaSpecs.{kind[1]}" if kind and kind[1][:1].isupper() else "spec.replicaSpecs"
    containers = f"{replica}.template.spec.containers"
    if reason == "InvalidReplicaSpec":
        return containers if "containers" in message else f"{replica}.replicas" if "replicas" in message else replica
    return {
        "InvalidScalingConfig": "metadata.labels",
        "InvalidScaleOutConfig": "metadata.labels.scaleout-type",
        "InvalidFramework": "metadata.labels.framework",
        "InvalidSuccessPolicy": "spec.successPolicy",
        "InvalidQueue": "spec.runPolicy.schedulingPolicy.queue",
        "InvalidReplicaType": replica,
        "InvalidContainer": containers,
    }.get(reason, "spec.replicaSpecs")


def blamed(message: str) -> list[tuple[str, str]]:
    """Fields that the text of a refusal names, and what it says of each."""
    strict = [(field, what) for what, field in re.findall(r'((?:unknown|duplicate) field "([^"]+)")', message)]
    named = re.findall(r"(?:^|[\s:,(])((?:spec|metadata|status)(?:\.[\w/-]+|\[[^\]]*\])+)", message)
    return strict or [(field, message) for field in dict.fromkeys(named)]


def _document(loader: yaml.SafeLoader, node: yaml.Node, source: str) -> Document:
    _check_size(node, source)
    for key in _duplicates(node):
        raise ManifestError(source, key.start_mark.line + 1, f"{key.value} is given twice in the same place")
    found = loader.construct_document(node)
    line = node.start_mark.line + 1
    if not isinstance(found, dict):
        raise ManifestError(source, line, "an object is a mapping with apiVersion, kind and metadata")
    document = Document(source, found, node)
    for field in ("apiVersion", "kind"):
        if not isinstance(found.get(field), str) or not found[field]:
            raise ManifestError(source, document.line_of(field), "is missing or not a string", field)
    metadata = found.get("metadata")
    if not isinstance(metadata, dict):
        raise ManifestError(source, document.line_of("metadata"), "is missing or not a mapping", "metadata")
    if not any(isinstance(metadata.get(key), str) and metadata[key] for key in ("name", "generateName")):
        raise ManifestError(source, document.line_of("metadata.name"), "is missing or not a string", "metadata.name")
    return document


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LIMIT + 1)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_size(root: yaml.Node, source: str) -> None:
    """Aliases can write down a tree that is astronomically larger than the file, or one without an end."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def measure(node: yaml.Node, depth: int) -> int:
        line = node.start_mark.line + 1
        if id(node) in open_nodes:
            raise ManifestError(source, line, "an alias that contains itself")
        if depth > _DEEP:
            raise ManifestError(source, line, f"nested more than {_DEEP} levels deep")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            sizes[id(node)] = 1 + sum(measure(child, depth + 1) for child in _children(node))
            open_nodes.remove(id(node))
        if sizes[id(node)] > _MANY:
            raise ManifestError(source, line, f"more than {_MANY} values with all aliases written out")
        return sizes[id(node)]

    measure(root, 0)


def _duplicates(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    yield key
                seen.add(key.value)
    for child in _children(node):
        yield from _duplicates(child)


def _step(node: yaml.Node, rest: str) -> tuple[yaml.Node, int, str] | None:
    """One step along a field's path: where it leads, the line there and what is left of the path."""
    rest = rest.removeprefix(".")
    bracket = re.match(r"\[\"?([^\]\"]*)\"?\]", rest)
    if isinstance(node, yaml.SequenceNode):
        if bracket and bracket[1].isdigit() and int(bracket[1]) < len(node.value):
            child = node.value[int(bracket[1])]
            return child, child.start_mark.line + 1, rest[bracket.end() :]
        return None
    if not isinstance(node, yaml.MappingNode):
        return None
    # Keys may contain dots themselves: the longest one that fits is meant.
    for key, value in sorted(node.value, key=lambda pair: -len(str(pair[0].value))):
        if not isinstance(key, yaml.ScalarNode):
            continue
        name, line = key.value, key.start_mark.line + 1
        if bracket and bracket[1] == name:
            return value, line, rest[bracket.end() :]
        if rest == name or rest.startswith((f"{name}.", f"{name}[")):
            return value, line, rest[len(name) :]
    return None
