"""Label selectors, node selectors, taints: whether something matches. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Labels = Mapping[str, str]


def matches_labels(selector: Mapping[str, Any] | None, labels: Labels) -> bool:
    """A LabelSelector. One that is absent matches nothing, an empty one everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _expression(expression, labels) for expression in selector.get("matchExpressions") or []
    )


def _expression(expression: Mapping[str, Any], labels: Labels) -> bool:
    key, operator = expression.get("key", ""), expression.get("operator", "")
    values: Sequence[str] = expression.get("values") or []
    value = labels.get(key)
    match operator:
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            try:
                number, bound = int(value or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return number > bound if operator == "Gt" else number < bound
    return False


def matches_node(spec: Mapping[str, Any], name: str, labels: Labels) -> bool:
    """The pod's nodeSelector and its required node affinity."""
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(_node_term(term, name, labels) for term in required.get("nodeSelectorTerms") or [])


def _node_term(term: Mapping[str, Any], name: str, labels: Labels) -> bool:
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    if not expressions and not fields:
        return False
    return all(_expression(expression, labels) for expression in expressions) and all(
        _expression(field, {"metadata.name": name}) for field in fields
    )


def untolerated(
    taints: Sequence[Mapping[str, str]], tolerations: Sequence[Mapping[str, Any]]
) -> Mapping[str, str] | None:
    """The first taint that keeps the pod away."""
    for taint in taints:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not any(tolerates(t, taint) for t in tolerations):
            return taint
    return None


def tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    key, operator = toleration.get("key", ""), toleration.get("operator") or "Equal"
    if key and key != taint.get("key"):
        return False
    if operator == "Exists":
        return True
    return bool(key) and operator == "Equal" and toleration.get("value", "") == taint.get("value", "")
