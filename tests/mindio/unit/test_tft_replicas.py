"""The arithmetic of replicas; the table is that of the original's documentation, worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.mindio.tft.numbers import RepairType
from evertrain.mindio.tft.replicas import (
    Copy,
    Group,
    Unit,
    dump_choice,
    full_copy,
    insane,
    isolate,
    load_plan,
    participants,
    repair_plan,
    savers,
    sources,
)


def healthy(group: Group, lost: set[int]) -> set[int]:
    return set(group.ranks) - lost


@pytest.mark.parametrize(
    "ranks, copies, lost, save, pairs",
    [
        ([0, 1, 2, 3], 2, {3}, [0, 1], {3: 1}),
        ([0, 1, 2, 3], 2, {0}, [2, 1], {0: 2}),
        ([0, 8, 16, 24], 2, {8, 16}, [0, 24], {8: 24, 16: 0}),
        ([0, 8, 16, 24], 2, {0, 16}, None, None),
        ([1, 3], 2, {1}, [3], {1: 3}),
        ([0, 2], 2, set(), [0], {}),
        ([0, 1, 2, 3, 4, 5], 3, {1, 3}, [0, 5], {1: 5, 3: 5}),
        ([0, 1, 2, 3], 1, {2}, None, None),
        ([3, 1, 0, 2], 2, {3}, [0, 1], {3: 1}),
    ],
)
def test_the_worked_examples(
    ranks: list[int], copies: int, lost: set[int], save: list[int] | None, pairs: dict[int, int] | None
) -> None:
    group = Group.of(ranks, copies)
    assert savers(group, healthy(group, lost)) == save
    assert sources(group, lost, healthy(group, lost)) == pairs


def test_with_all_copies_everywhere_the_first_usable_rank_of_each_group_saves() -> None:
    kinds = [[Group.of([0, 2], 2), Group.of([1, 3], 2)]]
    assert dump_choice(kinds, {0, 2, 3}) == {0: [(0, [0])], 3: [(0, [3])]}


def test_several_kinds_are_all_in_one_rank_s_order() -> None:
    kinds = [[Group.of([0, 1, 2, 3], 2)], [Group.of([0, 2], 2), Group.of([1, 3], 2)]]
    assert dump_choice(kinds, {0, 1, 2}) == {0: [(0, [0, 1]), (1, [0])], 1: [(0, [0, 1]), (1, [1])]}
    plan = repair_plan(kinds, {0: Copy.USABLE, 1: Copy.USABLE, 2: Copy.USABLE, 3: Copy.BAD})
    assert plan == {
        1: [Unit(1, 3, 0, RepairType.RT_SEND), Unit(1, 3, 1, RepairType.RT_SEND)],
        3: [Unit(1, 3, 0, RepairType.RT_RECV_REPAIR), Unit(1, 3, 1, RepairType.RT_RECV_REPAIR)],
    }
    assert plan is not None and participants(plan) == [1, 3]


def test_a_rebuilt_rank_is_told_so_and_a_kept_one_is_left_alone() -> None:
    kinds = [[Group.of(range(4), 2)]]
    plan = repair_plan(kinds, {0: Copy.USABLE, 1: Copy.USABLE, 2: Copy.REBUILD, 3: Copy.KEEP})
    assert plan == {
        0: [Unit(0, 2, 0, RepairType.RT_SEND)],
        2: [Unit(0, 2, 0, RepairType.RT_UCE_HIGHLEVEL)],
    }
    assert repair_plan(kinds, {rank: Copy.KEEP for rank in range(4)}) == {}


def test_a_kept_rank_is_no_source() -> None:
    kinds = [[Group.of(range(4), 2)]]
    assert repair_plan(kinds, {0: Copy.KEEP, 1: Copy.USABLE, 2: Copy.BAD, 3: Copy.USABLE}) is None


def test_without_a_full_copy_all_load() -> None:
    kinds = [[Group.of(range(4), 1)]]
    assert not full_copy(kinds, {0, 1, 2})
    plan = load_plan(kinds, rebuild={3})
    types = [plan[rank][0].repair_type for rank in range(4)]
    assert types == [RepairType.RT_LOAD_CKPT] * 3 + [RepairType.RT_LOAD_REBUILD]
    assert all(unit.source == unit.target == rank for rank, units in plan.items() for unit in units)


def test_the_variant_with_a_stride() -> None:
    # Positions 0 1 2 | 3 4 5 hold three shards twice; 6 and 7 are one more copy, in halves.
    group = Group.of(range(8), copies=2, shift=3)
    usable = set(range(8))
    assert savers(group, usable, x1=True) == [0, 1, 2]
    assert savers(group, usable - {1}, x1=True) == [0, 4, 2]
    assert savers(group, usable - {1, 4}, x1=True) == [6, 7]
    assert savers(group, usable - {1, 4, 6}, x1=True) is None
    assert sources(group, {1}, usable - {1}, x1=True) == {1: 4}
    assert sources(group, {1, 4}, usable - {1, 4}, x1=True) is None
    assert sources(group, {7}, usable - {7}, x1=True) is None


def test_groups_that_contradict_each_other() -> None:
    assert insane([], 4) == "no replica groups were reported"
    assert insane([[Group.of([0, 1], 2), Group.of([2, 3], 2)]], 4) is None
    assert "differ in size" in (insane([[Group.of([0, 1, 2], 2), Group.of([3], 1)]], 4) or "")
    assert "the job has 4" in (insane([[Group.of([0, 1], 2)]], 4) or "")
    assert "the job has 4" in (insane([[Group.of([0, 1], 2), Group.of([1, 2], 2)]], 4) or "")
    assert "can't be kept" in (insane([[Group.of([0, 1], 3)]], 2) or "")
    assert "don't fit" in (insane([[Group.of(range(4), 2, shift=3)]], 4, x1=True) or "")


def test_whole_data_parallel_indices_leave() -> None:
    # Eight ranks: tensor parallel pairs (0 1) (2 3) …, expert groups over half of the data-parallel ranks.
    dense = [Group.of([0, 2, 4, 6], 2), Group.of([1, 3, 5, 7], 2)]
    assert isolate([dense], {6}) == {6, 7}
    expert = [Group.of(pair, 2) for pair in ([0, 4], [1, 5], [2, 6], [3, 7])]
    assert isolate([dense, expert], {6}) == {4, 5, 6, 7}
    assert isolate([dense], {0}, data_parallel=[[0, 4], [1, 5], [2, 6], [3, 7]]) == {0, 1, 2, 3}
    assert isolate([dense], set()) == set()


@given(st.data())
def test_a_plan_gives_every_bad_rank_the_shard_it_lost(data: st.DataObject) -> None:
    copies = data.draw(st.integers(1, 4))
    ranks = sorted(data.draw(st.sets(st.integers(0, 99), min_size=copies, max_size=24)))
    ranks = ranks[: len(ranks) // copies * copies]
    group = Group.of(ranks, copies)
    stride = len(ranks) // copies
    bad = data.draw(st.sets(st.sampled_from(ranks)))
    usable = set(ranks) - bad
    pairs = sources(group, bad, usable)
    lost = {place for place in range(stride) if not usable & set(ranks[place::stride])}
    assert (pairs is None) == bool(lost)
    assert (savers(group, usable) is None) == bool(lost)
    for target, source in (pairs or {}).items():
        assert source in usable
        assert (ranks.index(source) - ranks.index(target)) % stride == 0
    assert pairs is None or set(pairs) == bad
