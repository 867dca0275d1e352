"""The priority of processes that warm up beside a training and may take no time from it.

Leaving SCHED_IDLE again takes a privilege that leaving SCHED_BATCH does not, hence the choice. Where sessions are
scheduled as groups (autogroup), a policy matters only within the session, and the group has a niceness of its own.
"""

from __future__ import annotations

import contextlib
import os
import resource

AGAIN = 0.15
"""Seconds after which what was refused may be tried again: the kernel takes changes of a group only every 100 ms."""
_CAP_SYS_NICE = 23
_LOW, _NORMAL = b"10", b"0"


def lower(pid: int) -> None:
    """Let a new process, still with one thread, run only when nobody else wants to."""
    may_return = _has_capability(_CAP_SYS_NICE) or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20
    policy = os.SCHED_IDLE if may_return else os.SCHED_BATCH
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, policy, os.sched_param(0))
    _group_niceness(pid, _LOW)


def restore(pid: int) -> bool:
    """Undo it for every thread that the process has by now. False if it has to be tried again."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
    return _group_niceness(pid, _NORMAL)


def _group_niceness(pid: int, value: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/autogroup", "wb", buffering=0) as file:
            file.write(value)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _has_capability(number: int) -> bool:
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
    return False
