"""Getting a training thread out of user code, wherever it is.

A thread can sit in Python, in a sleep, in a lock, in `next(loader)` or in a collective. A signal whose handler raises
wakes all of these within a millisecond; a compute kernel is left at its end. What must not happen is that the
exception lands in the wrong place: inside an optimizer update it would leave half-updated weights, inside our own
recovery code it would break the recovery. Therefore the handler raises only while user code is *armed*, and it leaves
a note instead while a *shield* is up; taking the shield down then raises. Nor does it raise on a *door*, the way out
of user code: a fault with which that was left would be gone.

`Interrupted` derives from BaseException, so that an `except Exception` in user code does not swallow it. A bare
`except:` does; the request is repeated until the thread has acknowledged it.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from types import CodeType, FrameType

SIGNAL = signal.SIGRTMIN + 7
_REPEAT = 0.25
"""Seconds after which an interrupt that was swallowed is raised again; long enough for a loader to end its workers."""


class Interrupted(BaseException):
    """The step is over for this rank: leave the training function; it will be called again."""


class Interrupter:
    """One per process. `arm`, `disarm` and the shield belong to the training thread, `request` to any other thread."""

    def __init__(self, *doors: CodeType) -> None:
        """`doors`: functions besides `disarm` that belong to the way into user code or out of it."""
        self._doors = {Interrupter.disarm.__code__, *doors}
        self._armed = False
        self._shields = 0
        self._pending = False
        self._raised_at = 0.0
        self._thread = threading.main_thread()
        self._previous: object = None
        self._installed = False
        self._acknowledged = threading.Event()
        self._acknowledged.set()

    def install(self) -> None:
        """Take the signal. In a thread other than the main one an asynchronous exception takes its place."""
        self._thread = threading.current_thread()
        if self._thread is threading.main_thread() and not self._installed:
            self._previous = signal.signal(SIGNAL, self._on_signal)
            self._installed = True

    def uninstall(self) -> None:
        if self._installed:
            signal.signal(SIGNAL, self._previous or signal.SIG_DFL)  # type: ignore[arg-type]
            self._installed = False

    # The training thread.

    def arm(self) -> None:
        """User code begins. Raises at once if an interrupt is already pending."""
        self._armed = True
        self._raise_if_due()

    def disarm(self) -> None:
        self._armed = False

    def acknowledge(self) -> None:
        """The thread is out of user code; the request is done."""
        self._pending = False
        self._armed = False
        self._shields = 0
        self._raised_at = 0.0
        self._acknowledged.set()

    @property
    def pending(self) -> bool:
        return self._pending

    def raise_shield(self) -> None:
        self._shields += 1

    def lower_shield(self) -> None:
        if self._shields:
            self._shields -= 1
            if not self._shields and self._pending:
                self._raise_if_due()

    def _raise_if_due(self) -> None:
        if self._pending and self._armed and not self._shields:
            now = time.monotonic()
            if now - self._raised_at >= _REPEAT:
                self._raised_at = now
                raise Interrupted("the controller asked this rank to leave the step")

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code not in self._doors:
            frame = frame.f_back
        if frame is None:  # else the request is repeated, if the thread is on its way in
            self._raise_if_due()

    # Any other thread.

    def request(self) -> None:
        """Have the training thread raise `Interrupted`; repeated from a helper thread until it is acknowledged."""
        if self._pending:
            return
        self._acknowledged.clear()
        self._pending = True
        self._poke()
        threading.Thread(target=self._repeat, name="evertrain-interrupt", daemon=True).start()

    def _poke(self) -> None:
        ident = self._thread.ident
        if ident is None or not self._thread.is_alive():
            return
        if self._installed:
            signal.pthread_kill(ident, SIGNAL)
        elif self._armed and not self._shields:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Interrupted))

    def _repeat(self) -> None:
        # A signal that arrives just before a blocking call begins is handled before it and does not wake it, so the
        # first repeats come quickly.
        pause = 0.005
        while not self._acknowledged.wait(pause):
            self._poke()
            pause = min(pause * 2, _REPEAT)
