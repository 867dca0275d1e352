"""Log files of containers: rotated, read while they are written, and on a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from evertrain.embedded.node import logs
from evertrain.embedded.node.runtime.logs import LogWriter


def lines(folder: Path, attempt: int = 0) -> list[str]:
    chosen = logs.Filter(None, False, None)
    return b"".join(logs.pieces(logs.entries(logs.files(folder, attempt)), chosen)).decode().splitlines()


class Disk:
    """Takes so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 30
        write = os.write

        def limited(descriptor: int, data: bytes) -> int:
            if self.left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = write(descriptor, data[: self.left])
            self.left -= written
            return written

        monkeypatch.setattr(os, "write", limited)


def test_a_full_disk_costs_lines_and_the_log_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    writer = LogWriter(str(tmp_path), "0.log")
    writer.feed("stdout", b"one\n")
    disk.left = 50
    writer.feed("stdout", b"two, of which the disk takes a part\n")
    writer.feed("stdout", b"three, of which it takes nothing\n")
    disk.left = 1 << 30
    writer.feed("stdout", b"four\n")
    writer.close()
    found = lines(tmp_path)
    assert found[0] == "one"
    assert "two, of which the disk takes a part".startswith(found[1])
    assert found[2].startswith("evertrain: ") and found[2].endswith(" bytes of the log could not be written")
    assert found[3:] == ["four"]


def test_a_rotation_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter(str(tmp_path), "0.log", max_bytes=100, max_files=3)
    opened = os.open
    full = [True]

    def limited(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if full[0] and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", limited)
    for number in range(5):
        writer.feed("stdout", b"line %d\n" % number)
    full[0] = False
    for number in range(5, 8):
        writer.feed("stdout", b"line %d\n" % number)
    writer.close()
    assert [path.name for path in logs.files(tmp_path, 0)] == ["0.log.2", "0.log.1", "0.log"]
    found = lines(tmp_path)
    assert found == [f"line {number}" for number in range(8)][-len(found) :]
    assert len(found) >= 7
