"""The optimizer's progress on this rank, and the lock that makes all ranks halt at one step.

The training thread announces every update. A lock at step S lets a rank that is behind finish step S and holds it
then; a rank that is at S is held before it begins S+1. Whoever set the lock learns when it has come true. All waits
are on one condition: nothing is polled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from evertrain.mindio.tft.numbers import DataStatus, Result

FORCE_STOP = "FORCE STOP. By mindio-ttp BeginUpdating"


class Steps:
    def __init__(self, local_copy: bool = False, mindspore: bool = False) -> None:
        self._changed = threading.Condition()
        self._local_copy = local_copy
        self._mindspore = mindspore
        self._limit: int | None = None
        self._forced = False
        self._dumping = False
        self._lock_request = 0
        self.step = 0
        self.backup_step = -1
        self.data_status = DataStatus.UPDATED
        self.lock_step = 0

    # The training thread.

    def start_copy(self) -> None:
        with self._changed:
            if self._dumping:
                raise Exception("the dying-gasp checkpoint is being written: no copy may begin")
            self.data_status = DataStatus.COPYING
            self._changed.notify_all()

    def start_updating(self, backup_step: int = -1) -> None:
        """An update is about to begin. Held while the step is locked; then RuntimeError, because the lock was set for
        a recovery."""
        with self._changed:
            self._refuse_in_dump()
            self._hold()
            if self._forced and not self._mindspore:
                raise RuntimeError(FORCE_STOP)
            self._refuse_in_dump()
            self.backup_step = backup_step
            self.data_status = DataStatus.UPDATING
            self._changed.notify_all()

    def _refuse_in_dump(self) -> None:
        if self._dumping:
            raise Exception("the dying-gasp checkpoint is being written: no update may begin")

    def end_updating(self, step: int, announce: Callable[[], None] | None = None) -> None:
        """The update is complete. `announce` is called before the wait that a lock may mean."""
        with self._changed:
            if self.data_status == DataStatus.UPDATING:
                self.data_status = DataStatus.UPDATED
                self.step = step
            self._changed.notify_all()
        if announce is not None:
            announce()
        with self._changed:
            self._hold()

    def must_finish(self, patience: float) -> bool | None:
        """A rank that has all it needs for the update, but can't know whether the others had: wait for the lock.

        True: others have updated, so this one must. False: nobody has. None: no lock was set in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._limit is not None or self._forced, patience)
            if self._limit is not None:
                return self.step < self._limit
            return False if self._forced else None

    def _hold(self) -> None:
        self._changed.wait_for(lambda: not self._held())

    def _held(self) -> bool:
        return self._limit is not None and self.step >= self._limit

    # The processor.

    def lock(self, step: int) -> int:
        """Hold the rank at this step. Returns the number of the request, for `locked`."""
        with self._changed:
            self._limit = self.lock_step = step
            self._lock_request += 1
            self._changed.notify_all()
            return self._lock_request

    def locked(self, request: int, limit: float, abnormal: Callable[[], bool]) -> Result | None:
        """Wait until the lock has come true or can't. None if another request took its place meanwhile."""

        def verdict() -> tuple[Result | None] | None:
            if request != self._lock_request:
                return (None,)
            if abnormal() or (self.matches(self.lock_step) and (self._local_copy or self._at_rest())):
                return (Result.OK,)
            return (Result.NEED_RETRY,) if self.step > self.lock_step else None

        with self._changed:
            found = self._changed.wait_for(verdict, limit)
        return found[0] if found else Result.TIMEOUT

    def _at_rest(self) -> bool:
        return self.data_status == DataStatus.UPDATED

    def matches(self, step: int) -> bool:
        """Does this rank hold the state of that step?"""
        if not self._local_copy:
            return self.step == step
        if self.data_status == DataStatus.UPDATED:
            return step in (self.step, self.backup_step)
        return step == (self.step if self.data_status == DataStatus.COPYING else self.backup_step)

    def poke(self) -> None:
        """Something outside changed on which a wait here may depend."""
        with self._changed:
            self._changed.notify_all()

    def forget_locks(self) -> None:
        """Nobody waits for the outcome of a lock any more."""
        with self._changed:
            self._lock_request += 1
            self._changed.notify_all()

    def lift(self, force_stop: bool = True) -> None:
        """Let the training thread go. With `force_stop`, not into another update."""
        with self._changed:
            self._limit = None
            self._forced = force_stop
            self._changed.notify_all()

    def begin_repair(self) -> None:
        """What this rank holds is being replaced: half of it is no state."""
        with self._changed:
            self.data_status = DataStatus.UPDATING

    def end_repair(self, step: int) -> None:
        with self._changed:
            self.step = step
            self.data_status = DataStatus.UPDATED
            self._changed.notify_all()

    def roll_back(self, step: int) -> None:
        with self._changed:
            self.lock_step = step

    def resume(self, step: int) -> None:
        """The recovery is over; the rank's state is that of this step."""
        with self._changed:
            self.step = self.lock_step = step
            self.backup_step = -1
            self.data_status = DataStatus.UPDATED
            self._limit = None
            self._forced = False
            self._changed.notify_all()

    def begin_dump(self) -> None:
        with self._changed:
            self._dumping = True

    @property
    def dumping(self) -> bool:
        return self._dumping
