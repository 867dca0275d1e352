"""Processes that end with the one that started them, and namespaces, from the kernel directly."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def own_network() -> None:
    """From now on this thread, and what it starts, has a network of its own, with nothing in it."""
    if _libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace can't be made: " + os.strerror(ctypes.get_errno()))


def die_with_parent() -> None:
    """In a child, before it becomes another program."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Daemon:
    """A program that runs until it is ended. What it prints goes to a file."""

    def __init__(self, command: Sequence[str | Path], log: Path, environment: dict[str, str], **options: Any) -> None:
        self.name, self.log = Path(str(command[0])).name, log
        self._command, self._environment, self._options = list(map(str, command)), environment, options
        self.process: subprocess.Popen[bytes]

    def start(self) -> Daemon:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log,
                preexec_fn=die_with_parent, **{"stdin": subprocess.DEVNULL, **self._options},
            )  # fmt: skip
        return self

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def until(self, condition: Callable[[], Any], what: str, limit: float = 180.0) -> Any:
        """Ready is what nobody tells of: it is asked until then, as long as the process lives."""
        end = time.monotonic() + limit
        while not (found := condition()):
            if self.process.poll() is not None or time.monotonic() > end:
                ended = "has not come to" if self.process.returncode is None else "ended before"
                raise RuntimeError(f"{self.name} {ended} {what}; {self.log} ends with\n{tail(self.log)}")
            time.sleep(0.1)
        return found


def tail(log: Path, characters: int = 3000) -> str:
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""
