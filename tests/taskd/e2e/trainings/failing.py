"""A training, in which a callback of one rank fails, once in the job: FAILS=clean:3, or kills it: FAILS=repair:3:dies.

It is the example, unless FAILS_IN names another. With REPLACES=no it is not prepared for processes that are replaced.
"""

import functools
import os
import runpy
import signal
from pathlib import Path

from mindio_ttp import framework_ttp as tft

CALLBACK, RANK, *DIES = os.environ["FAILS"].split(":")
REGISTER = f"tft_register_{CALLBACK}_handler"
SCRIPT = os.environ.get("FAILS_IN", str(Path(__file__).parents[4] / "examples" / "resumable" / "train.py"))
_register = getattr(tft, REGISTER)
_init = tft.tft_init_processor


def _register_failing(callback):
    @functools.wraps(callback)
    def failing(*args):
        happened = Path(f"failed.{CALLBACK}")  # in the folder of the job
        if os.environ["RANK"] == RANK and not happened.exists():
            happened.touch()
            if DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            if CALLBACK == "clean":
                return 1
            raise RuntimeError(f"{CALLBACK} fails")
        return callback(*args)

    _register(failing)


def _init_for_good(rank, size, local_copy, tls, tls_info, uce, arf, zit):
    _init(rank, size, local_copy, tls, tls_info, uce, False, False)


if __name__ == "__main__":
    if os.environ.get("REPLACES") == "no":
        tft.tft_init_processor = _init_for_good
    setattr(tft, REGISTER, _register_failing)
    runpy.run_path(SCRIPT, run_name="__main__")
