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
