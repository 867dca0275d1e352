"""What the kernel tells about a process, read cheaply: one `pread` of a descriptor that stays open costs 4 us."""

from __future__ import annotations

import os
from dataclasses import dataclass

PF_EXITING = 0x4
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that matter here."""

    state: str
    """R runs, S sleeps, D waits for a device, T stopped, t stopped by a debugger, Z dead."""
    is_exiting: bool
    exit_code: int
    """As `subprocess` has it; means something only while `is_exiting`. The kernel sets it before it tears the memory
    down, so it is known long before the process can be reaped."""
    cpu: float
    """Seconds of CPU time of all its threads."""
    parent: int
    session: int


def parse_stat(data: bytes) -> Stat:
    # The name, in parentheses, may contain anything, parentheses too.
    fields = data[data.rindex(b")") + 2 :].split()
    status = int(fields[49]) if len(fields) > 49 else 0
    return Stat(
        state=fields[0].decode(),
        is_exiting=bool(int(fields[6]) & PF_EXITING),
        exit_code=os.waitstatus_to_exitcode(status) if _is_status(status) else 0,
        cpu=(int(fields[11]) + int(fields[12])) * _TICK,
        parent=int(fields[1]),
        session=int(fields[3]),
    )


def _is_status(status: int) -> bool:
    """A stopped process has the signal that stopped it in this field, which is no exit status."""
    return os.WIFEXITED(status) or os.WIFSIGNALED(status)


def open_stat(pid: int) -> int:
    return os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)


def read_stat(fd: int) -> Stat | None:
    """None when the process is gone."""
    try:
        data = os.pread(fd, 1024, 0)
    except OSError:
        return None
    return parse_stat(data) if data else None


def glance(fd: int) -> tuple[bytes, bool] | None:
    """State and "is exiting" only: what is read hundreds of times a second."""
    try:
        data = os.pread(fd, 1024, 0)
    except OSError:
        return None
    if not data:
        return None
    fields = data[data.rindex(b")") + 2 :].split(b" ", 7)
    return fields[0], bool(int(fields[6]) & PF_EXITING)


def thread_cpu(pid: int) -> float | None:
    """Seconds of CPU time of the main thread alone, to the nanosecond where the kernel keeps it."""
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, IndexError, ValueError):
        pass
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", "rb") as file:
            return parse_stat(file.read()).cpu
    except OSError:
        return None


def all_stats() -> dict[int, Stat]:
    stats: dict[int, Stat] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    stats[int(name)] = parse_stat(file.read())
            except (OSError, ValueError):
                continue
    return stats


def descendants_cpu(pid: int) -> float:
    """Seconds of CPU time of the children of a process, and theirs: its loader's workers."""
    stats = all_stats()
    family, total = {pid}, 0.0
    # A child's number is usually above its parent's, but numbers wrap around; repeat until nobody is added.
    grown = True
    while grown:
        grown = False
        for child, stat in stats.items():
            if stat.parent in family and child not in family:
                family.add(child)
                total += stat.cpu
                grown = True
    return total


def session_members(session: int) -> list[int]:
    """Live processes of a session whose leader has been reaped.

    A living process with the leader's number means that the number is in use again, by somebody else.
    """
    stats = all_stats()
    if session in stats and stats[session].state != "Z":
        return []
    return [pid for pid, stat in stats.items() if stat.session == session and pid != session and stat.state != "Z"]


def catches(pid: int, number: int) -> bool:
    """Does the process handle this signal? One that it does not handle may end it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        pass
    return False
