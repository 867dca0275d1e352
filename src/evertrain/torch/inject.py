"""Makes the faults of `--ft-fault` happen, inside the training process, at a named phase of a step.

Each fault fires once (or `times` times): the fault board lives in the launcher, so a replayed step in the same or in a
replaced process does not fire it again.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys

from evertrain.mindio.board import Board, FaultBoard
from evertrain.mindio.faultspec import FaultSpec
from evertrain.torch import interrupt


class InjectedFault(RuntimeError):
    """Raised by `--ft-fault`; the text carries the words by which real faults are recognised."""


class Injector:
    """The faults of one rank. `step` is kept current by the training loop."""

    def __init__(self, faults: list[FaultSpec], rank: int, fired: FaultBoard | None, board: Board | None) -> None:
        self._mine = [(index, fault) for index, fault in enumerate(faults) if fault.rank == rank]
        self._fired = fired
        self._board = board
        self._corrupting = False
        self.step = 0

    def __bool__(self) -> bool:
        return bool(self._mine)

    def __call__(self, phase: str) -> None:
        """Called by the training loop when it reaches a phase; a fault that is due does not return, or raises."""
        if not self._mine:
            return
        for index, fault in self._mine:
            if fault.phase == phase and self.step >= fault.step:
                self._undisturbed(index, fault)

    def take_corruption(self) -> bool:
        """True once if a `corrupt` fault is armed: the caller is a repair source and flips bits in its state."""
        due, self._corrupting = self._corrupting, False
        return due

    def _undisturbed(self, index: int, fault: FaultSpec) -> None:
        """Fire and happen, or neither: an interrupt between the two would use the fault up."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {interrupt.SIGNAL})
        try:
            if interrupt.SIGNAL not in signal.sigpending() and self._fire(index, fault):
                self._happen(fault)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {interrupt.SIGNAL})

    def _fire(self, index: int, fault: FaultSpec) -> bool:
        return self._fired is None or self._fired.fire(index, fault.times)

    def _happen(self, fault: FaultSpec) -> None:
        text = f"injected by --ft-fault {fault}"
        print(f"evertrain: {text}", file=sys.stderr, flush=True)
        if self._board is not None and fault.kind not in ("corrupt", "term"):
            self._board.fault_now()
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                sys.exit(1)
            case "exception":
                raise InjectedFault(text)
            case "uce":
                raise InjectedFault(f"UCE ERROR: {text}")
            case "hccl":
                raise InjectedFault(f"HCCL OP RETRY FAILED: {text}")
            case "gil":
                re.match(r"(a+)+$", "a" * 64 + "b")
            case "segv":
                ctypes.string_at(0)
            case "hang":
                _block_for_ever()
            case "term":
                os.kill(int(os.environ["EVERTRAIN_AGENT_PID"]), signal.SIGTERM)
            case "corrupt":
                self._corrupting = True


def _block_for_ever() -> None:
    reader, _writer = os.pipe()
    # The handler of an interrupt raises out of this read, so it is resumed: a system call that hangs for real does not
    # return either.
    while True:
        try:
            os.read(reader, 1)
        except BaseException:
            continue
