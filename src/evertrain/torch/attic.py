"""Where abandoned process groups are kept until it is safe to drop them, and how a process ends in spite of them.

A gloo group whose connections were shut down may still have a worker that waits, in 6 to 11 of 100 cases until the
group's timeout. The group's destructor joins that worker, so whoever drops the last reference waits as well. Hence an
abandoned group is kept until the timeout has passed and then dropped by a thread that has nothing else to do.

When the interpreter ends it drops everything, in the main thread. That would wait for stuck workers too; so at exit
every group that is still there, stuck or not, gets one reference that is never given back. The operating system cleans
up better than any destructor. And it waits until gloo's workers have let go of their last tensors (`gloo_workers`).
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from typing import Any

from evertrain.mindio import gloo_workers

_MARGIN = 1.0
"""Seconds that a worker gets beyond the group's timeout to notice it."""

_changed = threading.Condition()
_in_use: dict[int, Any] = {}
_kept: list[tuple[float, Any]] = []
_reaper: threading.Thread | None = None


def watch(thing: Any) -> None:
    """A group that is in use. It is held until it is kept, because dropping it may wait for a stuck worker, too."""
    with _changed:
        _in_use[id(thing)] = thing


def keep(thing: Any, seconds: float) -> None:
    """Hold an abandoned group for the seconds of its timeout, then drop it in the background."""
    global _reaper
    with _changed:
        _in_use.pop(id(thing), None)
        _kept.append((time.monotonic() + seconds + _MARGIN, thing))
        if _reaper is None:
            _reaper = threading.Thread(target=_reap, name="evertrain-attic", daemon=True)
            _reaper.start()
        _changed.notify()


def count() -> int:
    with _changed:
        return len(_kept)


def _reap() -> None:
    global _reaper
    while True:
        with _changed:
            if not _kept:
                _reaper = None
                return
            now = time.monotonic()
            due = [thing for when, thing in _kept if when <= now]
            if not due:
                _changed.wait(min(when for when, _ in _kept) - now)
                continue
        # Still on the list while they are destroyed, so that an exit in between finds the others.
        while due:
            thing = due.pop()
            with _changed:
                _kept[:] = [entry for entry in _kept if entry[1] is not thing]
            del thing


@atexit.register
def _leak() -> None:
    with _changed:
        for thing in [*(thing for _, thing in _kept), *_in_use.values()]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    gloo_workers.settle()
