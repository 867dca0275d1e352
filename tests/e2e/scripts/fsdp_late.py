"""Runs train_fsdp.py, in which both holders of shard 1 don't learn that all ranks have met before the update of step 5.

The others have got through and made the update; shard 1 exists at the old step only.
"""

import os
import runpy
import sys

from evertrain.torch import fsdp

meetings = 0
meet = fsdp.StepAside.meet


def meet_but_miss_the_answer(self: fsdp.StepAside) -> None:
    global meetings
    meet(self)
    meetings += 1
    if meetings == 6 and int(os.environ["RANK"]) in (1, 3):
        raise RuntimeError("missed the answer")


fsdp.StepAside.meet = meet_but_miss_the_answer
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
