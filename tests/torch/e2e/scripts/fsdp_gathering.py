"""Runs train_fsdp.py (first argument) with rank 2 killed after its training, while the shards are put together.

A script may gather what it has learned at the end of its training function; a rank that is lost there is replaced.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from torch.distributed.tensor import DTensor

gather = DTensor.full_tensor


def full_tensor(self: DTensor, **options: object) -> object:
    if os.environ["RANK"] == "2" and os.environ["EVERTRAIN_INCARNATION"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return gather(self, **options)


DTensor.full_tensor = full_tensor
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
