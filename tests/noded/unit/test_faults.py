"""Faults as detectors and people write them, and the board that keeps them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.noded import injected
from evertrain.noded.board import BEFORE, Board
from evertrain.noded.detectors.lines import LONGEST, MOST, ONCE_MS, Lines
from evertrain.noded.faults import ChipFault, Malformed, NodeFault, SwitchFault, decode, encode

NOW = 1_744_167_455_784


def chip(number: int = 3, code: str = "80E01801", **fields: Any) -> ChipFault:
    return ChipFault(code=code, chip=number, **{"since_ms": NOW, **fields})


@pytest.mark.parametrize(
    "fault",
    [
        chip(),
        chip(level="SeparateNPU", until_ms=NOW + 5, note="a note"),
        NodeFault(code="E3000001", device="Storage", id=7, since_ms=NOW),
        SwitchFault(code="[0x08520003,na,L2,na]", chip=1, port=15, since_ms=NOW),
    ],
)
def test_what_is_written_is_read(fault: Any) -> None:
    assert decode(json.loads(json.dumps(encode(fault))), NOW + 1000) == fault


def test_what_people_write_becomes_what_tables_have() -> None:
    assert decode({"kind": "chip", "code": " 0x80e01801 ", "chip": 0}, NOW) == chip(0)
    assert decode({"kind": "node", "code": "e8000001"}, NOW) == NodeFault(code="E8000001", device="Node", since_ms=NOW)
    level = decode({"kind": "switch", "code": "[0x08520003,na,npu,na]", "level": "SeparateFault"}, NOW).level
    assert level == "Separate"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({}, "kind None"),
        ({"kind": "disk"}, "kind 'disk' is none of chip, node, switch"),
        ({"kind": "chip", "chip": 0}, "code is missing"),
        ({"kind": "chip", "chip": 0, "code": 5}, "code is not a text"),
        ({"kind": "chip", "chip": 0, "code": "80E0180"}, "not 8 or 9 hexadecimal digits"),
        ({"kind": "node", "code": "0123456789"}, "not 8 hexadecimal digits"),
        ({"kind": "switch", "code": "08520003"}, "not of the form"),
        ({"kind": "chip", "code": "80E01801"}, "chip is missing"),
        ({"kind": "chip", "code": "80E01801", "chip": True}, "chip is not a whole number"),
        ({"kind": "chip", "code": "80E01801", "chip": -1}, "chip is not a whole number"),
        ({"kind": "chip", "code": "80E01801", "chip": 1024}, "chip is not a whole number"),
        ({"kind": "chip", "code": "80E01801", "chip": 0, "level": "Bad"}, "level 'Bad' is none of NotHandleFault"),
        ({"kind": "chip", "code": "80E01801", "chip": 0, "level": "NormalNPU"}, "is none of"),
        ({"kind": "node", "code": "E8000001", "level": "SeparateNPU"}, "is none of NotHandleFault, PreSeparateFault"),
        ({"kind": "node", "code": "E8000001", "device": "a b"}, "device 'a b' is not a word"),
        ({"kind": "node", "code": "E8000001", "chip": 3}, "unknown field 'chip' for kind node"),
        ({"kind": "node", "code": "E8000001", "note": {}}, "note is not a text"),
        ({"kind": "node", "code": "E8000001", "until": "soon"}, "until is not a whole number"),
    ],
)
def test_malformed_faults_say_what_is_wrong(entry: Any, why: str) -> None:
    with pytest.raises(Malformed, match=why.replace("[", r"\[")):
        decode(entry, NOW)


def test_notes_stay_one_short_line() -> None:
    note = decode({"kind": "node", "code": "E8000001", "note": "a\nb\x1b[31m" + "c" * 1000}, NOW).note
    assert note.startswith("a b [31m") and len(note) == 256


def test_a_fault_that_goes_on_keeps_its_time() -> None:
    board = Board()
    assert board.put("links", [chip(since_ms=1)])
    assert not board.put("links", [chip(since_ms=2)])
    assert board.faults() == [chip(since_ms=1)]
    assert board.put("links", [])
    assert board.put("links", [chip(since_ms=3)])
    assert board.faults() == [chip(since_ms=3)], "it came again"


def test_who_knows_the_time_is_believed() -> None:
    board = Board()
    board.put("injected", [chip(since_ms=1)], timed=True)
    assert board.put("injected", [chip(since_ms=2)], timed=True)
    assert board.faults() == [chip(since_ms=2)]


def test_sources_do_not_take_from_each_other() -> None:
    board = Board()
    board.put("b", [chip(since_ms=5), chip(1)])
    board.put("a", [chip(since_ms=7, level="SeparateNPU")])
    assert board.faults() == [chip(1), chip(since_ms=5, level="SeparateNPU")]
    board.put("b", [])
    assert board.faults() == [chip(since_ms=7, level="SeparateNPU")]


def test_what_was_there_before_us_has_been_there_since_then() -> None:
    board = Board()
    board.remember(chip().key, 10)
    board.put("links", [chip(since_ms=500), chip(1, since_ms=500)])
    assert [fault.since_ms for fault in board.faults()] == [500, 10]
    board.put("links", [])
    board.put("links", [chip(since_ms=600)])
    assert board.faults() == [chip(since_ms=600)]


def test_what_was_known_before_counts_only_where_nobody_knows_better() -> None:
    board = Board()
    board.put(BEFORE, [chip(since_ms=1, level="SeparateNPU"), chip(1, since_ms=1)], timed=True)
    board.put("links", [chip(since_ms=5)])
    assert board.faults() == [chip(1, since_ms=1), chip(since_ms=5)]


def test_events_leave_by_themselves() -> None:
    board = Board()
    board.put("clock", [chip(until_ms=NOW + 60), chip(1, until_ms=NOW + 30), chip(2)])
    assert board.next_ms == NOW + 30
    assert not board.expire(NOW + 29)
    assert board.expire(NOW + 30)
    assert board.faults() == [chip(2), chip(until_ms=NOW + 60)]
    assert board.expire(NOW + 100) and board.next_ms is None


def test_a_program_says_that_faults_come_and_go() -> None:
    lines = Lines()
    lines.take(b'{"kind": "chip", "code": "80E01801", "chip": 3}', NOW)
    lines.take(b'{"kind": "node", "code": "E8000002", "state": "once"}\r', NOW)
    once = NodeFault(code="E8000002", device="Node", since_ms=NOW, until_ms=NOW + ONCE_MS)
    assert lines.faults(NOW) == [chip(), once]
    assert lines.faults(NOW + ONCE_MS) == [chip()]
    lines.take(b'{"kind": "chip", "code": "80E01801", "chip": 3, "state": "clear"}', NOW)
    assert lines.faults(NOW) == []
    lines.take(b'{"kind": "chip", "code": "80E01801", "chip": 3}', NOW)
    lines.take(b'{"kind": "clear"}', NOW)
    assert lines.faults(NOW) == [] and lines.bad == 0


def test_a_crash_cures_nothing_and_a_good_end_does() -> None:
    lines = Lines()
    lines.take(b'{"kind": "chip", "code": "80E01801", "chip": 3}', NOW)
    lines.ended(False)
    assert lines.faults(NOW) == [chip()]
    lines.ended(False)
    assert lines.faults(NOW) == [chip()], "this run had not come to say anything"
    lines.take(b'{"kind": "chip", "code": "80E01801", "chip": 4}', NOW)
    lines.ended(True)
    assert lines.faults(NOW) == [chip(4)], "the run that ended well did not name chip 3"


def test_a_program_can_not_flood_us() -> None:
    lines = Lines()
    for number in range(MOST):
        lines.take(b'{"kind": "chip", "code": "80E01801", "chip": %d}' % number, NOW)
    with pytest.raises(Malformed, match="more than"):
        lines.take(b'{"kind": "chip", "code": "80E01801", "chip": 900}', NOW)
    with pytest.raises(Malformed, match="a line of more"):
        lines.take(b" " * (LONGEST + 1), NOW)
    assert len(lines.faults(NOW)) == MOST and lines.bad == 2


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(lambda x: json.dumps(x).encode())
)
def test_garbage_of_programs_does_no_harm(line: bytes) -> None:
    lines = Lines()
    lines.take(b'{"kind": "chip", "code": "80E01801", "chip": 3}', NOW)
    try:
        lines.take(line, NOW)
    except Malformed:
        assert lines.bad == 1
    assert lines.faults(NOW) == [chip()]


@given(
    st.dictionaries(
        st.sampled_from(["kind", "code", "chip", "id", "device", "port", "since", "until", "level", "note", "x"]),
        st.sampled_from(["chip", "node", "switch", "80E01801", "Storage"])
        | st.integers()
        | st.none()
        | st.floats()
        | st.lists(st.none()),
    )
)
def test_any_object_is_a_fault_or_malformed(entry: dict[str, Any]) -> None:
    try:
        fault = decode(entry, NOW)
    except Malformed:
        return
    assert decode(encode(fault), NOW) == fault


def test_injected_faults_survive_their_config_map() -> None:
    faults = [chip(), NodeFault(code="0000001D", device="CPU", id=1, since_ms=NOW, until_ms=NOW + 1)]
    item = injected.config_map("node-1", faults)
    assert item["metadata"]["name"] == "noded-injected-node-1" and injected.node_of(item) == "node-1"
    assert injected.read(item, NOW) == (faults, [])
    assert injected.read(None, NOW) == ([], [])


@pytest.mark.parametrize(
    ("text", "count", "why"),
    [
        ("{", 0, "not JSON"),
        ("{}", 0, "not a JSON array"),
        ('[5, {"kind": "chip", "code": "80E01801", "chip": 3}]', 1, r"faults\[0\]: not a JSON object"),
        ('[{"kind": "chip"}]', 0, r"faults\[0\]: code is missing"),
        (json.dumps([encode(chip(n % 1000, f"{n:08X}")) for n in range(1001)]), 1000, "only the first 1000 of 1001"),
    ],
)
def test_what_is_wrong_with_injected_faults_is_said_and_the_rest_counts(text: str, count: int, why: str) -> None:
    import re

    faults, problems = injected.read({"data": {"faults": text}}, NOW)
    assert len(faults) == count
    assert len(problems) == 1 and re.search(why, problems[0])
