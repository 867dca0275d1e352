"""The log of the callback interface: a rotating file in TTP_LOG_PATH. Nothing that goes wrong here reaches training.

Nothing is written before `start`, which `tft_init_controller` and `tft_init_processor` call: importing a library makes
no directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

logger = logging.getLogger("evertrain.mindio.tft")
logger.addHandler(logging.NullHandler())
logger.propagate = False

MAX_BYTES = 10 * 1024 * 1024
FILES = 5
OPEN_MODE, CLOSED_MODE = 0o640, 0o440
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_FORMAT = "%(asctime)s %(levelname)s [%(process)d %(threadName)s] %(message)s"

_handler: logging.Handler | None = None


class _File(RotatingFileHandler):
    """A log file that others of the group may read, and that is nobody's to write once it is closed."""

    def __init__(self, path: Path, shared: bool) -> None:
        self._shared = shared
        self._complained = False
        if path.exists():
            path.chmod(OPEN_MODE)  # closed by an earlier process of the same name
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=FILES - 1, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, OPEN_MODE)
        os.fchmod(descriptor, OPEN_MODE)
        return open(descriptor, self.mode, encoding=self.encoding)  # type: ignore[return-value]

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with self._locked():
                super().emit(record)
        except (OSError, ValueError):  # of the lock, or of a file that could not be opened again
            self.handleError(record)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Several processes write one file: one at a time, and whoever finds it rotated away opens the new one."""
        if not self._shared or self.stream is None:
            yield
            return
        with open(self.baseFilename + ".lock", "a") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            self._follow()
            yield

    def _follow(self) -> None:
        assert self.stream is not None
        with contextlib.suppress(OSError, ValueError):
            if os.fstat(self.stream.fileno()).st_ino == os.stat(self.baseFilename).st_ino:
                return
        self.stream.close()
        self.stream = self._open()

    def doRollover(self) -> None:
        super().doRollover()
        with contextlib.suppress(OSError):
            os.chmod(f"{self.baseFilename}.1", CLOSED_MODE)

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk costs log lines, not the training. Said once."""
        if not self._complained:
            self._complained = True
            print(f"mindio_ttp: the log {self.baseFilename} can't be written: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().close()
        with contextlib.suppress(OSError):
            if not self._shared:
                os.chmod(self.baseFilename, CLOSED_MODE)


def start() -> None:
    """Open the log as the environment says; once per process."""
    global _handler
    if _handler is not None:
        return
    logger.setLevel(_LEVELS.get(os.environ.get("TTP_LOG_LEVEL", "INFO"), logging.INFO))
    _handler = logging.StreamHandler(sys.stdout) if os.environ.get("TTP_LOG_STDOUT", "0") == "1" else _open_file()
    _handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(_handler)


def _open_file() -> logging.Handler:
    shared = os.environ.get("TTP_LOG_MODE", "PER_PROC") == "ONLY_ONE"
    directory = Path(os.environ.get("TTP_LOG_PATH") or "logs")
    try:
        if directory.is_symlink():
            raise OSError("it is a symbolic link")
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        if not stat.S_ISDIR(directory.stat().st_mode):
            raise OSError("it is not a directory")
        return _File(directory / ("ttp_log.log" if shared else f"ttp_log.log.{os.getpid()}"), shared)
    except OSError as error:
        print(f"mindio_ttp: no log in TTP_LOG_PATH={directory}: {error}", file=sys.stderr)
        return logging.NullHandler()


def stop() -> None:
    global _handler
    if _handler is not None:
        logger.removeHandler(_handler)
        _handler.close()
        _handler = None
