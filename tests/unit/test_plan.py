"""Which step, whose copy, who sends to whom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from evertrain.mindio.plan import Report, Start, choose, dump_source, odd_ones_out, repair


def test_the_newest_clean_step_is_taken() -> None:
    reports = {0: Report(7, True), 1: Report(8, True), 2: Report(9, False), 3: Report(8, True)}
    start, why = choose(reports)
    assert start == Start(8, (1, 3))
    assert why == "step 8: the newest clean state, held by ranks 1, 3"


def test_the_initial_values_of_a_replacement_are_no_state() -> None:
    start, _ = choose({0: Report(0, True, fresh=True), 1: Report(5, True)})
    assert start == Start(5, (1,))
    start, why = choose({0: Report(0, True, fresh=True), 1: Report(5, False)})
    assert start is None
    assert "no rank has a clean state" in why


def test_a_replacement_that_was_repaired_but_not_yet_told_to_go_is_a_copy() -> None:
    start, _ = choose({0: Report(0, True, fresh=True), 1: Report(5, True, fresh=True), 2: Report(5, False)})
    assert start == Start(5, (1,))


def test_a_first_start() -> None:
    start, why = choose({rank: Report(0, True, fresh=True) for rank in range(3)})
    assert start == Start(0, (0, 1, 2), fresh=True)
    assert "no process has trained yet" in why


def test_without_a_clean_state_all_load_the_newest_common_checkpoint() -> None:
    start, why = choose({0: Report(9, False, checkpoint=8), 1: Report(9, False, checkpoint=6)})
    assert start == Start(6, (), load=True)
    assert "load the checkpoint" in why
    start, _ = choose({0: Report(9, False, checkpoint=8), 1: Report(9, False)})
    assert start is None


def test_new_processes_load_the_checkpoint_rather_than_begin_anew() -> None:
    start, _ = choose({rank: Report(0, True, fresh=True, checkpoint=5) for rank in range(2)})
    assert start == Start(5, (), load=True)
    # What the script loaded by itself needs no loading.
    start, _ = choose({rank: Report(5, True, fresh=True, checkpoint=5) for rank in range(2)})
    assert start == Start(5, (0, 1), fresh=True)


def test_a_distrusted_rank_is_no_holder() -> None:
    start, _ = choose({0: Report(5, True), 1: Report(5, True)}, distrusted={0})
    assert start == Start(5, (1,))


def test_the_majority_is_right_and_ties_go_to_the_lowest_rank() -> None:
    start = Start(5, (0, 1, 2, 3))
    transfers, why = repair(start, range(4), {0: "bad", 1: "good", 2: "good", 3: "good"})
    assert transfers is not None
    assert (transfers.digest, transfers.source_of) == ("good", {0: 1})
    assert why == "3 of 4 copies agree, the others are overwritten; rank 1 to rank 0"
    transfers, _ = repair(start, range(4), {0: "a", 1: "b", 2: "b", 3: "a"})
    assert transfers is not None and transfers.digest == "a"


def test_at_a_first_start_the_lowest_rank_wins_against_any_majority() -> None:
    transfers, why = repair(Start(0, (0, 1, 2), fresh=True), range(3), {0: "a", 1: "b", 2: "b"})
    assert transfers is not None
    assert transfers.digest == "a" and transfers.source_of == {1: 0, 2: 0}
    assert transfers.fan_out == 2
    assert "initial values differ" in why


def test_a_target_gets_its_state_from_the_next_holder_in_the_ring() -> None:
    for lost in range(4):
        holders = tuple(rank for rank in range(4) if rank != lost)
        transfers, _ = repair(Start(5, holders), range(4), {rank: "x" for rank in holders} | {lost: ""})
        assert transfers is not None and transfers.source_of == {lost: (lost + 1) % 4}


@given(st.integers(2, 40), st.data())
def test_sources_are_spread_and_every_target_has_one(world: int, data: st.DataObject) -> None:
    holders = sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=1)))
    transfers, _ = repair(Start(3, tuple(holders)), range(world), {rank: "x" for rank in holders})
    assert transfers is not None
    targets = set(range(world)) - set(holders)
    assert set(transfers.source_of) == targets
    assert set(transfers.source_of.values()) <= set(holders)
    assert {t for queue in transfers.targets_of.values() for t in queue} == targets
    load = Counter(transfers.source_of.values())
    assert max(load.values(), default=0) <= -(-len(targets) // len(holders)) + 1


def test_a_holder_that_shows_nothing_receives() -> None:
    transfers, _ = repair(Start(5, (0, 1)), range(2), {0: "", 1: "x"})
    assert transfers is not None and transfers.source_of == {0: 1}
    transfers, why = repair(Start(5, (0, 1)), range(2), {})
    assert transfers is None and "no rank could show" in why


def test_who_writes_the_last_checkpoint() -> None:
    reports = {0: Report(4, True), 1: Report(5, False), 2: Report(5, True), 3: Report(5, True)}
    assert dump_source(reports)[0] == 2
    assert dump_source(reports, excluded={2, 3})[0] == 0
    assert dump_source({0: Report(0, True, fresh=True)})[0] is None


def test_the_ranks_that_train_another_model() -> None:
    assert odd_ones_out({0: "a", 1: "a", 2: "b"}) == [2]
    assert odd_ones_out({0: "a", 1: "b"}) == [1]
    assert odd_ones_out({0: "a", 1: "a"}) == []
