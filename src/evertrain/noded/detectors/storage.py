"""File systems: made read-only after an error, with errors in their own books, or full.

The kernel tells when a mount changes, and ext4 when it has met an error. How full a file system is has to be asked.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from evertrain.noded import codes
from evertrain.noded.detectors.base import Tell, changes, now_ms, number
from evertrain.noded.faults import NodeFault

POLL_SECONDS = 30.0
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


def read_usage(places: Iterable[str]) -> dict[str, float]:
    """The share of each file system that is used, of blocks or of files, whichever is more. May take long."""
    found = {}
    for place in places:
        try:
            stat = os.statvfs(place)
        except OSError:
            continue
        shares = []
        if usable := stat.f_blocks - stat.f_bfree + stat.f_bavail:
            shares.append(1 - stat.f_bavail / usable)
        if stat.f_files:
            shares.append(1 - stat.f_favail / stat.f_files)
        found[place] = max(shares, default=0.0)
    return found


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

    def resume(self, faults: Iterable[NodeFault]) -> None:
        self._mounts.missed = {fault.id for fault in faults if fault.code == codes.READ_ONLY}

    async def run(self, tell: Tell) -> None:
        counters = sorted((self._sys / "fs" / "ext4").glob("*/errors_count"))
        with changes(self._mountinfo, *counters) as news:
            while True:
                tell(await self._look())
                await news.wait(self._every)

    async def _look(self) -> list[NodeFault]:
        mounts = parse_mounts(await asyncio.to_thread(self._mountinfo.read_text, errors="replace"))
        found = self._mounts.faults(mounts)
        watched = self._mounts.watched(mounts)
        places = {str(self._host / mount.place.lstrip("/")): mount.place for mount in watched}
        usage = await asyncio.to_thread(read_usage, places)
        filled = full(watched, {places[place]: share for place, share in usage.items()}, self._full)
        self._full = [mount.place for mount in filled]
        seen = set()
        for mount in filled:
            if mount.id not in seen:
                seen.add(mount.id)
                found.append(_fault(mount, codes.DISK_FULL, f"{mount.place} is full"))
        for name, count in read_errors(self._sys).items():
            number = next((m.id for m in mounts if m.source == f"/dev/{name}"), 0)
            note = f"{count} errors in the ext4 file system on {name}"
            found.append(
                NodeFault(code=codes.FILE_SYSTEM_ERRORS, device=STORAGE, id=number, since_ms=now_ms(), note=note)
            )
        return found
