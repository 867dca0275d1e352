"""What a test left behind: processes, descriptors of the test process, shared memory.

A process that lost its parents on purpose or by accident is no child of ours any more. Every test therefore has an
environment variable of its own, which everything that it starts inherits, and which is looked for in all processes.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from pathlib import Path

import psutil

TEST_ID = "EVERTRAIN_TEST_ID"
PATIENCE = 10.0  # seconds that what a test has ended may take to be gone, on a busy machine
SHARED_MEMORY = Path("/dev/shm")
_numbers = itertools.count()


def mark() -> str:
    """What the environment of everything has in it that tests of this process have started."""
    return f"{TEST_ID}={os.getpid()}-"


class Leftovers:
    """Made before a test; `find()` afterwards names what is new, and `end()` kills the processes among it."""

    def __init__(self) -> None:
        self.test_id = f"{os.getpid()}-{next(_numbers)}-{time.monotonic_ns()}"
        self._processes = set(_children())
        self._descriptors = _descriptors()
        self._shared_memory = _shared_memory()

    def find(self, patience: float = PATIENCE) -> list[str]:
        _, alive = psutil.wait_procs(self._new_processes(), timeout=patience)
        found = [f"process {_describe(process)}" for process in alive]
        deadline = time.monotonic() + patience
        # Descriptors and shared memory announce nothing when they go; threads that close them may need a moment.
        while (rest := self._new_descriptors() + self._new_shared_memory()) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        return found + rest

    def end(self) -> None:
        processes = self._new_processes()
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=PATIENCE)

    def _new_processes(self) -> list[psutil.Process]:
        found = set(_children()) - self._processes
        marker = f"{TEST_ID}={self.test_id}".encode()
        for pid in psutil.pids():
            try:
                if pid != os.getpid() and marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.add(psutil.Process(pid))
            except (OSError, psutil.NoSuchProcess):
                continue  # gone meanwhile, or somebody else's
        # Python's own helper for shared memory lives as long as the test process.
        return [process for process in found if "multiprocessing.resource_tracker" not in _command(process)]

    def _new_descriptors(self) -> list[str]:
        return [f"descriptor {fd} ({target})" for fd, target in sorted(_descriptors() - self._descriptors)]

    def _new_shared_memory(self) -> list[str]:
        new = _shared_memory() - self._shared_memory
        new -= _open_elsewhere(new, self._new_processes())
        # Other programs make and remove some all the time: what is gone after that search was none of ours.
        return [f"shared memory {name}" for name in sorted(new & _shared_memory())]


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}, parent {process.ppid()}): {_command(process)[:200]}"
    except psutil.Error:
        return str(process.pid)


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the one that listed the directory
        if not target.startswith("/dev/"):
            found.add((int(entry), target))
    return found


def _shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _open_elsewhere(names: set[str], ours: list[psutil.Process]) -> set[str]:
    """Those that a process which has nothing to do with this test has open: another program on the same machine."""
    if not names:
        return set()
    family = {process.pid for process in ours} | {os.getpid()}
    found = set()
    for pid in set(psutil.pids()) - family:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {name for name in names if f"{SHARED_MEMORY}/{name}" in maps or f"{SHARED_MEMORY}/{name}" in links}
    return found
