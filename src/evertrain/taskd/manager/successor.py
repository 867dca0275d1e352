"""Starts the manager again when it was killed. Its own process, on the standard library alone.

`manager.py` is started once, by the script of the pod. The manager starts this process beside itself and says goodbye
to it when it ends. If the line breaks without that, this process runs `manager.py`, again and again if need be: the
same command line, environment, working directory and output. It does not if its session is over: then the pod is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

log = logging.getLogger(__name__)

WATCHED = "TASKD_MANAGER_WATCHED"
"""In the environment of a manager that was started again: somebody sees to it."""
LONG, LONGEST_PAUSE = 60.0, 30.0
"""Seconds after which a manager counts as one that works, and between starts of one that does not."""
_GOODBYE = b"goodbye\n"


class Successor:
    """The manager's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-I", "-S", os.path.abspath(__file__)], stdin=subprocess.PIPE)
        self._write(json.dumps([_leader(), *command()]).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def close(self) -> None:
        """The manager ends by itself: nobody has to follow it."""
        self._write(_GOODBYE)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def command() -> list[str]:
    """By which this process was started. Empty if that can't be done twice, as with a program read from a pipe."""
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) is None and "-c" not in sys.orig_argv:
        return []
    return [sys.executable, *sys.orig_argv[1:]]


def _leader() -> int:
    """The process with whose end the session ends: usually the pod's script. 0 if there is none but the manager."""
    leader = os.getsid(0)
    if leader in (0, os.getpid()) or not os.path.exists(f"/proc/{leader}"):
        return 0
    return leader


@contextlib.contextmanager
def standing_by(wanted: bool) -> Iterator[None]:
    successor = None
    if wanted and command() and not os.environ.get(WATCHED):
        try:
            successor = Successor()
        except OSError as error:
            log.warning("nobody will start the manager again if it is killed: %s", str(error))
    try:
        yield
    finally:
        if successor is not None:
            successor.close()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, it is not handed down
    begun = time.monotonic()
    with os.fdopen(0, "rb", closefd=False) as line:
        first = line.readline()
        session, *arguments = json.loads(first or b"[0]")
        leader = None
        try:
            leader = os.pidfd_open(session) if session else None
        except ProcessLookupError:
            return
        except OSError:
            pass  # an old kernel
        if line.read() == _GOODBYE or not arguments:
            return
    os.environ[WATCHED] = "1"
    pause, killed = 0.0, True
    while killed and not _is_over(leader, 0.0):
        pause = 0.0 if time.monotonic() - begun > LONG else min(2 * pause, LONGEST_PAUSE)
        print(f"taskd: the manager was killed; it is started again in {pause:g} s", file=sys.stderr, flush=True)
        if _is_over(leader, pause):
            return
        pause, begun = pause or 1.0, time.monotonic()
        try:
            killed = subprocess.run(arguments, stdin=subprocess.DEVNULL).returncode < 0
        except OSError as error:  # no memory, say: there may be some later
            print(f"taskd: the manager could not be started: {error}", file=sys.stderr, flush=True)


def _is_over(leader: int | None, seconds: float) -> bool:
    """Whether the session ends within this time, which passes otherwise."""
    return bool(select.select([] if leader is None else [leader], [], [], seconds)[0])


if __name__ == "__main__":
    main()
