from __future__ import annotations

import json

import pytest

from evertrain.taskd import frames
from evertrain.taskd.frames import BadFrame, FaultReport, Seen


def test_a_body_has_four_keys_and_an_extension_may_be_null() -> None:
    text = frames.body("ACTION", 210, "32767").encode()
    assert json.loads(text) == {"msg_type": "ACTION", "code": 210, "message": "32767", "extension": None}
    assert frames.decode(text) == frames.body("ACTION", 210, "32767")
    assert frames.decode('{"msg_type":"STATUS","code":201,"message":"1","extension":{},"more":1}').extension == {}


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "{}", "[" * 10_000, "\ud800",
        '{"msg_type":"A","code":1,"message":""}',
        '{"msg_type":"A","code":"1","message":"","extension":null}',
        '{"msg_type":"A","code":1,"message":"","extension":{"a":1}}',
    ],
)  # fmt: skip
def test_what_is_no_body_is_said_so(text: str) -> None:
    with pytest.raises(BadFrame):
        frames.decode(text)


def test_reports_of_faults() -> None:
    assert frames.fault_report('{"fault_ranks": [9], "restart_times": -1}') == FaultReport([9])
    assert json.loads(FaultReport([8, 9], 3).encode()) == {"fault_ranks": [8, 9], "restart_times": 3}
    with pytest.raises(BadFrame):
        frames.fault_report("[9]")


def test_lists_of_ranks() -> None:
    assert frames.rank_list('["8","9"]') == [8, 9] == frames.rank_list("[8, 9]")
    assert json.loads(frames.ranks_text([8, 9])) == ["8", "9"]
    for text in ("null", "", '["x"]', "[-1]", "{}"):
        with pytest.raises(BadFrame):
            frames.rank_list(text)


def test_what_came_twice_is_known_for_a_while() -> None:
    seen = Seen(size=2)
    assert [seen.again(uuid) for uuid in ("a", "b", "a", "c", "b", "a")] == [False, False, True, False, True, False]
    assert not seen.again("") and not seen.again(""), "who gives no uuid can't be told apart"


def test_a_uuid_of_any_length_costs_no_memory() -> None:
    seen = Seen(size=3)
    long = ["\ud800" * 1_000_000, "b" * 1_000_000]
    assert [seen.again(uuid) for uuid in (*long, *long)] == [False, False, True, True]
    assert all(len(each) <= 64 for each in seen._uuids)


def test_types_of_faults() -> None:
    assert frames.fault_types({"FAULT_TYPES": frames.fault_types_text({3: 0, 10: 2})}) == {3: 0, 10: 2}
    for nothing in (None, {}, {"FAULT_TYPES": "["}, {"FAULT_TYPES": '{"x":0}'}, {"FAULT_TYPES": '{"3":"memory"}'}):
        assert frames.fault_types(nothing) == {}


def test_how_processes_have_ended() -> None:
    ends = {3: frames.ProcessEnd(1, "exited with code 1"), 10: frames.ProcessEnd(-9)}
    assert frames.process_ends({"PROCESS_ENDS": frames.ends_text(ends)}) == ends
    for nothing in (None, {}, {"PROCESS_ENDS": "["}, {"PROCESS_ENDS": '{"x":{"code":1}}'}, {"PROCESS_ENDS": '{"3":1}'}):
        assert frames.process_ends(nothing) == {}
    assert frames.max_restarts({"MAX_RESTARTS": "3"}) == 3
    assert frames.replaced({"REPLACED": "3"}) == 3
    for nothing in (None, {}, {"MAX_RESTARTS": "-1"}, {"MAX_RESTARTS": "²"}, {"MAX_RESTARTS": "9" * 5000}):
        assert frames.max_restarts(nothing) is None


@pytest.mark.parametrize(("text", "seconds"), [("12", 12), ("9999", 60), ("-1", 0), ("", 0), ("²", 0), ("9" * 5000, 0)])
def test_how_often_a_sign_of_life_is_wanted(text: str, seconds: int) -> None:
    assert frames.alive_seconds(frames.body("ACTION", 210, "3", {frames.ALIVE_SECONDS: text})) == seconds
    assert frames.alive_seconds(frames.body("ACTION", 210, "3", None)) == 0
