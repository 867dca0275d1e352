"""What the list of processes says of a rank: `... --rank 1 -- train.py --lr 0.1`.

A process started as a rank has that on its command line. A spare becomes a rank later. Its command line has a place
where the rank will be, and Linux shows a command line as it stands in the memory of the process, which may write there.
"""

from __future__ import annotations

OPTION, UNKNOWN = "--rank", "unknown"
_PLACE = f"\0{OPTION}\0{UNKNOWN}\0".encode()
_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/PID/stat, counted from the state."""


def show_rank(rank: str) -> None:
    """Write the rank of this process into its command line, if there is a place for it."""
    try:
        with open("/proc/self/cmdline", "rb") as line, open("/proc/self/stat", "rb") as stat:
            at, fields = line.read().find(_PLACE), stat.read().rpartition(b")")[2].split()
    except OSError:
        return
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if at < 0 or not start or start + at + len(_PLACE) > end or len(rank) > len(UNKNOWN):
        return
    import ctypes

    if ctypes.string_at(start + at, len(_PLACE)) == _PLACE:
        ctypes.memmove(start + at + len(OPTION) + 2, rank.ljust(len(UNKNOWN)).encode(), len(UNKNOWN))
