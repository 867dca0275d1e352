"""File systems: made read-only after an error, with errors in their own books, or full.

The kernel tells when a mount changes, and ext4 when it has met an error. How full a file system is has to be asked, and
one whose disk or server hangs doesn't answer, nor does it let go of who has asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evertrain.noded import codes
from evertrain.noded.detectors.base import Tell, aside, changes, now_ms, number
from evertrain.noded.faults import AnyFault, NodeFault

POLL_SECONDS = 30.0
PATIENCE = 10.0
"""Seconds for a file system to say how full it is."""
FULL, FULL_AGAIN = 0.98, 0.95
"""The share at which a file system is full, and under which it no longer is."""
STORAGE = "Storage"


@dataclass(frozen=True, slots=True)
class Mount:
    device: str
    """major:minor"""
    place: str
    read_only: bool
    source: str

    @property
    def id(self) -> int:
        major, _, minor = self.device.partition(":")
        return (int(major) << 20 | int(minor)) & 0x7FFFFFFF


_LINE = re.compile(r"\d+ \d+ (\d+:\d+) \S+ (\S+) (\S+) .*?- \S+ (\S+) (\S+)")
_OCTAL = re.compile(r"\\([0-7]{3})")


def parse_mounts(text: str) -> list[Mount]:
    """/proc/PID/mountinfo. Lines that can't be understood are passed over."""
    found = []
    for line in text.splitlines():
        if match := _LINE.match(line):
            device, place, options, source, super_options = match.groups()
            read_only = "ro" in options.split(",") or "ro" in super_options.split(",")
            place = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), place)
            found.append(Mount(device, place, read_only, source))
    return found


class Mounts:
    """Which mounts could be written to and no longer can. Pure.

    What was read-only from the start is meant to be, unless it was named.
    """

    def __init__(self, named: Iterable[str] = ()) -> None:
        self._named = frozenset(named)
        self._writable: set[tuple[str, str]] = set()
        self.missed: set[int] = set()
        """Numbers of those that could no longer be written to when nobody knew of them here yet."""

    def watched(self, mounts: Iterable[Mount]) -> list[Mount]:
        """Those on disks, and those that were named; of several in one place the last, which covers the others."""
        top = {mount.place: mount for mount in mounts}
        return [m for m in top.values() if m.place in self._named or not self._named and m.source.startswith("/dev/")]

    def faults(self, mounts: Iterable[Mount]) -> list[NodeFault]:
        found: dict[int, NodeFault] = {}
        for mount in self.watched(mounts):
            key = (mount.device, mount.place)
            if not mount.read_only:
                self._writable.add(key)
            elif mount.place in self._named or key in self._writable or mount.id in self.missed:
                self._writable.add(key)
                found.setdefault(mount.id, _fault(mount, codes.READ_ONLY, f"{mount.place} can only be read"))
        return list(found.values())


def full(mounts: Iterable[Mount], usage: Mapping[str, float], before: Iterable[str]) -> list[Mount]:
    """Those that are full, or were and have not become much emptier."""
    were = set(before)
    return [m for m in mounts if usage.get(m.place, 0.0) >= (FULL_AGAIN if m.place in were else FULL)]


def _fault(mount: Mount, code: str, note: str) -> NodeFault:
    return NodeFault(code=code, device=STORAGE, id=mount.id, since_ms=now_ms(), note=note)


def read_usage(place: Path) -> float:
    """The share of a file system that is used, of blocks or of files, whichever is more. May take for ever."""
    stat = os.statvfs(place)
    shares = []
    if usable := stat.f_blocks - stat.f_bfree + stat.f_bavail:
        shares.append(1 - stat.f_bavail / usable)
    if stat.f_files:
        shares.append(1 - stat.f_favail / stat.f_files)
    return max(shares, default=0.0)


def read_errors(sys: Path) -> dict[str, int]:
    """Errors that ext4 file systems have noted, by name of the disk."""
    root = sys / "fs" / "ext4"
    found = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if count := number(folder / "errors_count"):
            found[folder.name] = count
    return found


class Storage:
    name = "storage"

    def __init__(
        self,
        named: Iterable[str] = (),
        *,
        sys: Path = Path("/sys"),
        mountinfo: Path = Path("/proc/self/mountinfo"),
        host: Path = Path("/"),
        every: float = POLL_SECONDS,
    ) -> None:
        """`host` is where the root of the machine is, if this process is in a container."""
        self._mounts = Mounts(named)
        self._sys, self._mountinfo, self._host = sys, mountinfo, host
        self._every = every
        self._full: list[str] = []
        self._asked: dict[tuple[str, str], asyncio.Future[float]] = {}
        """By device and place: not answered yet."""
        self._slow: list[NodeFault] = []
        """Of those that had to be asked, as of the last answer."""

    def resume(self, faults: Iterable[AnyFault]) -> None:
        before = [fault for fault in faults if isinstance(fault, NodeFault)]
        self._mounts.missed = {fault.id for fault in before if fault.code == codes.READ_ONLY}
        self._slow = [fault for fault in before if fault.code in (codes.DISK_FULL, codes.DISK_HANGS)]

    async def run(self, tell: Tell) -> None:
        counters = sorted((self._sys / "fs" / "ext4").glob("*/errors_count"))
        with changes(self._mountinfo, *counters) as news:
            while True:
                mounts = parse_mounts(await asyncio.to_thread(self._mountinfo.read_text, errors="replace"))
                told = self._told_by_kernel(mounts)
                tell([*told, *self._slow])
                self._slow = await self._ask(self._mounts.watched(mounts))
                tell([*told, *self._slow])
                await news.wait(self._every)

    def _told_by_kernel(self, mounts: Sequence[Mount]) -> list[NodeFault]:
        found = self._mounts.faults(mounts)
        for name, count in read_errors(self._sys).items():
            number = next((m.id for m in mounts if m.source == f"/dev/{name}"), 0)
            note = f"{count} errors in the ext4 file system on {name}"
            found.append(
                NodeFault(code=codes.FILE_SYSTEM_ERRORS, device=STORAGE, id=number, since_ms=now_ms(), note=note)
            )
        return found

    async def _ask(self, mounts: Sequence[Mount]) -> list[NodeFault]:
        """One that hangs is waited for once, and not asked again before it has answered."""
        keys = {mount.place: (mount.device, mount.place) for mount in mounts}
        here = set(keys.values())
        self._asked = {key: asked for key, asked in self._asked.items() if key in here or not asked.done()}
        new = {key for key in here if key not in self._asked}
        for device, place in new:
            work = partial(read_usage, self._host / place.lstrip("/"))
            self._asked[device, place] = aside(work, f"statvfs {place}")
        if new:
            await asyncio.wait([self._asked[key] for key in new], timeout=PATIENCE)
        hung = [mount for mount in mounts if not self._asked[keys[mount.place]].done()]
        usage = {mount.place: FULL for mount in hung if mount.place in self._full}
        for place, key in keys.items():
            if self._asked[key].done():
                with contextlib.suppress(OSError):
                    usage[place] = self._asked.pop(key).result()
        filled = full(mounts, usage, self._full)
        self._full = [mount.place for mount in filled]
        found: dict[tuple[int, str], NodeFault] = {}
        for mount in filled:
            found.setdefault((mount.id, codes.DISK_FULL), _fault(mount, codes.DISK_FULL, f"{mount.place} is full"))
        for mount in hung:
            note = f"{mount.place} doesn't answer"
            found.setdefault((mount.id, codes.DISK_HANGS), _fault(mount, codes.DISK_HANGS, note))
        return list(found.values())
