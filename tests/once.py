"""What several tests compare with and what takes long: made once in a run of the tests, also by workers of xdist."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

FOLDER = "EVERTRAIN_TEST_RESULTS"
"""Set by conftest.py; all workers have the same."""

Made = TypeVar("Made")


def once(make: Callable[..., Made]) -> Callable[..., Made]:
    """As functools.cache. Who comes while another worker makes the same waits for it; what fails is made again."""

    @functools.cache
    def made(*args: object, **options: object) -> Made:
        what = f"{make.__module__}.{make.__qualname__}{args}{sorted(options.items())}"
        file = Path(os.environ[FOLDER]) / hashlib.sha256(what.encode()).hexdigest()
        file.parent.mkdir(exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                result = make(*args, **options)
                file.with_suffix(".new").write_bytes(pickle.dumps(result))
                file.with_suffix(".new").rename(file)
        return pickle.loads(file.read_bytes())

    return made
