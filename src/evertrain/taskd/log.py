"""TaskD's log files, with the names, format and variables that operators of MindCluster know.

`run_log` is for everything in Python that a user may want to read: `taskd.log` and standard output. The network parts
have a file each (`manager.log`, `agent-0.log`, ...), which `part_log` opens. Nothing is written before `start`, which
the front door `taskd.python.utils.log` calls.

Several processes of a pod write the same `taskd.log`. Each line is one append, so lines stay whole; whoever finds the
file full renames it under a lock on the directory, and the others notice that the name leads to another file now.

A disk that is full, or a directory that can't be made, costs log lines and is said once on standard error. A directory
that is a symbolic link is refused, as ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

PATH, FILE_LEVEL = "TASKD_LOG_PATH", "TASKD_FILE_LOG_LEVEL"
STD_LEVEL, STDOUT = "TASKD_STD_LOG_LEVEL", "TASKD_LOG_STDOUT"
DEFAULT_DIRECTORY = "./taskd_log/"
DIRECTORY_MODE, FILE_MODE, BACKUP_MODE = 0o750, 0o640, 0o400

MAX_BYTES = 20 * 1024 * 1024
RUN_BACKUPS = 30
PART_BACKUPS, PART_DAYS = 10, 7
RUN_LINE, PART_LINE = 1023, 102300  # characters of a message
_TRACEBACK = 8000
_DAY = 24 * 60 * 60

_LEVELS = {each: getattr(logging, each) for each in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
_STAMP = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}"
# Everything that could begin a new line or move a terminal's cursor.
_CONTROLS = {
    **{code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0))},
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}

OURS, NETWORK = "evertrain.taskd", "evertrain.taskd.net"
"""Loggers: of all our modules, and of those of TaskNet."""

run_log = logging.getLogger("taskd")
run_log.addHandler(logging.NullHandler())
run_log.propagate = False

_started: list[logging.Handler] = []
_parts: dict[str, logging.Handler] = {}
_starting = threading.RLock()
_complaints: set[str] = set()


class RotatingFile(logging.Handler):
    """Appends lines to a file that several processes may share; full files become backups named by their time."""

    def __init__(self, path: Path, backups: int, days: int | None = None, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        self._path, self._backups, self._days, self._max_bytes = path.absolute(), backups, days, max_bytes
        self._descriptor = self._open()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = (self.format(record) + "\n").encode()
            self._follow(len(line))
            os.write(self._descriptor, line)
        except (OSError, ValueError, TypeError) as error:  # the latter two: a message that doesn't fit its arguments
            _complain(f"the log {self._path} can't be written: {error}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        super().close()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, FILE_MODE)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{self._path} is not a regular file")
            if stat.S_IMODE(status.st_mode) != FILE_MODE and status.st_uid == os.geteuid():
                os.fchmod(descriptor, FILE_MODE)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _reopen(self) -> None:
        opened = self._open()
        os.close(self._descriptor)
        self._descriptor = opened

    def _follow(self, length: int) -> None:
        """To the file that the name leads to, and to a new one if that is full."""
        if not self._is_ours():
            self._reopen()
        if not self._is_full(length):
            return
        lock = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._is_ours() and self._is_full(length):
                self._rename()
            self._reopen()
        finally:
            os.close(lock)

    def _is_ours(self) -> bool:
        try:
            there, ours = os.stat(self._path, follow_symlinks=False), os.fstat(self._descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _is_full(self, length: int) -> bool:
        size = os.fstat(self._descriptor).st_size
        return size > 0 and size + length > self._max_bytes

    def _rename(self) -> None:
        pattern = re.compile(re.escape(self._path.stem) + "-" + _STAMP + re.escape(self._path.suffix))
        # Their names sort by time.
        backups = sorted(each for each in self._path.parent.iterdir() if pattern.fullmatch(each.name))
        backup = self._backup(now := time.time())
        if backups and backup <= backups[-1]:  # a clock that was set back, or two in one millisecond
            newest = backups[-1].stem[-len("2026-01-01T00-00-00.000") :]
            backup = self._backup(datetime.strptime(f"{newest}+0000", "%Y-%m-%dT%H-%M-%S.%f%z").timestamp() + 0.0015)
        os.rename(self._path, backup)
        os.chmod(backup, BACKUP_MODE)
        oldest = now - self._days * _DAY if self._days is not None else 0.0
        for index, each in enumerate(reversed([*backups, backup])):
            with contextlib.suppress(OSError):
                if index >= self._backups or each.lstat().st_mtime < oldest:
                    each.unlink()

    def _backup(self, at: float) -> Path:
        stamp = datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%f")[:-3]
        return self._path.with_name(f"{self._path.stem}-{stamp}{self._path.suffix}")


class _StandardOutput(logging.Handler):
    """Whatever standard output is at the moment: programs and tests exchange it."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is None:
            return
        try:
            sys.stdout.write(self.format(record) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError, TypeError) as error:  # closed, gone, or of another encoding
            _complain(f"standard output can't be written: {error}")


class _OneLine(logging.Formatter):
    """A record is one line, however long its message and whatever is in it."""

    limit = RUN_LINE

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().translate(_CONTROLS)
        if len(text) > self.limit:
            text = text[: self.limit] + "..."
        if record.exc_info and record.exc_info[0] is not None:
            text += " | " + "".join(traceback.format_exception(*record.exc_info))[-_TRACEBACK:].translate(_CONTROLS)
        text = text.encode(errors="backslashreplace").decode()  # a lone surrogate, which no stream can take
        return self.head(record, datetime.fromtimestamp(record.created)) + text

    def head(self, record: logging.LogRecord, at: datetime) -> str:
        moment = at.strftime("%Y/%m/%d %H:%M:%S.%f")
        return f"[{record.levelname}]     {moment} {record.process}   {record.filename}:{record.lineno}     "


class _PartLine(_OneLine):
    limit = PART_LINE

    def head(self, record: logging.LogRecord, at: datetime) -> str:
        place = "/".join(Path(record.pathname).parts[-2:])
        thread = record.thread or 0
        return f"[{at:%Y-%m-%d %H:%M:%S.%f}][{record.levelname}]     {thread} {place}:{record.lineno}    "


def start() -> None:
    """Open `taskd.log` and standard output as the environment says; once per process.

    Raises only for a directory that is a symbolic link.
    """
    with _starting:
        if not _started:
            _start()


def _start() -> None:
    directory = _directory()
    file = _file_handler(directory / "taskd.log", RUN_BACKUPS) if directory else None
    levels = [_level(FILE_LEVEL), _level(STD_LEVEL)]
    handlers = [(file, levels[0]), (_StandardOutput() if os.environ.get(STDOUT) != "False" else None, levels[1])]
    for handler, level in handlers:
        if handler is not None:
            handler.setFormatter(_OneLine())
            handler.setLevel(level)
            run_log.addHandler(handler)
            _started.append(handler)
    run_log.setLevel(min(levels))
    if not _started:
        _started.append(logging.NullHandler())
    if directory and (mode := stat.S_IMODE(directory.stat().st_mode)) != DIRECTORY_MODE:
        run_log.warning("taskd log path permission is not 0o750: %s has %#o", directory, mode)


def open_run() -> None:
    """What our own modules say in this process goes to `taskd.log` and standard output."""
    start()
    _attach(OURS, _started)


def open_part(name: str, source: str = OURS) -> None:
    """It also goes to the part's file; with a `source`, only what is said there."""
    open_run()
    _attach(source, [_parts[part_log(name).name]])


def _attach(source: str, handlers: Iterable[logging.Handler]) -> None:
    for handler in handlers:
        logging.getLogger(source).addHandler(handler)  # which adds none twice
    ours = logging.getLogger(OURS)
    ours.setLevel(min(run_log.level, logging.INFO))  # that of parts, whatever the others want
    ours.propagate = False


def stop() -> None:
    """Close everything, for tests and for a process that starts its log anew with another environment."""
    for ours in map(logging.getLogger, (OURS, NETWORK)):
        for handler in ours.handlers[:]:
            ours.removeHandler(handler)
        ours.propagate = True
    for logger, handler in [(run_log, each) for each in _started] + [
        (logging.getLogger(name), each) for name, each in _parts.items()
    ]:
        logger.removeHandler(handler)
        handler.close()
    _started.clear()
    _parts.clear()
    _complaints.clear()


def part_log(name: str) -> logging.Logger:
    """The log of a network part, in `<name>.log`: "manager", "agent-0", "taskd-proxy-0-1794825081", "taskd-worker-3".

    Its lines go nowhere else. Opened once per process and name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise ValueError(f"no name for a log: {name!r}")
    logger = logging.getLogger(f"taskd-part.{name.replace('.', '_')}")
    with _starting:
        if logger.name not in _parts:
            logger.propagate = False
            logger.setLevel(logging.INFO)
            logger.addHandler(_parts.setdefault(logger.name, _part_handler(name)))
    return logger


def _part_handler(name: str) -> logging.Handler:
    directory = _directory()
    handler = _file_handler(directory / f"{name}.log", PART_BACKUPS, PART_DAYS) if directory else None
    handler = handler or logging.NullHandler()
    handler.setFormatter(_PartLine())
    handler.setLevel(logging.INFO)
    return handler


def _directory() -> Path | None:
    """The log directory, made if it wasn't there; None if it can't be."""
    path = Path(os.environ.get(PATH) or DEFAULT_DIRECTORY)
    if path.is_symlink():
        raise Exception("taskd log path should not be a soft link")
    try:
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # by another process, a moment ago
                path.mkdir(DIRECTORY_MODE)
                path.chmod(DIRECTORY_MODE)  # whatever the umask
        if not path.is_dir():
            raise NotADirectoryError(f"{path} is not a directory")
    except OSError as error:
        _complain(f"no log files in {PATH}={path}: {error}")
        return None
    return path.absolute()


def _file_handler(path: Path, backups: int, days: int | None = None) -> logging.Handler | None:
    try:
        return RotatingFile(path, backups, days)
    except OSError as error:
        _complain(f"no log file {path}: {error}")
        return None


def _level(variable: str) -> int:
    text = os.environ.get(variable) or "INFO"
    level = _LEVELS.get(text.strip().upper())
    if level is None:
        _complain(f"{variable}={text} is not one of {', '.join(_LEVELS)}; INFO it is")
    return level if level is not None else logging.INFO


def _complain(text: str) -> None:
    """To standard error, each complaint once: a full disk must not fill the terminal, too."""
    if text not in _complaints and len(_complaints) < 20:
        _complaints.add(text)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"taskd: {text}", file=sys.stderr)
