"""The verdict of the demo of `evertrain launch`, and whom it kills when."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from evertrain.cli.demo import launched as demo


def run(**changes: Any) -> demo.Run:
    lines = {rank: {"rank": rank, "step": 9, "sha256": "a" * 64, "samples_sha256": "b" * 64} for rank in range(3)}
    lines[1] |= changes
    return demo.Run(code=0, seconds=1.0, results=lines)


def test_equal_results_are_identical(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo._show_proof(run(), run())
    assert "DIFFERENT" not in capsys.readouterr().out


@pytest.mark.parametrize("key", ["sha256", "samples_sha256", "step"])
def test_one_difference_on_one_rank_is_told(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Behind the digits that are shown: the whole hash counts.
    other = 10 if key == "step" else run().results[1][key][:-1] + "c"
    assert not demo._show_proof(run(), run(**{key: other}))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "DIFFERENT" in line] == ["1"]


def test_the_newest_process_of_the_rank_is_killed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    events = tmp_path / "events.jsonl"
    started = [{"event": "started", "rank": rank, "pid": pid} for rank, pid in ((2, 11), (1, 12), (2, 13))]

    def write(*more: dict[str, Any]) -> None:
        events.write_text("".join(json.dumps(event) + "\n" for event in [*started, *more]))

    write()
    killer = demo.Killer(rank=2, steps=100, events=events)
    killer.watch(60)
    assert not killed, "no spare is warm yet"
    write({"event": "spare", "pid": 99})
    killer.watch(32)
    assert not killed, "too early"
    killer.watch(61)
    killer.watch(62)
    assert killed == [(13, signal.SIGKILL)] and killer.done


def test_it_is_killed_in_the_end_even_without_a_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    events = tmp_path / "events.jsonl"
    events.write_text(json.dumps({"event": "started", "rank": 0, "pid": 7}) + "\n")
    killer = demo.Killer(rank=0, steps=100, events=events)
    killer.watch(89)
    assert not killed
    killer.watch(90)
    assert killed == [7]


def test_detection_is_timed_from_the_kill(tmp_path: Path) -> None:
    killer = demo.Killer(rank=1, steps=100, events=tmp_path / "events.jsonl")
    killer._killed_at = 50.0
    incident = {"faults": [{"rank": 1}], "phases_ms": {"detect": 0.1, "stop": 20.0}, "total_ms": 20.1}
    events = [{"event": "fault", "rank": 0, "t": 1.0}, {"event": "fault", "rank": 1, "t": 50.004}]
    timed = killer.timed(incident, events)
    assert timed["phases_ms"]["detect"] == pytest.approx(4.0) and timed["total_ms"] == pytest.approx(24.0)
    assert list(timed["phases_ms"]) == ["detect", "stop"]


def test_a_missing_script_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["/does/not/exist.py"]) == 2
    assert "/does/not/exist.py" in capsys.readouterr().err
