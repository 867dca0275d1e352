"""Shared memory that a killed process can't remove any more.

A loader's worker hands a batch over in shared memory, which torch makes under a name and nameless again a moment later,
when it is mapped. Killed in between, the worker leaves its batch in memory until the machine restarts. The name begins
with the number of the process, so that whoever knows which processes were a rank's can remove what is left of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")


def remove(pids: Iterable[int], folder: Path = FOLDER) -> list[str]:
    """Remove what these processes have left; a number that is in use (again) is passed over."""
    names = _by_process(folder)
    gone = [pid for pid in set(pids) & names.keys() if not _lives(pid)]
    removed = [name for pid in gone for name in names[pid]]
    for name in removed:
        # Another owner's, if the number was used before: not ours to judge.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(folder / name)
    return removed


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in b"ZX"  # its parent may never ask for a dead one
    except OSError:
        return False


def _by_process(folder: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    try:
        listed = os.listdir(folder)
    except OSError:
        return found  # no such folder on this machine: nothing can be in it
    for name in listed:
        kind, _, rest = name.partition("_")
        number = rest.partition("_")[0]
        if kind == "torch" and number.isdecimal():
            found.setdefault(int(number), []).append(name)
    return found
