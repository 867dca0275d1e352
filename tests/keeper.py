"""Ends what the tests have started when the test process is gone, even if it was killed: `python keeper.py PID MARK`.

Everything that a test starts inherits an environment variable that begins with MARK (see `leftovers`), also what is in
a session of its own and has lost its parents. One of these runs beside each test process, on the standard library
alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 10.0


@contextlib.contextmanager
def kept(mark: str) -> Iterator[None]:
    """While this lasts, what carries the mark ends with this process."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), mark],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as keeper:  # fmt: skip
        try:
            yield
        finally:
            keeper.kill()


def main() -> None:
    owner, mark = int(sys.argv[1]), sys.argv[2].encode()
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(owner)
        if os.getppid() == owner:
            select.select([descriptor], [], [])
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and any([_kill(int(name), mark) for name in os.listdir("/proc") if name.isdigit()]):
        time.sleep(0.02)  # who was just being started has not been seen


def _kill(pid: int, mark: bytes) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if not any(each.startswith(mark) for each in variables):
            return False
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
