"""Memory that a failed call of the training function leaves behind in cycles, given back while others wait for it.

A full collection looks at every object of the process: 0.15 s of processor time in one that has imported torch, on all
survivors of a fault at once, and in the middle of a recovery. Whatever is there when training begins is not of a failed
call, so the collector need not look at it again; what is left to look at takes a few milliseconds.
"""

from __future__ import annotations

import gc


def begin() -> None:
    """The training function is about to be called for the first time."""
    gc.collect()  # what is garbage by now would be kept for good
    gc.freeze()


def collect() -> None:
    gc.collect()


def look_at_everything() -> None:
    """The model of before is about to be replaced: it must not be kept because it was there when training began."""
    gc.unfreeze()
