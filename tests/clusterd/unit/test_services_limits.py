"""Rates, connections, tokens: on a clock that the test turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.clusterd.services.limits import HEALTH_CHECK, Bucket, Connections, Limits, Rates, exceeded
from evertrain.clusterd.services.tokens import Tokens


def test_all_calls_share_a_thousand_a_second_and_health_checks_have_their_own() -> None:
    rates = Rates(Limits())
    methods = ["/Recover/Init", "/fault.Fault/Register"]
    assert sum(rates.admits(methods[number % 2], 5.0) for number in range(3000)) == 1000
    assert sum(rates.admits(HEALTH_CHECK, 5.0) for _ in range(20_000)) == 10_000
    assert sum(rates.admits("/Recover/Init", 5.5) for _ in range(3000)) == 500
    assert sum(rates.admits("/Recover/Init", 1000.0) for _ in range(3000)) == 1000, "no more than that are saved up"
    assert exceeded("/Recover/Init") == "qps exceeded, method=/Recover/Init"


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = Bucket(1, 1)
    assert bucket.take(100.0)
    assert not bucket.take(50.0)
    assert not bucket.take(100.5)
    assert bucket.take(101.0)


def test_fifty_may_wait_for_a_query() -> None:
    bucket = Bucket(10, 10)
    waits = [bucket.reserve(0.0, 5.0) for _ in range(100)]
    assert [wait for wait in waits if wait == 0] == [0.0] * 10
    assert sum(wait is not None and wait > 0 for wait in waits) == 50
    assert max(wait for wait in waits if wait is not None) == pytest.approx(5.0)
    assert bucket.reserve(1.0, 5.0) == pytest.approx(4.1), "room for ten more after a second"


@given(st.lists(st.floats(0, 10), max_size=200), st.floats(0.5, 20), st.integers(1, 30))
def test_never_more_than_burst_and_rate(times: list[float], rate: float, burst: int) -> None:
    bucket = Bucket(rate, burst)
    taken = [now for now in sorted(times) if bucket.take(now)]
    for begin in range(len(taken)):
        for end in range(begin, len(taken)):
            assert end - begin + 1 <= burst + (taken[end] - taken[begin]) * rate + 1e-6


def test_connections_of_all_and_of_one_source() -> None:
    connections = Connections(Limits(connections=4, connections_of_source=2))
    assert [connections.enter("a") for _ in range(2)] == ["", ""]
    assert "it has 2 connections" in connections.enter("a")
    assert [connections.enter(source) for source in "bc"] == ["", ""]
    assert "there are 4 connections" in connections.enter("d")
    connections.leave("a")
    assert connections.enter("d") == ""
    for source in "abcd":
        connections.leave(source)
    assert connections.total == 0


def test_tokens_are_of_one_job_or_of_the_platform() -> None:
    tokens = Tokens([b"0123456789abcdef"])
    assert tokens.is_of_job(tokens.job("one"), "one") and tokens.is_of_platform(tokens.platform())
    for token in ("", "é", tokens.platform(), tokens.job("two"), tokens.job("one")[:-1], tokens.job("one") + "0"):
        assert not tokens.is_of_job(token, "one")
    assert not tokens.is_of_platform(tokens.job("platform"))
    assert not tokens.is_of_platform(tokens.job(""))
    assert len(tokens.job("one")) == 64
    assert "0123" not in repr(tokens) and "0123" not in str(vars(tokens).keys())


def test_a_secret_is_changed_while_jobs_run() -> None:
    old, new = Tokens.read(b"the old secret 0123\n"), Tokens.read(b"the new secret 0123\n\nthe old secret 0123\n")
    assert new.is_of_job(old.job("one"), "one") and new.is_of_platform(old.platform())
    assert new.job("one") != old.job("one")
    assert not old.is_of_job(new.job("one"), "one")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"short", b"long enough to be one\nshort"])
def test_secrets_that_are_none(content: bytes) -> None:
    with pytest.raises(ValueError, match="secret") as found:
        Tokens.read(content)
    assert "short" not in str(found.value)
