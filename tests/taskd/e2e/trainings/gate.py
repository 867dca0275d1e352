"""Holds a training at the end of the step that a test names: starting, and the way of an order, take their time."""

import functools
import os
import time
from pathlib import Path

from mindio_ttp import framework_ttp as tft

FIRST = 2
_pause = tft.tft_pause_train


def _held() -> int:
    gate = Path(os.environ["GATE"])
    return int(gate.read_text()) if gate.exists() else FIRST


@functools.wraps(_pause)
def _behind_the_gate(step: int) -> None:
    while step == _held():
        time.sleep(0.02)
    _pause(step)


tft.tft_pause_train = _behind_the_gate
