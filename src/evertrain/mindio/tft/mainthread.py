"""Where the training thread is, as the processor's threads need to know it, and what it waits for.

It leaves the training function by an exception and reports it (`out`). Then it waits twice: first until the device has
been cleaned, so that it can drop what it holds, then, idle, until the recovery is over. What releases a wait may come
before the wait begins. A release that came too late for its recovery is no release for the next one: entering the
training function again discards it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from evertrain.mindio.tft.numbers import Action

PAUSE, RAISE = 1, 2
STEP_FINISH = "STEP FINISH"


class MainThread:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._out = False
        self._cleaned = False
        self._resumed = False
        self._idle = False
        self._exit = False
        self._order = 0
        self._pause_mode = 0
        self._pause_step = 0
        self._pause_order = 0
        self._paused_at: int | None = None
        self._holds = 0
        self._passed = -1
        """The last step at whose end it did not halt, or went on."""

    # The training thread.

    def enter(self) -> None:
        """The training function is about to be called (again)."""
        with self._changed:
            self._out = self._cleaned = self._resumed = self._idle = False
            self._passed = -1

    def report(self) -> None:
        """It has left the training function, or is about to."""
        with self._changed:
            self._out = True
            self._changed.notify_all()

    def wait_cleaned(self) -> Action:
        with self._changed:
            self._changed.wait_for(lambda: self._cleaned or self._exit)
            self._cleaned = False
            return Action.EXIT if self._exit else Action.RETRY

    def wait_resumed(self) -> Action:
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._resumed or self._exit)
            self._idle = self._resumed = False
            return Action.EXIT if self._exit else Action.RETRY

    def wait_exit(self, limit: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._exit, limit)

    def pause_point(self, step: int) -> None:
        """The end of a step. Halts here if asked to, or raises to leave the function between two steps."""
        with self._changed:
            if self._pause_mode and step >= self._pause_step:
                self._paused_at = step
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._exit or (self._may_go_on(step) and not self._holds))
                self._paused_at = None
                if self._pause_mode == RAISE:
                    self._pause_mode = 0
                    raise RuntimeError(STEP_FINISH)
            self._passed = step

    def _may_go_on(self, step: int) -> bool:
        return self._pause_mode != PAUSE or step < self._pause_step

    # Whoever works on what the training thread uses, while it is paused.

    @contextlib.contextmanager
    def hold(self) -> Iterator[Callable[[], bool] | None]:
        """Keep a paused training thread where it is, even if the pause ends meanwhile.

        Yields a function that tells whether it has ended, or None if the thread is not paused: nothing is held then.
        """
        with self._changed:
            step = self._paused_at
            held = step is not None and not self._may_go_on(step)
            self._holds += held
        try:
            yield (lambda: self._exit or self._may_go_on(step or 0)) if held else None
        finally:
            with self._changed:
                self._holds -= held
                self._changed.notify_all()

    # The processor.

    def begin_order(self, sn: int) -> None:
        """Waits on behalf of an earlier order are given up."""
        with self._changed:
            self._order = sn
            self._changed.notify_all()

    def wait_out(self, sn: int, limit: float) -> bool:
        """Wait until the training thread has left the function. False if it did not, or the wait was given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._out or self._exit or self._order > sn, limit)
            return self._out

    def wait_idle(self, sn: int, limit: float) -> bool:
        """Wait until the training thread holds nothing and waits for the end of the recovery."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._exit or self._order > sn, limit)
            return self._idle

    def release_cleaned(self) -> None:
        with self._changed:
            if not self._idle:
                self._cleaned = True
                self._changed.notify_all()

    def release_resumed(self, both: bool = False) -> None:
        """`both` for frameworks that wait only once."""
        with self._changed:
            self._out = False
            self._passed = -1
            self._resumed = True
            self._cleaned = self._cleaned or both
            self._changed.notify_all()

    def release_exit(self) -> None:
        with self._changed:
            self._exit = True
            self._changed.notify_all()

    def ask_pause(self, sn: int, step: int) -> bool:
        """Halt at the end of this step; False if that is past. Who halts at an earlier one goes on."""
        with self._changed:
            if self._passed >= step:
                return False
            self._pause_order, self._pause_mode, self._pause_step = sn, PAUSE, step
            self._changed.notify_all()
            return True

    def wait_paused(self, sn: int, limit: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._halted() or self._exit or self._order > sn, limit)
            return self._halted()

    def _halted(self) -> bool:
        return self._paused_at is not None and self._paused_at >= self._pause_step

    def end_pause(self, sn: int | None = None, leave: bool = False) -> None:
        """Of this order, or of whichever there is. With `leave`, the thread does not go on but out of the function."""
        with self._changed:
            if sn in (None, self._pause_order):
                self._pause_mode = RAISE if leave else 0
                self._changed.notify_all()

    @property
    def parked(self) -> bool:
        """Out of the training function until the end of a recovery."""
        return self._out
