"""What became of a run of a container, in a file beside its log.

The cluster is told as well, but it may be killed before it has written that down. Without the file a program that has
just begun, or has just come to its end, would be run a second time by the next cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

SUFFIX = ".run"


def name_for(log_name: str) -> str:
    return log_name.removesuffix(".log") + SUFFIX


class Record:
    """The directory is held open: the process moves to another root. A disk that is full doesn't stop the container."""

    def __init__(self, folder: str, log_name: str) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._name = name_for(log_name)
        self._since = 0.0

    def started(self) -> None:
        """Said before it is true: it is better not to run a program than to run it twice."""
        self._since = time.time()
        self._write({"since": self._since})

    def ended(self, code: int, signal: int) -> None:
        self._write({"since": self._since, "until": time.time(), "code": code, "signal": signal})

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder)

    def _write(self, content: dict[str, Any]) -> None:
        new = f".{self._name}"
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            with os.fdopen(os.open(new, flags, 0o600, dir_fd=self._folder), "w") as file:
                json.dump(content, file)
            os.rename(new, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)


def read(folder: str | os.PathLike[str], log_name: str) -> dict[str, Any] | None:
    """None if that run has not begun."""
    try:
        with open(os.path.join(folder, name_for(log_name)), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
