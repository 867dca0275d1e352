"""gloo's threads at the end of a process: left alone until none of them needs the interpreter any more.

A worker of a gloo group wakes whoever waits for an operation before it lets go of the operation's tensors. If it is the
last to hold one, it needs the interpreter to drop it, and an interpreter that ends by then ends the thread instead, in
the middle of a destructor: "terminate called without an active exception", and a training that is complete ends with
SIGABRT. On a busy machine that is one run in some thousands.
"""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LOOK = 0.001
_LIMIT = 10.0
"""Seconds. A last resort: a worker that is stuck in an operation sleeps and counts as idle."""


def settle() -> None:
    """Called by the main thread before the interpreter ends. One to two milliseconds, if all workers are idle."""
    calm, deadline = 0, time.monotonic() + _LIMIT
    while calm < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK)  # whoever waits for the interpreter gets it now
        calm = 0 if _busy() else calm + 1


def _busy() -> bool:
    """Whether a worker runs or would like to. Unknown where there is no procfs: nobody, then."""
    return any(_runs(task) for task in Path("/proc/self/task").glob("*/stat"))


def _runs(stat: Path) -> bool:
    try:
        line = stat.read_text()
    except OSError:  # the thread has ended
        return False
    name, _, rest = line.partition("(")[2].rpartition(")")
    return name == _NAME and rest.split()[0] != "S"
