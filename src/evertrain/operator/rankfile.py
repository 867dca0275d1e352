"""Rank tables as files, in a folder that nodes share: <folder>/<namespace>.<job>/hccl.json, the version beside it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

TABLE, VERSION = "hccl.json", "version"


class RankFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _place(self, namespace: str, job: str) -> Path:
        return self.folder / f"{namespace}.{job}"

    def read(self, namespace: str, job: str) -> tuple[str, str]:
        """The table and its version; empty if there are none."""
        place = self._place(namespace, job)
        return _text(place / TABLE), _text(place / VERSION)

    def write(self, namespace: str, job: str, table: str, version: str) -> None:
        place = self._place(namespace, job)
        place.mkdir(mode=0o744, parents=True, exist_ok=True)
        if place.is_symlink():
            raise OSError(f"{place} is a symbolic link; rank tables are not written through one")
        _replace(place / VERSION, version)
        _replace(place / TABLE, table)

    def remove(self, namespace: str, job: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self._place(namespace, job) / TABLE).unlink()

    def remove_others(self, exists: Callable[[str, str], bool]) -> None:
        """Removes the tables of jobs that were deleted while no operator ran."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for table in self.folder.glob(f"*/{TABLE}"):
                namespace, _, job = table.parent.name.partition(".")
                if job and not exists(namespace, job):
                    self.remove(namespace, job)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return ""


def _replace(path: Path, content: str) -> None:
    """A reader sees the old or the new content, never a part of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
