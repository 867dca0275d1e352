"""The training of `examples/resumable`, led by the hand.

It trains up to the step that stands in the file `allowed`, and ends at the one in the file `last`. A rank that finds a
file `raise.RANK` raises what stands there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

sys.path.pop(0)  # this folder has a `taskd`, too
sys.path.insert(0, os.getcwd())  # the code of the job

import train  # type: ignore[import-not-found]

POLL = 0.005


def inject(job: train.Job) -> None:
    while job.step >= int((job.directory / "allowed").read_text()):
        time.sleep(POLL)
    with contextlib.suppress(FileNotFoundError):
        job.options.steps = int((job.directory / "last").read_text())
    order = job.directory / f"raise.{job.rank}"
    with contextlib.suppress(FileNotFoundError):
        kind = order.read_text()
        order.unlink()
        train.FAULTS[kind](job)


if __name__ == "__main__":
    train.Job.inject = inject
    train.main()
