"""Every share of every step has exactly one carrier, whoever is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.mindio import shares


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_all_shares_are_carried_once_and_evenly(job: tuple[int, set[int]]) -> None:
    world_size, members = job
    dealt = shares.deal(world_size, list(members))
    assert set(dealt) == members
    assert sorted(share for carried in dealt.values() for share in carried) == list(range(world_size))
    counts = {len(carried) for carried in dealt.values()}
    assert max(counts) - min(counts) <= 1
    assert max(counts) == shares.rounds(world_size, list(members))
    assert all(rank in carried for rank, carried in dealt.items())
    assert all(carried[-1] == 0 for carried in dealt.values() if 0 in carried)


def test_with_everybody_there_nobody_carries_anything_more() -> None:
    assert shares.deal(3, [0, 1, 2]) == {0: (0,), 1: (1,), 2: (2,)}


@pytest.mark.parametrize("members", [[], [1, 1], [4], [-1, 0]])
def test_nonsense_is_refused(members: list[int]) -> None:
    with pytest.raises(ValueError):
        shares.deal(4, members)
