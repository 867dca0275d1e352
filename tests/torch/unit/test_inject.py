"""Injected faults happen once and whole, whatever else goes on in the process."""

from __future__ import annotations

import signal
import subprocess
import sys

INTERRUPTED = """
import os, signal
from evertrain.mindio.faultspec import FaultSpec
from evertrain.torch import interrupt
from evertrain.torch.inject import Injector

class Board:
    spent = 0
    def fire(self, index, times):
        self.spent += 1
        if {when} == "after":
            os.kill(os.getpid(), interrupt.SIGNAL)
        return True

def stop(*_):
    raise KeyboardInterrupt

signal.signal(interrupt.SIGNAL, stop)
board = Board()
inject = Injector([FaultSpec(kind="kill", step=0, rank=0, phase="forward")], 0, board, None)
if {when} == "before":
    signal.pthread_sigmask(signal.SIG_BLOCK, [interrupt.SIGNAL])
    os.kill(os.getpid(), interrupt.SIGNAL)
try:
    inject("forward")
except KeyboardInterrupt:
    print("interrupted,", board.spent, "spent")
"""


def run(when: str) -> subprocess.CompletedProcess:
    script = INTERRUPTED.format(when=repr(when))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_an_interrupt_does_not_use_a_fault_up() -> None:
    assert run("after").returncode == -signal.SIGKILL
    assert run("before").stdout == "interrupted, 0 spent\n"
