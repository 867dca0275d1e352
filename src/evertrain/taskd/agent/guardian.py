"""Ends the training processes of an agent that was killed. Its own process, on the standard library alone.

torchrun puts its processes into sessions of their own, and a torchrun that is killed leaves them behind. The agent
writes the id of each process that it starts to this one; when the line breaks, they are killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable


class Guardian:
    """The agent's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)], stdin=subprocess.PIPE, start_new_session=True
        )

    def guard(self, pids: Iterable[int]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("".join(f"{pid}\n" for pid in pids).encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """The processes are nobody's concern any more; those that still run are ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    guarded: dict[int, int] = {}  # process ids by descriptors
    rest = b""
    while True:
        ready, _, _ = select.select([0, *guarded], [], [])
        for descriptor in ready:
            if descriptor != 0:
                guarded.pop(descriptor)
                os.close(descriptor)
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ProcessLookupError, ValueError):
                pid = int(line)
                guarded[os.pidfd_open(pid)] = pid
    for descriptor in guarded:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


if __name__ == "__main__":
    main()
