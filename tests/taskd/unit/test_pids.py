"""Ending processes by their ids."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from evertrain.taskd.agent import pids

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


def test_ids_that_mean_many_processes_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is the whole process group, -1 is everybody."""
    killed: list[int] = []
    monkeypatch.setattr(pids.os, "kill", lambda pid, number: killed.append(pid))
    pids.stop_pids([0, -1, 4711])
    pids.send({0: -1, 1: 0, 2: 4712}, signal.SIGTERM)
    assert killed == [4711, 4712]


def test_who_does_not_end_in_time_is_told_from_who_does() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert not pids.grace_exit_pids([process.pid], 0.1)
        pids.stop_pids({0: process.pid})
        assert pids.wait_gone([process.pid, 0], 30)
        assert process.wait() == -signal.SIGKILL
