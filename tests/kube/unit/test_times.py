from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from evertrain.kube.times import parse_time

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    "text, microseconds",
    [
        ("2026-01-02T03:04:05Z", 0),
        ("2026-01-02T03:04:05+00:00", 0),
        ("2026-01-02T05:04:05+02:00", 0),
        ("2026-01-02T03:04:05.5Z", 500_000),
        ("2026-01-02T03:04:05.000006Z", 6),
        ("2026-01-02T03:04:05.123456789Z", 123_456),
        ("2026-01-02T01:04:05.1234-02:00", 123_400),
    ],
)
def test_all_that_kubernetes_writes(text: str, microseconds: int) -> None:
    assert parse_time(text) == MOMENT + timedelta(microseconds=microseconds)


@pytest.mark.parametrize("text", ["", "Z", "now", "2026-01-02T03:04:05.Z", "2026-01-02T03:04:05ZZ", "None"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time(text)
