"""Quantities in objects: 500m, 2, 16Gi, 1e3."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from evertrain.kube import quantity

PROBLEM = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"


def parse_quantity(value: Any) -> Decimal:
    """Raises ValueError, in the words of Kubernetes, if it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(PROBLEM)
    try:
        return quantity.parse(value)
    except ValueError:
        raise ValueError(PROBLEM) from None


def canonical(value: Any) -> Any:
    """A quantity as text: a number in JSON means the same."""
    return value if isinstance(value, str | bool) else str(value)
