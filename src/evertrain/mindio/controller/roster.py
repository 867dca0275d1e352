"""Where every rank is, and until when it may stay there. Pure bookkeeping for the machine.

A rank is always in exactly one place. The roster keeps the sets that the machine waits for up to date with every move,
so that one message costs the same in a job of four ranks and of ten thousand. Expiry times sit in a heap; an entry
whose rank has moved on is dropped when it surfaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from evertrain.mindio.plan import Report
from evertrain.mindio.protocol import Out


class Place(Enum):
    ABSENT = "not started yet"
    STARTING = "its process was ordered, it has not reached the training function"
    OUT = "out of the training code, waiting for orders"
    JOINING = "building the process group or repairing"
    INSIDE = "training"
    FINISHED = "the training function returned, waiting for the others"
    STOPPING = "told to leave the training code"
    LEAVING = "told to leave for good, or gone with exit code 0"
    LOST = "its process is of no more use and is not replaced"


AT_WORK = (Place.JOINING, Place.INSIDE, Place.FINISHED)
"""Places that a rank leaves only when it is told to stop."""


@dataclass(slots=True)
class Member:
    rank: int
    incarnation: int = -1
    issued: int = -1
    """The newest incarnation that was ever ordered, a prepared one that came to nothing included."""
    place: Place = Place.ABSENT
    expires: float | None = None
    ordered_at: float = 0.0
    out: Out | None = None
    """What this incarnation last said about its state."""
    attempt: int = -1
    """Of the newest Stop sent to this incarnation; its `Out` counts as the answer when it names the same."""
    seasoned: bool = False
    """This incarnation has been told to go."""
    link_lost: bool = False
    awaits_node: bool = False
    """Its process can't be ordered before its node is back."""
    pid: int = 0
    """Of its process, on its own node; 0 if unknown."""


class Roster:
    def __init__(self, world_size: int) -> None:
        self.members = [Member(rank) for rank in range(world_size)]
        self.starting: set[int] = set()
        self.stopping: set[int] = set()
        self._expiries: list[tuple[float, int]] = []

    def __getitem__(self, rank: int) -> Member:
        return self.members[rank]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def move(self, member: Member, place: Place, expires: float | None = None) -> None:
        if member.place is not place:
            self.starting.discard(member.rank)
            self.stopping.discard(member.rank)
            if place is Place.STARTING:
                self.starting.add(member.rank)
            elif place is Place.STOPPING:
                self.stopping.add(member.rank)
            member.place = place
        self.expire(member, expires)

    def expire(self, member: Member, expires: float | None) -> None:
        member.expires = expires
        if expires is not None:
            heapq.heappush(self._expiries, (expires, member.rank))

    @property
    def deadline(self) -> float | None:
        """The earliest time at which some rank has stayed too long."""
        while self._expiries:
            expires, rank = self._expiries[0]
            if self.members[rank].expires == expires:
                return expires
            heapq.heappop(self._expiries)
        return None

    def pop_expired(self, now: float) -> Member | None:
        deadline = self.deadline
        if deadline is None or deadline > now:
            return None
        _, rank = heapq.heappop(self._expiries)
        member = self.members[rank]
        member.expires = None
        return member

    def reports(self) -> dict[int, Report]:
        """What the ranks that are out have reported."""
        return {
            member.rank: Report(out.step, out.clean, out.fresh, out.checkpoint, out.parts, out.also)
            for member in self.members
            if member.place is Place.OUT and (out := member.out) is not None
        }
