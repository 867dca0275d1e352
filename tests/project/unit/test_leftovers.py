"""The check that other tests rely on: it must see what was really left, and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from tests.leftovers import TEST_ID, Leftovers

SLEEPER = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]


@pytest.fixture
def leftovers(monkeypatch: pytest.MonkeyPatch) -> Leftovers:
    found = Leftovers()
    monkeypatch.setenv(TEST_ID, found.test_id)
    return found


KILLED = """
import os, subprocess, sys
from tests.keeper import kept
from tests.leftovers import TEST_ID, Leftovers, mark
with kept(mark()):
    os.environ[TEST_ID] = Leftovers().test_id
    shell = "sleep 100 > /dev/null & echo $! $$; wait"
    pod = subprocess.Popen(["sh", "-c", shell], start_new_session=True, stdout=subprocess.PIPE, text=True)
    print(pod.stdout.readline(), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["killed", "by itself"])
def test_what_tests_have_started_ends_with_a_test_process_that_is_killed(end: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, end]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    processes = [psutil.Process(int(pid)) for pid in output.split() if psutil.pid_exists(int(pid))]
    try:
        _, alive = psutil.wait_procs(processes, timeout=20 if end == "killed" else 0)
        assert len(output.split()) == 2 and bool(alive) == (end != "killed"), "who ends by itself cleans up by itself"
    finally:
        for process in processes:
            if process.is_running():
                process.kill()


def test_nothing_left(leftovers: Leftovers) -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    with socket.socket():
        pass
    assert leftovers.find() == []


def test_a_process_is_named_and_ended(leftovers: Leftovers) -> None:
    with subprocess.Popen(SLEEPER, stdout=subprocess.DEVNULL) as process:
        (found,) = leftovers.find(patience=0.1)
        assert str(process.pid) in found and "time.sleep" in found
        leftovers.end()
        assert not psutil.pid_exists(process.pid) or process.wait(5) < 0


def test_a_process_that_has_another_parent_is_found(leftovers: Leftovers) -> None:
    """The middle process ends at once, so that the sleeper belongs to init."""
    start = f"import subprocess; print(subprocess.Popen({SLEEPER!r}, stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", start], check=True, stdout=subprocess.PIPE).stdout)
    assert psutil.Process(pid).ppid() != os.getpid()
    (found,) = leftovers.find(patience=0.1)
    assert str(pid) in found
    leftovers.end()
    assert leftovers.find(patience=0.1) == []


def test_a_descriptor_is_named(leftovers: Leftovers) -> None:
    def descriptors() -> list[str]:
        # Shared memory that another program is about to remove may be found beside them.
        return [each for each in leftovers.find(patience=0.1) if each.startswith("descriptor")]

    with socket.socket() as left_open:
        (found,) = descriptors()
        assert f"descriptor {left_open.fileno()} (socket:" in found
    memfd = os.memfd_create("left-open")
    (found,) = descriptors()
    assert "memfd:left-open" in found
    os.close(memfd)
    assert descriptors() == []


def test_shared_memory_is_named(leftovers: Leftovers) -> None:
    if not Path("/dev/shm").is_dir():
        return
    segment = shared_memory.SharedMemory(create=True, size=64)
    try:
        segment.close()
        assert f"shared memory {segment.name}" in leftovers.find(patience=0.1)
    finally:
        segment.unlink()
