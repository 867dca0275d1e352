"""Which step, whose copy, who sends to whom."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from evertrain.mindio.plan import Report, Start, Transfers, choose, dump_sources, odd_ones_out, order, repair


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


def plain(*digests: str) -> dict[int, dict[str, str]]:
    """What ranks with one part show."""
    return {rank: {"state": digest} if digest else {} for rank, digest in enumerate(digests)}


def everybody(world: int) -> dict[int, tuple[str, ...]]:
    return dict.fromkeys(range(world), ("state",))


def sources(transfers: Transfers, part: str = "state") -> dict[int, int]:
    """Target to source, told alike by both sides."""
    receives = {target: source for target, queue in transfers.receives.items() for p, source in queue if p == part}
    sends = {target: source for source, queue in transfers.sends.items() for p, target in queue if p == part}
    assert receives == sends
    return receives


def test_the_majority_is_right_and_ties_go_to_the_lowest_rank() -> None:
    start = Start(5, (0, 1, 2, 3))
    transfers, why = repair(start, everybody(4), plain("bad", "good", "good", "good"))
    assert transfers is not None
    assert (transfers.digests, sources(transfers)) == ({"state": "good"}, {0: 1})
    assert why == "3 of 4 copies agree, the others are overwritten; rank 1 to rank 0"
    transfers, _ = repair(start, everybody(4), plain("a", "b", "b", "a"))
    assert transfers is not None and transfers.digests == {"state": "a"}


def test_at_a_first_start_the_lowest_rank_wins_against_any_majority() -> None:
    transfers, why = repair(Start(0, (0, 1, 2), fresh=True), everybody(3), plain("a", "b", "b"))
    assert transfers is not None
    assert transfers.digests == {"state": "a"} and sources(transfers) == {1: 0, 2: 0}
    assert transfers.fan_out == 2
    assert "initial values differ" in why


def test_a_target_gets_its_state_from_the_next_holder_in_the_ring() -> None:
    for lost in range(4):
        holders = tuple(rank for rank in range(4) if rank != lost)
        shown = plain(*("" if rank == lost else "x" for rank in range(4)))
        transfers, _ = repair(Start(5, holders), everybody(4), shown)
        assert transfers is not None and sources(transfers) == {lost: (lost + 1) % 4}


@given(st.integers(2, 40), st.data())
def test_sources_are_spread_and_every_target_has_one(world: int, data: st.DataObject) -> None:
    holders = sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=1)))
    shown = plain(*("x" if rank in holders else "" for rank in range(world)))
    transfers, _ = repair(Start(3, tuple(holders)), everybody(world), shown)
    assert transfers is not None
    targets = set(range(world)) - set(holders)
    assert set(sources(transfers)) == targets
    assert set(sources(transfers).values()) <= set(holders)
    load = Counter(sources(transfers).values())
    assert max(load.values(), default=0) <= -(-len(targets) // len(holders)) + 1


def test_a_holder_that_shows_nothing_receives() -> None:
    transfers, _ = repair(Start(5, (0, 1)), everybody(2), plain("", "x"))
    assert transfers is not None and sources(transfers) == {0: 1}
    transfers, why = repair(Start(5, (0, 1)), everybody(2), {})
    assert transfers is None and "no rank could show" in why


def test_who_writes_the_last_checkpoint() -> None:
    reports = {0: Report(4, True), 1: Report(5, False), 2: Report(5, True), 3: Report(5, True)}
    assert dump_sources(reports)[:2] == (5, {2: ["state"]})
    assert dump_sources(reports, excluded={2, 3})[:2] == (4, {0: ["state"]})
    assert dump_sources({0: Report(0, True, fresh=True)})[1] == {}


# State in several parts.


def sharded(world: int, copies: int = 2) -> dict[int, tuple[str, ...]]:
    """The parts of each rank: shard i of k is held by ranks i, i + k, i + 2k, ..."""
    return {rank: ("state", f"shard:{rank % (world // copies)}") for rank in range(world)}


def reports_of(steps: dict[int, int | None], parts: dict[int, tuple[str, ...]]) -> dict[int, Report]:
    """None: the rank was replaced."""
    return {
        rank: Report(0, True, fresh=True, parts=parts[rank], checkpoint=2)
        if step is None
        else Report(step, True, parts=parts[rank], checkpoint=2)
        for rank, step in steps.items()
    }


def test_a_step_needs_every_part() -> None:
    parts = sharded(4)
    start, why = choose(reports_of({0: 7, 1: 7, 2: 7, 3: None}, parts))
    assert start == Start(7, (0, 1, 2))
    assert why == "step 7: the newest step of which all 3 parts are clean, held by ranks 0, 1, 2"
    start, _ = choose(reports_of({0: 8, 1: 7, 2: 7, 3: 7}, parts))
    assert start == Start(7, (1, 2, 3)), "shard 1 of step 8 is nowhere"
    start, why = choose(reports_of({0: 7, 1: None, 2: 7, 3: None}, parts))
    assert start == Start(2, (), load=True)
    assert why == "step 2: no rank has a clean copy of shard:1, all ranks load the checkpoint"


def test_a_shard_that_is_ahead_completes_the_newest_step() -> None:
    """Rank 3 died when rank 0 had all of step 8 already and ranks 1 and 2 only their own shards of it."""
    parts = sharded(4)
    reports = reports_of({0: 8, 1: 7, 2: 7, 3: None}, parts)
    for rank in (1, 2):
        reports[rank] = replace(reports[rank], also=((parts[rank][1], 8),))
    start, _ = choose(reports)
    assert start == Start(8, (0, 1, 2))
    shown = {0: {"state": "w", "shard:0": "a"}, 1: {"shard:1": "b"}, 2: {"shard:0": "a"}, 3: {}}
    transfers, _ = repair(start, parts, shown)
    assert transfers is not None
    assert sources(transfers) == {1: 0, 2: 0, 3: 0}
    assert sources(transfers, "shard:1") == {3: 1} and sources(transfers, "shard:0") == {}


def test_the_parts_of_processes_that_are_gone_are_missed_too() -> None:
    parts = sharded(4)
    left = {0: Report(7, True, parts=parts[0]), 2: Report(7, True, parts=parts[2])}
    assert dump_sources(left)[1] == {0: ["state", "shard:0"]}, "nobody here knows of shard 1"
    assert dump_sources(left, parts={"state", "shard:0", "shard:1"})[1] == {}


def test_the_savers_and_pairs_of_the_reference() -> None:
    for world, copies, lost, savers, pairs in (
        (4, 2, {3}, {0: ["state", "shard:0"], 1: ["shard:1"]}, {3: 1}),
        (4, 2, {0}, {1: ["state", "shard:1"], 2: ["shard:0"]}, {0: 2}),
        (4, 2, {1, 2}, {0: ["state", "shard:0"], 3: ["shard:1"]}, {1: 3, 2: 0}),
        (6, 3, {1, 3}, {0: ["state", "shard:0"], 5: ["shard:1"]}, {1: 5, 3: 5}),
    ):
        parts = sharded(world, copies)
        reports = reports_of({rank: None if rank in lost else 7 for rank in range(world)}, parts)
        assert dump_sources(reports)[:2] == (7, savers)
        start, _ = choose(reports)
        assert start is not None
        shown = {rank: {} if rank in lost else dict.fromkeys(parts[rank], "x") for rank in parts}
        transfers, _ = repair(start, parts, shown)
        assert transfers is not None
        found = {t: s for t, queue in transfers.receives.items() for part, s in queue if part != "state"}
        assert found == pairs
    assert dump_sources(reports_of({0: None, 1: 7, 2: None, 3: 7}, sharded(4)))[1] == {}


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[int, Report], set[int]]:
    copies, shards = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    parts = sharded(copies * shards, copies)
    reports = {}
    for rank, names in parts.items():
        step, clean = draw(st.integers(0, 3)), draw(st.booleans())
        also = tuple((name, draw(st.integers(0, 3))) for name in names if draw(st.integers(0, 3)) == 0)
        fresh, checkpoint = draw(st.booleans()), draw(st.integers(-1, 2))
        reports[rank] = Report(step, clean, fresh, checkpoint, names, also)
    return reports, draw(st.sets(st.sampled_from(sorted(parts)), max_size=2))


@given(situations())
def test_no_step_is_chosen_without_all_its_parts(situation: tuple[dict[int, Report], set[int]]) -> None:
    reports, distrusted = situation
    start, _ = choose(reports, distrusted)
    wanted = {part for report in reports.values() for part in report.parts}

    def left(step: int, ranks: Iterable[int]) -> set[str]:
        return {part for rank in ranks for part, at in reports[rank].copies() if at == step}

    trusted = set(reports) - distrusted
    trained = {rank for rank in trusted if not reports[rank].fresh}
    whole = [step for step in range(4) if left(step, trained) == wanted]
    if whole:
        assert start is not None and (start.step, start.load) == (max(whole), False)
    if start is not None and not start.load:
        assert set(start.holders) <= trusted
        assert left(start.step, start.holders) == wanted
    elif start is not None:
        assert all(report.checkpoint >= start.step for report in reports.values())


@given(situations(), st.randoms(use_true_random=False))
def test_repairs_come_from_clean_holders_only(situation: tuple[dict[int, Report], set[int]], pick) -> None:
    reports, distrusted = situation
    start, _ = choose(reports, distrusted)
    if start is None or start.load:
        return
    shown = {
        rank: {part: pick.choice("abb") for part, at in report.copies() if at == start.step}
        for rank, report in reports.items()
    }
    parts = {rank: report.parts for rank, report in reports.items()}
    transfers, _ = repair(start, parts, shown)
    assert transfers is not None
    after = {rank: dict(digests) for rank, digests in shown.items()}
    for target, queue in transfers.receives.items():
        assert [part for part, _ in queue] == sorted((part for part, _ in queue), key=order)
        for part, source in queue:
            assert source in start.holders and shown[source][part] == transfers.digests[part]
            assert part in parts[target]
            after[target][part] = shown[source][part]
    for rank, names in parts.items():
        assert {name: after[rank].get(name) for name in names} == {name: transfers.digests[name] for name in names}


def test_ten_thousand_ranks_in_five_thousand_shards() -> None:
    parts = sharded(10_000)
    reports = reports_of({rank: None if rank < 100 else 7 + rank % 2 for rank in parts}, parts)
    reports |= {rank: Report(7, True, parts=parts[rank]) for rank in range(5_000, 10_000)}
    shown = {rank: dict.fromkeys(parts[rank], "x") if rank >= 5_000 else {} for rank in parts}
    begun = time.process_time()
    start, _ = choose(reports)
    assert start is not None and start.step == 7
    transfers, _ = repair(start, parts, shown)
    assert transfers is not None and len(sources(transfers, "shard:7")) == 1
    assert len(dump_sources(reports)[1]) > 4_000
    assert time.process_time() - begun < 1.0


def test_the_ranks_that_train_another_model() -> None:
    assert odd_ones_out({0: "a", 1: "a", 2: "b"}) == [2]
    assert odd_ones_out({0: "a", 1: "b"}) == [1]
    assert odd_ones_out({0: "a", 1: "a"}) == []
