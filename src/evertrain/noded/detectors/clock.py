"""The clock of the wall, when somebody sets it: leases, certificates and fault times all go by it.

The kernel ends a timer that asked for it (TFD_TIMER_CANCEL_ON_SET) whenever the clock is set, not when it is only
slowed or sped up. How far it jumped is the change of its distance to the clock that nobody can set.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable

from evertrain import aio
from evertrain.noded import codes
from evertrain.noded.detectors.base import Tell, now_ms
from evertrain.noded.faults import NodeFault

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0
LEAST_JUMP = 1.0
LASTS_MS = 60_000
"""A jump is an event; it is shown for so long."""
_ABSTIME, _CANCEL_ON_SET = 1, 2
_FAR = 1 << 40


class _Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


def offset() -> float:
    """Of the clock of the wall from the time since boot, sleep included."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def fault(before: float, after: float, now: int, least: float = LEAST_JUMP) -> NodeFault | None:
    """For a change of that offset. Pure."""
    jump = after - before
    if abs(jump) < least:
        return None
    note = f"the clock was set {'forward' if jump > 0 else 'back'} by {abs(jump):.1f} s"
    return NodeFault(code=codes.CLOCK_JUMP, device="Node", since_ms=now, until_ms=now + LASTS_MS, note=note)


def open_timer() -> int:
    """A descriptor that becomes readable when the clock is set."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.timerfd_create(time.CLOCK_REALTIME, os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        arm(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return int(descriptor)


def arm(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    spec = _Spec(0, 0, _FAR, 0)
    if libc.timerfd_settime(descriptor, _ABSTIME | _CANCEL_ON_SET, ctypes.byref(spec), None) < 0:
        number = ctypes.get_errno()
        if number != errno.ECANCELED:  # set between the two: the timer is armed all the same
            raise OSError(number, os.strerror(number))


class Clock:
    name = "clock"

    def __init__(
        self, *, least: float = LEAST_JUMP, offset: Callable[[], float] = offset, timer: Callable[[], int] = open_timer
    ) -> None:
        self._least, self._offset, self._timer = least, offset, timer

    async def run(self, tell: Tell) -> None:
        set_again = asyncio.Event()
        descriptor = None
        loop = asyncio.get_running_loop()
        known = self._offset()
        tell([])

        def ready() -> None:
            assert descriptor is not None
            with contextlib.suppress(OSError):  # ECANCELED: this is the news
                os.read(descriptor, 8)
            set_again.set()

        try:
            descriptor = self._timer()
            loop.add_reader(descriptor, ready)
        except OSError as error:
            logger.info("the clock is looked at every %g s: %s", POLL_SECONDS, error)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with aio.timeout(None if descriptor is not None else POLL_SECONDS):
                        await set_again.wait()
                set_again.clear()
                now = self._offset()
                jump = fault(known, now, now_ms(), self._least)
                known = now
                if jump is not None:
                    logger.warning("%s", jump.note)
                    tell([jump])
        finally:
            if descriptor is not None:
                loop.remove_reader(descriptor)
                os.close(descriptor)
