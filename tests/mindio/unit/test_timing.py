from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.mindio.timing import Timing, TimingError


@given(st.floats(0.05, 600))
def test_every_bound_gives_a_consistent_set(bound: float) -> None:
    timing = Timing.derive(bound)
    timing.check()
    assert timing.heartbeat < timing.bound <= timing.group


@pytest.mark.parametrize("bound", [0, -1, float("nan")])
def test_a_bound_must_be_positive(bound: float) -> None:
    with pytest.raises(TimingError, match="positive"):
        Timing.derive(bound)


def test_an_override_that_contradicts_is_refused_with_the_reason() -> None:
    with pytest.raises(TimingError, match=r"heartbeat \(3 s\) must not exceed silence \(2 s\): a healthy agent"):
        Timing.derive(2, heartbeat=3, silence=2)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TimingError, match="no timeout called 'hartbeat'.*heartbeat"):
        Timing.derive(2, hartbeat=1)


def test_a_repair_gets_time_for_its_bytes() -> None:
    timing = Timing.derive(2)
    assert timing.repair_time(10**9) == timing.repair + 20


@pytest.mark.parametrize(("nnodes", "heartbeat"), [(1, 0.5), (20, 0.5), (1250, 31.25)])
def test_the_beats_of_many_nodes_are_no_load(nnodes: int, heartbeat: float) -> None:
    timing = Timing.derive(2.0, nnodes)
    assert timing.heartbeat == heartbeat and 4 * heartbeat <= timing.silence < timing.takeover
