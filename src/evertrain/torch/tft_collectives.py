"""Collectives that the controller of the callback interface can stop, for frameworks without a device that can.

On an NPU the stop callback aborts whatever the device does, and the training thread gets "FORCE STOP". gloo has
nothing like it: a rank waits in a collective for a peer that will not come. `Collectives` builds groups that can always
be left, and is itself the stop and the clean callback:

    collectives = Collectives(rank, store)
    tft_register_stop_handler(collectives.stop)
    tft_register_clean_handler(collectives.clean)

    @tft_exception_handler
    def train(...):
        with collectives.training():
            group = collectives.join("world", ranks)
            for step in ...:
                ...                                  # forward, backward, group.allreduce([...]).wait()
                collectives.barrier(group)           # nobody updates before everybody can
                tft_start_updating_os(); ...; tft_end_updating_os(step + 1)
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import torch.distributed as dist

from evertrain.mindio.tft import environment, faults
from evertrain.mindio.tft.numbers import ReportState
from evertrain.mindio.tft.rank import Life
from evertrain.mindio.tft.runtime import runtime
from evertrain.torch import groups
from evertrain.torch.backends import Backend, Gloo
from evertrain.torch.groups import GuardedGroup
from evertrain.torch.interrupt import Interrupted, Interrupter

FORCE_STOP = "FORCE STOP. By evertrain"
BROKEN = "SUSPECT REMOTE ERROR"


class _Cancelled:
    """A stop ends the building of groups, too."""

    def __init__(self, interrupter: Interrupter) -> None:
        self._event = threading.Event()
        self._interrupter = interrupter

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set() or self._interrupter.pending


_HARMED = (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED, ReportState.RS_RETRY)


def _hidden_fault(stop: BaseException) -> RuntimeError | None:
    """The fault with which the training function was being left when it was interrupted, while it cleaned up."""
    uce = runtime.processor is None or runtime.processor.settings.uce
    error = stop.__context__
    while error is not None:
        if isinstance(error, RuntimeError) and faults.classify(str(error), uce).state in _HARMED:
            return error
        error = error.__context__
    return None


class _Training:
    """No generator: an interrupt could land in what is between that and the training function."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __enter__(self) -> None:
        self._collectives.enter()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        stop = error if isinstance(error, Interrupted) else None
        fault = _hidden_fault(stop) if stop is not None else None
        self._collectives.leave("" if stop is None or fault is not None else str(stop))
        if fault is not None:
            raise fault from None


class Collectives:
    def __init__(
        self,
        rank: int,
        store: dist.Store,
        timeout: float = 300.0,
        patience: float = 10.0,
        backend: Backend | None = None,
    ) -> None:
        """`store` must outlive any rank.

        `timeout`: how long ranks wait for each other. In the first group those who start fast wait for the slowest one;
        who is lost later is found out by the controller, long before. `patience`: how long a broken collective waits
        for a controller to find the cause, before it is reported as a fault of the network.
        """
        self._rank, self._store, self._timeout, self._patience = rank, store, timeout, patience
        self._backend = backend or Gloo()
        self._lock = threading.Lock()
        self._groups: list[GuardedGroup] = []
        self._interrupter = Interrupter(_Training.__enter__.__code__, _Training.__exit__.__code__)
        self._cancelled = _Cancelled(self._interrupter)
        self._inside = False
        self._stopped = threading.Event()
        runtime.shield = self._shield

    def _shield(self, up: bool) -> None:
        if threading.current_thread() is self._interrupter._thread:
            (self._interrupter.raise_shield if up else self._interrupter.lower_shield)()

    # Callbacks; they run in the processor's threads.

    def stop(self, args: Any = None, ctx: Any = None) -> None:
        """Wake whoever waits in a collective, and get the training thread out of the training function."""
        with self._lock:
            self._stopped.set()
            self._cancelled.set()
            stopped, self._groups = self._groups, []
            if self._inside:
                self._interrupter.request()
        for group in stopped:
            group.stop()

    def clean(self, is_uce_error: bool = False, args: Any = None, ctx: Any = None) -> int:
        """Groups that are joined from now on belong to the next attempt."""
        self.renew()
        return 0

    def renew(self) -> None:
        with self._lock:
            self._stopped.clear()
            self._cancelled = _Cancelled(self._interrupter)

    # Groups.

    def join(self, name: str, ranks: list[int]) -> GuardedGroup:
        """Build a group with these ranks. The number of the recovery becomes part of its name."""
        members = sorted(ranks)
        repair_id = runtime.processor.rank.repair_id if runtime.processor is not None else 0
        with self._lock:
            cancelled = self._cancelled
        with runtime.shielded():
            group = groups.build(
                repair_id,
                members.index(self._rank),
                len(members),
                dist.PrefixStore(f"{repair_id}/{name}/", self._store),
                self._backend,
                self._timeout,
                cancelled,
            )
        with self._lock:
            if cancelled is self._cancelled:
                self._groups.append(group)
                return group
        group.stop()
        raise Interrupted("the building of a process group was stopped")

    def leave_all(self) -> None:
        """Between two steps, when nobody waits in them: the groups of a smaller or renewed job replace these."""
        with self._lock:
            left, self._groups = self._groups, []
        for group in left:
            group.stop()

    # The training thread.

    def training(self) -> contextlib.AbstractContextManager[None]:
        """The inside of the training function: whatever stops it leaves by a RuntimeError that the decorator knows."""
        return _Training(self)

    def enter(self) -> None:
        self._interrupter.install()
        with self._lock:
            self._inside = not self._stopped.is_set()
        if not self._inside:
            self.leave("stopped before it began")
        try:
            self._interrupter.arm()
        except Interrupted as error:
            stopped = str(error)
        else:
            return
        self.leave(stopped)

    def leave(self, broken: str) -> None:
        """`broken`: by what the training function was interrupted, if it was."""
        self._interrupter.disarm()
        with self._lock:
            self._inside = False
        self._interrupter.acknowledge()
        if broken:
            self._wait_stopped(broken)
            raise RuntimeError(FORCE_STOP) from None

    def _wait_stopped(self, broken: str) -> None:
        """A collective broke, most likely because a peer died. The controller finds out and stops everybody; if it died
        with the peer, the next one does."""
        processor, began = runtime.processor, time.monotonic()
        left = self._patience
        while left > 0:
            if self._stopped.wait(left):
                return
            led = processor.led_since(began) if processor is not None else time.monotonic() - began
            left = self._patience - led
        recovering = processor is not None and processor.rank.life != Life.NORMAL
        if not recovering or not self._stopped.wait(environment.action_limit()):
            raise RuntimeError(f"{BROKEN}: {broken}")

    def barrier(self, group: GuardedGroup) -> None:
        """Before an update: nobody begins it before all have what they need for it.

        If a peer dies now, some ranks may pass and update while others break. Those have what they need, too, so they
        wait for the controller's lock and update if anybody has.
        """
        try:
            group.barrier().wait()
        except Interrupted:
            processor = runtime.processor
            if self._stopped.is_set() or processor is None:
                raise
            with runtime.shielded():
                finish = processor.steps.must_finish(self._patience)
            if not finish:
                raise
