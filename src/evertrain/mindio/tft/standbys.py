"""Which processes stand by to take over when the controller is lost.

At most two, on other machines if there are any, else in other processes of the same one. They are asked one after the
other; everybody learns the addresses once a standby listens. The list is looked at again whenever the job is normal, so
that a standby that was lost with its rank gets a successor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from evertrain.mindio.tft.members import Member
from evertrain.mindio.tft.settings import Settings

COUNT = 2


def choose(members: Mapping[int, Member], own: int, healthy: Iterable[int], count: int = COUNT) -> list[int]:
    """Ranks that should host a standby, in the order in which they would take over."""
    here = members[own].ip if own in members else ""
    taken = {here}
    elsewhere: list[int] = []
    beside: list[int] = []
    for rank in sorted(healthy):
        if rank == own:
            continue
        ip = members[rank].ip
        if ip not in taken:
            taken.add(ip)
            elsewhere.append(rank)
        elif ip == here:
            beside.append(rank)
    return (elsewhere or beside)[:count]


class Standbys:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._listening: dict[int, tuple[str, int]] = {}
        self._asked: list[int] = []
        # A standby has siblings that were given their epochs by the same controller.
        self._highest = settings.epoch + (COUNT if settings.passive else 0)
        self._changed = False
        self.stale = True
        """Something changed that could make another choice better."""
        self.missing: set[int] = set()
        """Ranks that have not been told the list."""

    @property
    def due(self) -> bool:
        return self._settings.rank >= 0 and (self.stale or self._changed or bool(self.missing))

    def up(self, rank: int, ip: str, port: int) -> None:
        if rank in self._asked and 0 < port < 65536:
            self._listening[rank] = (ip, port)
            self._changed = True

    def gone(self, rank: int) -> None:
        """This rank's process is lost or was replaced, and a standby in it with it."""
        if rank in self._asked:
            self._asked.remove(rank)
            self._changed |= self._listening.pop(rank, None) is not None
            self.stale = True

    def ask(
        self, members: Mapping[int, Member], healthy: list[int]
    ) -> tuple[list[int], list[tuple[int, str, int]], int]:
        """Whom to ask now to start a standby, the list they are told, and the epoch that goes with it.

        Port 0 stands for "listen somewhere and tell". The epoch is such that every standby gets one of its own.
        """
        usable = set(healthy)
        for rank in [rank for rank in self._asked if rank not in usable]:
            self.gone(rank)
        self.stale = False
        wanted = choose(members, self._settings.rank, healthy)
        new = [rank for rank in wanted if rank not in self._asked][: COUNT - len(self._asked)]
        epoch = self._highest - len(self._asked)
        self._highest += len(new)
        self._asked += new
        return new, [(rank, *self._listening.get(rank, (members[rank].ip, 0))) for rank in self._asked], epoch

    def addresses(self) -> list[tuple[int, str, int]]:
        return [(rank, *self._listening[rank]) for rank in self._asked if rank in self._listening]

    def audience(self, everybody: Callable[[], list[int]]) -> list[int]:
        """Who is to be told the list now."""
        told = everybody() if self._changed else sorted(self.missing) if self._listening else []
        self._changed = False
        self.missing.clear()
        return told
