"""Where libtaskd.so is, and how it is loaded.

It lies where MindCluster's scripts look for it: `taskd/python/cython_api/libs/libtaskd.so` beside this package.
Everything works without it, only a crash is then reported by its signal's name alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from evertrain.taskd.log import run_log
from evertrain.taskd.native.crash import VARIABLE

LIBRARY = Path(__file__).parents[3] / "taskd" / "python" / "cython_api" / "libs" / "libtaskd.so"


def load(path: str | os.PathLike[str] = LIBRARY) -> ctypes.CDLL | None:
    """A handle of the library, or None if it isn't there, can't be loaded or is a symbolic link."""
    if os.path.islink(path):
        run_log.error("libtaskd.so is symlink")
        return None
    try:
        library = ctypes.CDLL(os.fspath(path))
        library.taskd_crash_arm.restype = ctypes.c_int
        library.taskd_crash_arm.argtypes = []
        library.taskd_set_step.restype = None
        library.taskd_set_step.argtypes = [ctypes.c_int64]
    except (OSError, AttributeError) as error:
        run_log.warning("libtaskd.so loaded failed: %s", error)
        return None
    run_log.info("libtaskd.so loaded successfully")
    return library


def step_setter(path: str | os.PathLike[str] = LIBRARY) -> Callable[[int], None]:
    """What a training process calls with the number of each step; that also keeps the library before other handlers.

    Where nobody has asked for crashes to be recorded, or without the library, it does nothing.
    """
    library = load(path) if os.environ.get(VARIABLE) else None
    if library is None:
        if os.environ.get(VARIABLE):
            run_log.warning("the libtaskd.so has not been loaded: a crash is reported by its signal's name alone")
        return _ignore
    library.taskd_crash_arm()  # preloaded, it may have found no directory in the environment then
    set_step: Callable[[int], None] = library.taskd_set_step
    return set_step


def _ignore(step: int) -> None:
    pass
