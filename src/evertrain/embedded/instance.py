"""The data directory of an embedded cluster, and who runs on it.

A lock on a file in the directory says whether a cluster runs, and it is the kernel that keeps it: it is gone with the
process, however that ended. The file holds what others need to find the cluster. So a second cluster on the same
directory is refused, and one after a crash takes over, without guessing from process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK = "cluster.lock"
KUBECONFIG = "kubeconfig"
LOG = "cluster.log"
_FLOCK = "hhqqi"  # struct flock of 64-bit Linux: type, whence, start, length, pid
_LENGTH = 4096


class InUse(Exception):
    """Another cluster runs on the directory."""

    def __init__(self, folder: Path, running: Running | None) -> None:
        who = f"process {running.pid}" if running and running.pid else "another process"
        super().__init__(
            f"a cluster already runs on {folder} ({who}); use it, end it with "
            f"`evertrain down --data-dir {folder}`, or give this one another --data-dir"
        )
        self.running = running


@dataclass(frozen=True)
class Running:
    """A cluster that runs, as its lock file tells."""

    pid: int
    kubeconfig: str = ""
    """Empty until the cluster serves."""
    server: str = ""


def default_folder() -> Path:
    return Path(os.environ.get("EVERTRAIN_DATA_DIR") or Path.home() / ".evertrain" / "cluster")


class Claim:
    """The directory is ours as long as this is open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError):
            running = _read(self._file)
            os.close(self._file)
            raise InUse(folder, running) from None
        self.left_by = _read(self._file)
        """What a cluster left here that did not end in order."""
        self.announce(Running(os.getpid()))

    def announce(self, running: Running) -> None:
        self._write(json.dumps(asdict(running)).encode())

    def close(self) -> None:
        self._write(b"")
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        # Always the same length, in one piece: nobody reads half of it.
        os.pwrite(self._file, data.ljust(_LENGTH), 0)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find(folder: Path) -> Running | None:
    """The cluster that runs on this directory, if one does."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Asks who would be in the way of a lock, without taking one that might be in somebody's way.
        answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
        if struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK:
            return None
        return _read(file) or Running(0)
    finally:
        os.close(file)


def stop(folder: Path, timeout: float) -> Running | None:
    """End the cluster on this directory in order and wait until it is gone; None if there was none."""
    running = find(folder)
    if running is None:
        return None
    if not running.pid:
        raise TimeoutError(f"the cluster on {folder} is only starting or ending; try again")
    try:
        process = os.pidfd_open(running.pid)
    except ProcessLookupError:
        return running
    try:
        # Named by a lock that is still held, the id is that of the cluster and of no later process.
        if find(folder) != running:
            return running
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], timeout)[0]:
            raise TimeoutError(
                f"process {running.pid} has not ended after {timeout:g} s; `kill -9 {running.pid}` ends it and its "
                "pods at once"
            )
    finally:
        os.close(process)
    return running


def _lock(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def _read(file: int) -> Running | None:
    try:
        found = json.loads(os.pread(file, _LENGTH, 0))
        return Running(int(found["pid"]), str(found["kubeconfig"]), str(found["server"]))
    except (ValueError, KeyError, TypeError):
        return None
