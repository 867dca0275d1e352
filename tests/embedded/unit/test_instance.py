"""Who runs on a data directory: one at a time, found by others, taken over after a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evertrain.embedded import instance

HOLD = """
import sys
from pathlib import Path
from evertrain.embedded import instance
claim = instance.Claim(Path(sys.argv[1]))
claim.announce(instance.Running(__import__("os").getpid(), "the-kubeconfig", "https://127.0.0.1:1"))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_nobody_runs_on_a_new_directory(tmp_path: Path) -> None:
    assert instance.find(tmp_path / "none") is None
    with instance.Claim(tmp_path / "new") as claim:
        assert claim.left_by is None
        assert instance.find(tmp_path / "new") == instance.Running(os.getpid())
    assert instance.find(tmp_path / "new") is None


def test_a_second_one_is_refused_and_told_who_runs(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(instance.InUse, match=f"already runs on {tmp_path} .process {holder.pid}"):
        instance.Claim(tmp_path)
    assert instance.find(tmp_path) == instance.Running(holder.pid, "the-kubeconfig", "https://127.0.0.1:1")


def test_a_directory_is_taken_over_after_a_crash(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert instance.find(tmp_path) is None
    with instance.Claim(tmp_path) as claim:
        assert claim.left_by is not None and claim.left_by.pid == holder.pid
    with instance.Claim(tmp_path) as claim:
        assert claim.left_by is None  # the one before ended in order


def test_stop_ends_the_one_that_runs(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    stopped = instance.stop(tmp_path, 10)
    assert stopped is not None and stopped.pid == holder.pid
    assert instance.find(tmp_path) is None
    assert instance.stop(tmp_path, 10) is None


def test_a_damaged_lock_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / instance.LOCK).write_bytes(b"\0\xff{]")
    assert instance.find(tmp_path) is None
    with instance.Claim(tmp_path) as claim:
        assert claim.left_by is None
