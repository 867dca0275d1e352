"""Label and field selectors: parsed once, matched often."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evertrain.embedded.schema.errors import bad_request
from evertrain.embedded.schema.kinds import Resource
from evertrain.embedded.schema.names import label_value_problem, qualified_name_problem
from evertrain.kube.port import Object

_TOKEN = re.compile(r"\s*(==|!=|=|!|\(|\)|,|<|>|[^\s=!(),<>]+)")


@dataclass(frozen=True)
class Requirement:
    """One term of a label selector."""

    key: str
    operator: str
    """`in`, `notin`, `exists`, `!`, `gt` or `lt`."""
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        present = self.key in labels
        if self.operator == "in":
            return present and labels[self.key] in self.values
        if self.operator == "notin":
            return not present or labels[self.key] not in self.values
        if self.operator == "exists":
            return present
        if self.operator == "!":
            return not present
        try:
            have, bound = int(labels[self.key]), int(next(iter(self.values)))
        except (KeyError, ValueError):
            return False
        return have > bound if self.operator == "gt" else have < bound


class _Tokens:
    def __init__(self, text: str) -> None:
        self.items: list[str] = []
        text = text.rstrip()
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise bad_request(f"unable to parse requirement: unexpected character in {text!r}")
            self.items.append(found.group(1))
            at = found.end()
        self.at = 0

    def peek(self) -> str:
        return self.items[self.at] if self.at < len(self.items) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token


def _word(token: str) -> bool:
    return bool(token) and token not in ("=", "==", "!=", "!", "(", ")", ",", "<", ">")


@dataclass(frozen=True)
class LabelSelector:
    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def parse(cls, text: str) -> LabelSelector:
        """From the query form: `a=b,c!=d,e in (f,g),h,!i`. Raises Refused (400)."""
        tokens = _Tokens(text)
        found: list[Requirement] = []
        while tokens.peek():
            found.append(cls._requirement(tokens))
            following = tokens.take()
            if following == "," and not tokens.peek():
                raise bad_request("unable to parse requirement: found '', expected: identifier after ','")
            if following not in ("", ","):
                raise bad_request(f"unable to parse requirement: found '{following}', expected: ',' or 'end of string'")
        return cls(tuple(found))

    @staticmethod
    def _requirement(tokens: _Tokens) -> Requirement:
        negated = tokens.peek() == "!"
        if negated:
            tokens.take()
        key = tokens.take()
        if not _word(key):
            raise bad_request(
                f"unable to parse requirement: found '{key}', expected: !, identifier, or 'end of string'"
            )
        problem = qualified_name_problem(key)
        if problem:
            raise bad_request(f'unable to parse requirement: key: Invalid value: "{key}": {problem}')
        following = tokens.peek()
        if negated or following in ("", ","):
            return Requirement(key, "!" if negated else "exists")
        operator = tokens.take()
        if operator in ("in", "notin"):
            values = LabelSelector._values(tokens)
            for value in sorted(values):
                LabelSelector._check(key, value)
            return Requirement(key, operator, values)
        if operator not in ("=", "==", "!=", "<", ">"):
            raise bad_request(
                f"unable to parse requirement: found '{operator}', expected: in, notin, =, ==, !=, gt, lt"
            )
        value = tokens.take() if _word(tokens.peek()) else ""
        if operator in ("<", ">"):
            if not re.fullmatch(r"-?\d+", value):
                raise bad_request(
                    f'unable to parse requirement: values[0][{key}]: Invalid value: "{value}": '
                    "for 'Gt', 'Lt' operators, the value must be an integer"
                )
            return Requirement(key, "gt" if operator == ">" else "lt", frozenset({value}))
        LabelSelector._check(key, value)
        return Requirement(key, "notin" if operator == "!=" else "in", frozenset({value}))

    @staticmethod
    def _check(key: str, value: str) -> None:
        problem = label_value_problem(value)
        if problem:
            raise bad_request(f'unable to parse requirement: values[0][{key}]: Invalid value: "{value}": {problem}')

    @staticmethod
    def _values(tokens: _Tokens) -> frozenset[str]:
        if tokens.take() != "(":
            raise bad_request("unable to parse requirement: found no '(' after in or notin")
        values: set[str] = set()
        expecting = True
        while True:
            token = tokens.take()
            if token == "":
                raise bad_request("unable to parse requirement: found '', expected: ',', or ')'")
            if token == ")":
                if expecting:
                    values.add("")
                return frozenset(values)
            if token == ",":
                if expecting:
                    values.add("")
                expecting = True
            elif _word(token) and expecting:
                values.add(token)
                expecting = False
            else:
                raise bad_request(f"unable to parse requirement: found '{token}', expected: ',', or ')'")

    @classmethod
    def of(cls, selector: Object) -> LabelSelector:
        """From the form inside objects: `{matchLabels: …, matchExpressions: …}`."""
        found = [
            Requirement(key, "in", frozenset({value})) for key, value in (selector.get("matchLabels") or {}).items()
        ]
        operators = {"In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "!", "Gt": "gt", "Lt": "lt"}
        for expression in selector.get("matchExpressions") or ():
            operator = operators.get(expression.get("operator", ""))
            if operator is None:
                raise bad_request(f'"{expression.get("operator")}" is not a valid label selector operator')
            found.append(Requirement(expression["key"], operator, frozenset(expression.get("values") or ())))
        return cls(tuple(found))

    def matches(self, labels: Mapping[str, str] | None) -> bool:
        return all(requirement.matches(labels or {}) for requirement in self.requirements)

    def __bool__(self) -> bool:
        return bool(self.requirements)


_COMMON = ("metadata.name", "metadata.namespace")
SELECTABLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("", "Pod"): (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    ),
    ("", "Node"): ("spec.unschedulable",),
    ("", "Namespace"): ("status.phase",),
    ("", "Secret"): ("type",),
    ("", "Service"): ("spec.clusterIP", "spec.type"),
    ("", "Event"): (
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
    ("events.k8s.io", "Event"): (
        "regarding.kind",
        "regarding.namespace",
        "regarding.name",
        "regarding.uid",
        "regarding.apiVersion",
        "regarding.resourceVersion",
        "regarding.fieldPath",
        "reason",
        "reportingController",
        "type",
    ),
}


def _value(item: Object, path: str) -> str:
    if path == "source" and isinstance(item.get("source"), dict):
        return str(item["source"].get("component") or item.get("reportingComponent") or "")
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, bool) or (value is None and path in ("spec.unschedulable", "spec.hostNetwork")):
        return "true" if value else "false"
    return "" if value is None else str(value)


@dataclass(frozen=True)
class FieldSelector:
    terms: tuple[tuple[str, bool, str], ...] = ()
    """Path, whether equal is wanted, value."""

    @classmethod
    def parse(cls, text: str, resource: Resource) -> FieldSelector:
        """Raises Refused (400) for what can't be read and for fields that this kind doesn't offer."""
        known = {
            *_COMMON,
            *SELECTABLE.get((resource.group, resource.kind), ()),
            *(path.lstrip(".") for path in resource.selectable),
        }
        terms: list[tuple[str, bool, str]] = []
        for part in re.split(r"(?<!\\),", text):
            if not part.strip():
                continue
            found = re.match(r"\s*([^=!\s]+)\s*(==|!=|=)(.*)$", part, re.S)
            if found is None:
                raise bad_request(f"invalid selector: '{part}'; can't understand '{part}'")
            path, operator, value = found.groups()
            if path not in known:
                # kubectl says in front of it what it was looking for. Kinds without own fields have another text.
                if resource.custom or (resource.group, resource.kind) in SELECTABLE:
                    raise bad_request(f"field label not supported: {path}")
                raise bad_request(f'"{path}" is not a known field selector: only "metadata.name", "metadata.namespace"')
            terms.append((path, operator != "!=", re.sub(r"\\([\\,=])", r"\1", value.strip())))
        return cls(tuple(terms))

    def matches(self, item: Object) -> bool:
        return all((_value(item, path) == value) is equal for path, equal, value in self.terms)

    def required(self, path: str) -> str | None:
        """The value that this field must have, if the selector says so: lists by name or node can be quick."""
        for term, equal, value in self.terms:
            if term == path and equal:
                return value
        return None

    def __bool__(self) -> bool:
        return bool(self.terms)
