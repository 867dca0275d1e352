"""Runs train_fsdp.py, in which both holders of shard 1 don't learn that all ranks have met before the update of step 5.

The others have got through and made the update; shard 1 exists at the old step only. Called with a folder, in which the
others say that they have, and train_fsdp.py with its arguments.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from evertrain.torch import fsdp

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
updates = 0
meetings = 0
meet = fsdp.StepAside.meet


def meet_but_miss_the_answer(self: fsdp.StepAside) -> None:
    global meetings
    meetings += 1  # also if it is told of the other one's trouble in the middle of it
    number = meetings
    meet(self)
    if number == 6 and rank in (1, 3):
        while not all((folder / f"updated-{other}").exists() for other in (0, 2)):
            time.sleep(0.01)
        raise RuntimeError("missed the answer")


def updated(*_: object) -> None:
    global updates
    updates += 1
    if updates == 6:
        (folder / f"updated-{rank}").touch()


if rank in (0, 2):
    register_optimizer_step_post_hook(updated)
fsdp.StepAside.meet = meet_but_miss_the_answer
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
