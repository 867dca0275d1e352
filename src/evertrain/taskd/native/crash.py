"""What a process died of: reads what libtaskd.so wrote, and says it in words.

The agent makes a `Directory`, adds its `environment` to that of the processes that it starts, and when one of them has
ended, asks for its `cause`. Without the library there is only the signal's name.

A line of the file, written by a handler in a dying process:

    taskd-crash 1 signal=11 code=1 address=0x8 pid=4711 thread=4711 time=1794825081882351633 step=12

`sender` stands instead of `address` when a process sent the signal. A handler of the program's own may come between and
end the process by another signal, so there can be several lines; the last one names the death, the first one its cause.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evertrain.taskd.files import read_bytes

log = logging.getLogger(__name__)

VARIABLE = "TASKD_CRASH_DIR"
PREFIX = "taskd-crash-"
LIMIT = 4096  # bytes; the library writes no more
UCE_FAULT, NORMAL_FAULT = 0, 1  # the types that ClusterD knows: uncorrectable memory error, everything else

_LINE = re.compile(
    rb"taskd-crash 1 signal=(\d{1,3}) code=(-?\d{1,10}) (?:address=0x([0-9a-f]{1,16})|sender=(-?\d{1,10}))"
    rb" pid=(\d{1,10}) thread=(\d{1,10}) time=(\d{1,20}) step=(-?\d{1,20})"
)
_MACHINE_CHECKS = {4, 5}  # BUS_MCEERR_AR, BUS_MCEERR_AO
_CODES = {
    signal.SIGSEGV: {
        1: "address not mapped",
        2: "no permission for this address",
        3: "outside of the bounds",
        4: "memory protection key",
        128: "no valid address",
    },
    signal.SIGBUS: {
        1: "misaligned address",
        2: "no memory behind this address: a mapped file was cut short, or shared memory is full",
        3: "hardware error",
        4: "uncorrectable memory error (machine check), in use",
        5: "uncorrectable memory error (machine check), found in the background",
    },
    signal.SIGFPE: {
        1: "integer division by zero",
        2: "integer overflow",
        3: "floating-point division by zero",
        4: "floating-point overflow",
        5: "floating-point underflow",
        6: "inexact floating-point result",
        7: "invalid floating-point operation",
        8: "subscript out of range",
    },
    signal.SIGILL: {
        1: "unknown instruction",
        2: "illegal operand",
        3: "illegal addressing mode",
        4: "illegal trap",
        5: "privileged instruction",
        6: "privileged register",
        7: "coprocessor error",
        8: "internal stack error",
    },
}


@dataclass(frozen=True)
class Record:
    """One fatal signal."""

    number: int
    code: int
    address: int | None
    sender: int | None
    pid: int
    thread: int
    time_ns: int
    step: int | None

    @property
    def memory_error(self) -> bool:
        return self.number == signal.SIGBUS and self.code in _MACHINE_CHECKS

    def words(self) -> str:
        place = f" at {self.address:#x}" if self.address is not None else ""
        thread = "the main thread" if self.thread == self.pid else f"thread {self.thread}"
        step = f", step {self.step}" if self.step is not None else ""
        return f"{name(self.number)} ({self._reason()}){place} in {thread} of process {self.pid}{step}"

    def _reason(self) -> str:
        if self.sender is None:
            known = _CODES.get(signal.Signals(self.number), {}) if self.number in _NAMES else {}
            return known.get(self.code, f"code {self.code}")
        if self.sender == 0:
            return "sent from outside of the container"
        if self.sender != self.pid:
            return f"sent by process {self.sender}"
        if self.number == signal.SIGABRT:
            return "the process aborted itself"
        return "passed on by another handler, which kept code and address"


@dataclass(frozen=True)
class Cause:
    """Why a process is gone, and the type of that fault for ClusterD."""

    fault_type: int
    words: str
    step: int | None = None
    code: int | None = None
    """As subprocess has it, negative for a signal; None if nobody knows."""


_NAMES = {int(each): each.name for each in signal.Signals}


def name(number: int) -> str:
    return _NAMES.get(number, f"signal {number}")


def environment(directory: str | os.PathLike[str]) -> dict[str, str]:
    """What a process needs for its death to be recorded. The directory has to exist and be the agent's own."""
    return {VARIABLE: os.path.abspath(directory)}


def parse(content: bytes) -> list[Record]:
    """The lines that make sense; a process that dies of damaged memory may write anything."""
    records = []
    for line in content.splitlines():
        if match := _LINE.fullmatch(line):
            number, code, address, sender, pid, thread, time_ns, step = match.groups()
            records.append(
                Record(
                    number=int(number),
                    code=int(code),
                    address=int(address, 16) if address else None,
                    sender=int(sender) if sender else None,
                    pid=int(pid),
                    thread=int(thread),
                    time_ns=int(time_ns),
                    step=int(step) if int(step) >= 0 else None,
                )
            )
    return records


def path(directory: str | os.PathLike[str], pid: int) -> Path:
    return Path(directory) / f"crash-{pid}"


def read(directory: str | os.PathLike[str], pid: int, since_ns: int = 0) -> list[Record]:
    """What a process recorded, the first signal first; nothing if it didn't, or if the file isn't to be trusted.

    `since_ns` is when the process was started: process ids come back.
    """
    try:
        content = read_bytes(path(directory, pid), LIMIT)
    except OSError:
        return []
    return [record for record in parse(content) if record.pid == pid and record.time_ns >= since_ns]


def forget(directory: str | os.PathLike[str], pid: int) -> None:
    with contextlib.suppress(OSError):  # whatever lies there: it is in nobody's way
        path(directory, pid).unlink(missing_ok=True)


class Directory:
    """A directory of an agent's own, in which the processes that it starts leave their records.

    If it can't be made, there are none. It is locked as long as the agent lives: those of agents that were killed are
    removed by the next one, and whose they were is not a matter of process ids, which are different in each pod.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._lock: int | None = None
        try:
            _sweep()
            self.path, self._lock = _make()
        except OSError as error:
            log.warning("what processes die of is not recorded: %s", str(error))

    def environment(self) -> dict[str, str]:
        return environment(self.path) if self.path else {}

    def cause(self, pid: int, returncode: int | None, since_ns: int = 0) -> Cause:
        """Why a process that has ended did; its record is gone afterwards."""
        if self.path is None:
            return cause(returncode)
        found = cause(returncode, read(self.path, pid, since_ns))
        forget(self.path, pid)
        return found

    def close(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make() -> tuple[Path, int | None]:
    """The directory and its lock; None on a file system that has no locks, where nothing is swept either."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = None
        try:
            lock = _locked(made)
        except FileNotFoundError:
            pass  # as below
        except OSError:
            return made, None
        if lock is not None and made.is_dir():
            return made, lock
        if lock is not None:
            os.close(lock)  # another agent took it for one that was left behind, before it was locked


def _locked(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock; None if somebody else has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def _sweep() -> None:
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is somebody else's, or gone
            if left.lstat().st_uid == os.geteuid() and (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def cause(returncode: int | None, records: Sequence[Record] = ()) -> Cause:
    """Why a process ended, from its return code (negative: a signal, as subprocess has it) and its records.

    Without a return code, None, the last record is believed.
    """
    if returncode is None:
        if not records:
            return Cause(NORMAL_FAULT, "it is gone")
        returncode = -records[-1].number
    if returncode >= 0:
        return Cause(NORMAL_FAULT, f"exited with code {returncode}", code=returncode)
    number = -returncode
    ending = [index for index, record in enumerate(records) if record.number == number]
    if not ending:
        # Records of a signal that it lived through don't explain the one that it died of.
        return Cause(NORMAL_FAULT, f"killed by {name(number)}", code=returncode)
    story = records[: ending[-1] + 1]
    kind = UCE_FAULT if any(record.memory_error for record in story) else NORMAL_FAULT
    told = story if len(story) <= 3 else [story[0], *story[-2:]]
    words = ", then ".join(record.words() for record in told)
    return Cause(kind, f"killed by {words}", story[-1].step, returncode)
