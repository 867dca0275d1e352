"""The example, with a step that rank 0 alone completes: rank 3 dies in its gathering, ranks 1 and 2 break off.

half_gathered.py FOLDER STEP arguments of the example...
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from evertrain.torch import sharded
from evertrain.torch.interrupt import Interrupted

folder, step, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
gather, commit = sharded.Sharding._gather, sharded.Sharding._commit


def half(self: sharded.Sharding) -> None:
    gather(self)
    once = folder / f"rank{rank}"
    if self._step != step or rank == 0 or once.exists():
        return
    once.touch()
    patience = time.monotonic() + 30
    while not (folder / "complete").exists() and time.monotonic() < patience:
        time.sleep(0.01)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    self._group.stop()
    raise Interrupted("as if the gathering had broken")


def noted(self: sharded.Sharding) -> None:
    commit(self)
    if self._step == step and rank == 0:
        (folder / "complete").touch()


sharded.Sharding._gather, sharded.Sharding._commit = half, noted
example = Path(__file__).resolve().parents[4] / "examples" / "pytorch" / "train.py"
sys.argv = [str(example), *sys.argv[3:]]
runpy.run_path(str(example), run_name="__main__")
