"""Reading files that others write: no symbolic link, nothing but a regular file, never more than a limit.

What is read is what was checked: the descriptor is, not the name. The one kind of link that counts is that of a
ConfigMap's volume, which leads from a name to the file of the newest moment beside it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MIB = 1024 * 1024
SMALL = MIB  # the switch file, and what an agent reads of the reset directory
LARGE = 10 * MIB  # reset.json as the manager reads it

_DATA = "..data"
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: a pipe must not hold us


class UnsafeFile(OSError):
    """There is something, but not a file to be read."""


def read_bytes(path: str | os.PathLike[str], limit: int = SMALL, *, whole_path: bool = False) -> bytes:
    """The content of a regular file.

    Raises OSError with the reason. With `whole_path` no folder on the way may be a symbolic link either.
    """
    path = _of_volume(Path(path))
    descriptor = _open_strictly(path) if whole_path else _open(path)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnsafeFile(f"{path} is not a regular file")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            content = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise UnsafeFile(f"{path} is larger than {limit} bytes")
    return content


def read_text(path: str | os.PathLike[str], limit: int = SMALL, *, whole_path: bool = False) -> str:
    """As `read_bytes`; what isn't UTF-8 is an UnsafeFile, too."""
    try:
        return read_bytes(path, limit, whole_path=whole_path).decode()
    except UnicodeDecodeError as error:
        raise UnsafeFile(f"{path} is not text: {error}") from None


def text_or_empty(path: str | os.PathLike[str], limit: int = SMALL) -> str:
    """For files that may be missing and whose absence says the same as a file that can't be read."""
    try:
        return read_text(path, limit)
    except OSError:
        return ""


def _of_volume(path: Path) -> Path:
    """Where the file of a ConfigMap's volume is: `name` leads to `..data/name`, and `..data` to a folder beside it,
    such as `..2026_01_02`. Any other path as it is."""
    try:
        to, moment = os.readlink(path), os.readlink(path.parent / _DATA)
    except OSError:
        return path
    beside = moment.startswith("..") and moment != ".." and "/" not in moment
    return path.parent / moment / path.name if beside and to == f"{_DATA}/{path.name}" else path


def _open(path: str | os.PathLike[str], folder: int | None = None) -> int:
    try:
        return os.open(path, _FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeFile(f"{path} is a symbolic link") from None
        raise


def _open_strictly(path: Path) -> int:
    """Step by step from the root, each step refusing a symbolic link."""
    *folders, name = path.absolute().parts[1:] or [""]
    here = os.open("/", _FLAGS | os.O_DIRECTORY)
    try:
        for folder in folders:
            if folder == "..":
                raise UnsafeFile(f"{path} goes back with ..")
            try:
                inner = os.open(folder, _FLAGS | os.O_DIRECTORY, dir_fd=here)
            except NotADirectoryError:
                raise UnsafeFile(f"{path} leads through {folder}, a symbolic link or no folder") from None
            here, outer = inner, here
            os.close(outer)
        return _open(name, here)
    finally:
        os.close(here)
