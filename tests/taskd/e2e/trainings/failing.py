"""A training, in which a callback of one rank fails, once in the job: FAILS=clean:3.

It is the example, unless FAILS_IN names another one.
"""

import functools
import os
import runpy
from pathlib import Path

from mindio_ttp import framework_ttp as tft

CALLBACK, RANK = os.environ["FAILS"].split(":")
REGISTER = f"tft_register_{CALLBACK}_handler"
SCRIPT = os.environ.get("FAILS_IN", str(Path(__file__).parents[4] / "examples" / "resumable" / "train.py"))
_register = getattr(tft, REGISTER)


def _register_failing(callback):
    @functools.wraps(callback)
    def failing(*args):
        happened = Path(f"failed.{CALLBACK}")  # in the folder of the job
        if os.environ["RANK"] == RANK and not happened.exists():
            happened.touch()
            if CALLBACK == "clean":
                return 1
            raise RuntimeError(f"{CALLBACK} fails")
        return callback(*args)

    _register(failing)


if __name__ == "__main__":
    setattr(tft, REGISTER, _register_failing)
    runpy.run_path(SCRIPT, run_name="__main__")
