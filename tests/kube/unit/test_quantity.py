"""Amounts of resources: Kubernetes' forms, exact sums, and no amount that takes for ever."""

from __future__ import annotations

from decimal import Decimal

import pytest

from evertrain.kube import quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (2, "2"),
        ("500m", "0.5"),
        ("16Gi", str(16 * 2**30)),
        ("1.5k", "1500"),
        ("2e3", "2000"),
        ("2E-1", "0.2"),
        ("3E", str(3 * 10**18)),
        ("100n", "0.0000001"),
        ("-1", "-1"),
        (".5", "0.5"),
        ("1e999999999", str(2**63 - 1)),
        ("-1e999999999", str(-(2**63 - 1))),
        ("9" * 1000, str(2**63 - 1)),
    ],
)
def test_parse(text: object, value: str) -> None:
    assert quantity.parse(text) == Decimal(value)


def test_next_to_nothing() -> None:
    assert 0 <= quantity.parse("1e-999999999") < Decimal("1e-20")


@pytest.mark.parametrize("text", ["", "abc", "1Gib", "1 Gi", "--1", "1e", "Gi", None, [], "0x1"])
def test_no_amount(text: object) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity.parse(text)


def test_sum() -> None:
    assert quantity.total([{"cpu": "500m", "a": 1}, {"cpu": "1", "memory": "1Gi"}, {"a": "2"}, {"cpu": "500m"}]) == {
        "a": "3",
        "cpu": "2",
        "memory": "1073741824",
    }
    assert quantity.total([{"cpu": "1m"}, {"cpu": "1u"}]) == {"cpu": "2m"}
    assert quantity.total([{"cpu": "1.2.3"}, {"cpu": "1"}]) == {"cpu": "1"}
