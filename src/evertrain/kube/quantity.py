"""Amounts of resources as Kubernetes writes them: 2, "500m", "16Gi". Pure."""

from __future__ import annotations

import re
from decimal import Decimal

_SUFFIXES = {
    **{
        suffix: Decimal(1000) ** power
        for power, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
    },
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}
LARGEST = Decimal(2**63 - 1)
"""Kubernetes has no larger amounts. Who writes 1e999999999 must not make us count that far."""
MAX_POWER = 30
_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)")


def parse(amount: object) -> Decimal:
    """The amount as a number. Raises ValueError if it is none."""
    found = _FORM.fullmatch(str(amount))
    if found is None:
        raise ValueError(f"{amount!r} is no quantity")
    number, exponent, suffix = found.groups()
    power = max(-MAX_POWER, min(MAX_POWER, int(exponent[1:]))) if exponent else 0
    value = Decimal(number) * _SUFFIXES[suffix or ""] * Decimal(10) ** power
    return max(-LARGEST, min(LARGEST, value))


def lenient(amount: object) -> Decimal:
    """The same, and 0 for what is no amount: the API server will refuse the pod and say why."""
    try:
        return parse(amount)
    except ValueError:
        return Decimal(0)


def text(amount: Decimal) -> str:
    """The shortest exact form without a binary suffix; what is finer than a thousandth is rounded up."""
    if amount == amount.to_integral_value():
        return str(int(amount))
    thousandths = (amount * 1000).to_integral_value(rounding="ROUND_CEILING")
    return str(int(thousandths / 1000)) if thousandths % 1000 == 0 else f"{int(thousandths)}m"


def total(amounts: list[dict[str, object]]) -> dict[str, str]:
    """The sum by resource."""
    sums: dict[str, Decimal] = {}
    for each in amounts:
        for name, amount in each.items():
            sums[name] = sums.get(name, Decimal(0)) + lenient(amount)
    return {name: text(amount) for name, amount in sorted(sums.items())}
