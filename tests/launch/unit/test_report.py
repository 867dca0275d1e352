"""What the launcher says at once."""

from __future__ import annotations

import pytest

from evertrain.launch import report


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            {"event": "waiting", "node": 1, "ranks": [2, 3], "seconds": 300.0},
            "node 1 is lost (ranks 2, 3); waiting up to 300 s for it; start it again with the same command",
        ),
        (
            {"event": "waiting", "node": 1, "ranks": [1], "seconds": 0.0},
            "node 1 is lost (rank 1); the others go on without it; start it again with the same command",
        ),
        ({"event": "node", "node": 1, "present": True}, "node 1 is back"),
        ({"event": "node", "node": 1, "present": False}, ""),
        ({"event": "paused", "step": 7, "seconds": 600.0}, "paused at step 7 for up to 600 s"),
        ({"event": "continued", "reason": "asked for"}, "the pause is over: asked for"),
        ({"event": "warning", "detail": "x"}, "warning: x"),
        ({"event": "phase"}, ""),
    ],
)
def test_news(record: dict, line: str) -> None:
    assert report.news_line(record) == line


def test_what_is_left_after_a_signal() -> None:
    assert report.saved_line(53, "ck/53", "ck") == "checkpoint of step 53 in ck; the same command goes on from it"
    assert "--ft-checkpoint-dir" in report.saved_line(-1, "", None)
    assert report.saved_line(-1, "", "ck").startswith("nothing saved in ck")


def test_an_incident_is_named_after_its_cause() -> None:
    link = {"kind": "link", "rank": 0, "step": 7, "detail": "connection closed by peer"}
    cause = {"kind": "exception", "rank": 1, "step": 7, "detail": "RuntimeError: no more data"}
    record = {"faults": [link, cause], "outcome": "recovered", "decision": "retry", "step": 7, "total_ms": 40.0}
    line = report.incident_line(record)
    assert line.startswith("rank 1 raised RuntimeError: no more data at step 7 and 1 more fault; the step was")
    assert report.incident_line(record | {"faults": [link]}).startswith("rank 0 lost its link to another rank at step")
