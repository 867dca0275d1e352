"""The files of marks: a folder per job and rank, files of ten megabytes, and a limit for all of it."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from pathlib import Path

log = logging.getLogger(__name__)

BASE = Path("/user/cluster-info/profiling")
VARIABLE = "TASKD_PROFILING_DIR"
"""Another place than the one that the cluster mounts."""
FILE_LIMIT = 10 << 20
_LONGEST = 1024
_KEEP = 3
_SHARE = 5
"""One in so many of the oldest files goes when there is too much."""
_JOBS = 100


class Traces:
    def __init__(self, rank: int, limit_mb: int) -> None:
        self._base = Path(os.environ.get(VARIABLE) or BASE)
        job = os.environ.get("MINDX_TASK_ID") or f"default_task_id_{int(time.time())}"
        self._folder = self._base / job / str(rank)
        self._rank, self._limit = rank, limit_mb << 20
        self._told = False

    def write(self, lines: list[str]) -> None:
        """Append. A disk that is full or a folder that can't be used costs the lines, and is said once."""
        if not lines:
            return
        try:
            self._open_folder()
            data = ("\n".join(lines) + "\n").encode()
            descriptor = os.open(self._file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            with os.fdopen(descriptor, "ab") as file:
                file.write(data)
            self._told = False
        except OSError as error:
            if not self._told:
                log.error("the timings can't be written: %s", str(error))
            self._told = True

    def _open_folder(self) -> None:
        if len(str(self._folder)) > _LONGEST:
            raise OSError(f"{self._folder}: longer than {_LONGEST} characters")
        self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        for folder in (self._folder, self._folder.parent):
            if folder.is_symlink():
                raise OSError(f"{folder} is a symbolic link")

    def _file(self) -> Path:
        """The newest, until it is full."""
        newest = max(_files(self._folder), key=lambda file: int(file.name), default=None)
        if newest is not None and newest.lstat().st_size <= FILE_LIMIT:
            return newest
        name = max(int(time.time()), int(newest.name) + 1 if newest is not None else 0)
        return self._folder / str(name)

    def keep_limit(self) -> None:
        """Remove the oldest files of this rank, of every job, if all together are too much."""
        try:
            self._remove_oldest()
        except OSError as error:
            log.error("the timings that are too much can't be removed: %s", str(error))

    def _remove_oldest(self) -> None:
        used = count = 0
        for folder, _, names in os.walk(self._base):
            count += len(names)
            for name in names:
                with contextlib.suppress(OSError):
                    used += os.lstat(os.path.join(folder, name)).st_size
        if used <= self._limit and count <= self._limit // (10 << 20) * 2:
            return
        for job in sorted(self._base.iterdir())[:_JOBS]:
            files = sorted(_files(job / str(self._rank)), key=lambda file: int(file.name))
            if len(files) > _KEEP:
                for file in files[: max(1, len(files) // _SHARE)]:
                    with contextlib.suppress(OSError):  # somebody else's, or gone
                        file.unlink()


def _files(folder: Path) -> list[Path]:
    """Those of marks: their names are numbers."""
    try:
        return [file for file in folder.iterdir() if _is_number(file.name) and stat.S_ISREG(file.lstat().st_mode)]
    except OSError:
        return []


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()
