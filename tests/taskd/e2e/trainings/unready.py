"""The example, of which rank 3 is killed, once in the job, when the controller knows it and not yet what it holds."""

import os
import runpy
import signal
from pathlib import Path

from mindio_ttp import framework_ttp as tft

_hold = tft.tft_set_optimizer_replica


def _killed_once(rank, replicas):
    happened = Path("killed")  # in the folder of the job
    if rank == 3 and not happened.exists():
        happened.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _hold(rank, replicas)


if __name__ == "__main__":
    tft.tft_set_optimizer_replica = _killed_once
    runpy.run_path(str(Path(__file__).parents[4] / "examples" / "resumable" / "train.py"), run_name="__main__")
