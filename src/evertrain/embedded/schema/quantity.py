"""Quantities: 500m, 2, 16Gi, 1e3."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_QUANTITY = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))((?:[eE][+-]?\d{1,3})|Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE])?")
_FACTORS: dict[str, Decimal] = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(1000),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    **{name: Decimal(1024 ** (power + 1)) for power, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
}

PROBLEM = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"


def parse_quantity(value: Any) -> Decimal:
    """Raises ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(PROBLEM)
    found = _QUANTITY.fullmatch(str(value).strip())
    if found is None:
        raise ValueError(PROBLEM)
    number, suffix = found.group(1), found.group(2) or ""
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        return Decimal(number).scaleb(int(suffix[1:]))
    return Decimal(number) * _FACTORS[suffix]


def canonical(value: Any) -> Any:
    """A quantity as text: a number in JSON means the same."""
    return value if isinstance(value, str | bool) else str(value)
