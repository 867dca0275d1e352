"""Quantities, and what a pod asks of a node. Pure.

Everything is counted in thousandths, so that `100m` of a processor and `1Ki` of memory are whole numbers and sums are
exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING
from typing import Any

from evertrain.kube import quantity

Amounts = dict[str, int]
"""Thousandths by resource name."""

PODS = "pods"


def thousandths(amount: object) -> int:
    """A quantity as Kubernetes writes it, rounded up to a thousandth. ValueError if it is none."""
    return int((quantity.parse(amount) * 1000).to_integral_value(ROUND_CEILING))


def amounts(quantities: Mapping[str, object] | None) -> Amounts:
    """What can't be read counts as nothing: admission has refused it, or the API server doesn't check it."""
    found: Amounts = {}
    for name, amount in (quantities or {}).items():
        try:
            found[name] = thousandths(amount)
        except ValueError:
            continue
    return found


def add(*terms: Mapping[str, int]) -> Amounts:
    total: Amounts = {}
    for term in terms:
        for name, amount in term.items():
            total[name] = total.get(name, 0) + amount
    return total


def subtract(left: Mapping[str, int], right: Mapping[str, int]) -> Amounts:
    return add(left, {name: -amount for name, amount in right.items()})


def largest(terms: Iterable[Mapping[str, int]]) -> Amounts:
    most: Amounts = {}
    for term in terms:
        for name, amount in term.items():
            most[name] = max(most.get(name, 0), amount)
    return most


def lacking(free: Mapping[str, int], wanted: Mapping[str, int]) -> list[str]:
    """The resources of which there is too little, by name."""
    return sorted(name for name, amount in wanted.items() if amount > 0 and free.get(name, 0) < amount)


def pod_requests(spec: Mapping[str, Any]) -> Amounts:
    """The sum of the containers, or the largest init container if that is more; a missing request is the limit.

    An init container that stays (restartPolicy Always) counts with the containers.
    """
    init = spec.get("initContainers") or []
    staying = [container for container in init if container.get("restartPolicy") == "Always"]
    passing = [container for container in init if container.get("restartPolicy") != "Always"]
    together = add(*(_requests(container) for container in [*(spec.get("containers") or []), *staying]))
    most = largest([together, *(_requests(container) for container in passing)])
    return add(most, amounts(spec.get("overhead")), {PODS: 1000})


def _requests(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources") or {}
    return amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})
