"""Ending processes by their ids, and waiting until they have ended."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Iterable, Mapping

log = logging.getLogger(__name__)

GRACE = 600.0
"""Seconds that processes which were asked to end may take."""

Pids = Iterable[int] | Mapping[int, int]
"""Process ids, by themselves or by rank."""


def send(pids: Pids, number: signal.Signals) -> None:
    """To those that are still there."""
    for pid in _ids(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_gone(pids: Pids, seconds: float) -> bool:
    """Until these processes have ended; False if some have not within the time."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for pid in _ids(pids):
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                selector.register(descriptor, selectors.EVENT_READ)
        end = time.monotonic() + seconds
        while selector.get_map():
            for key, _ in selector.select(max(0.0, end - time.monotonic())):
                selector.unregister(key.fd)
            if selector.get_map() and time.monotonic() >= end:
                return False
    return True


def children() -> list[int]:
    """Of this process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def grace_exit_pids(pids: Pids, seconds: float = GRACE) -> bool:
    """Ask them to end, and give them time to; False if some are still there."""
    pids = _ids(pids)
    send(pids, signal.SIGTERM)
    if wait_gone(pids, seconds):
        return True
    log.warning("processes that were asked to end are still there after %g s", seconds)
    return False


def stop_pids(pids: Pids) -> None:
    """At once."""
    send(pids, signal.SIGKILL)


def _ids(pids: Pids) -> list[int]:
    """Only ids of single processes: 0 and -1 mean many others to the kernel."""
    return [pid for pid in (pids.values() if isinstance(pids, Mapping) else pids) if pid > 0]
