"""Where a message goes from here. Pure.

The members of a job form a tree: the manager, a proxy per node, an agent and workers under each proxy. Everybody knows
the way up; the way down is learnt from the path that each leaf announces when it joins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from evertrain.taskd.codes import ALL, HAS_PROCESS, LEVELS, NO_PROCESS, AckCode

_DIGITS, _NAME = 9, 64


def is_rank(text: str) -> bool:
    """A number, of a size that a job can have."""
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


class Position(NamedTuple):
    role: str
    server: str
    process: str = NO_PROCESS

    @property
    def is_named(self) -> bool:
        """Its ranks are numbers, so that it can be meant."""
        needed = (self.server, self.process) if self.role in HAS_PROCESS else (self.server,)
        return len(self.process) <= _NAME and all(map(is_rank, needed))

    def __str__(self) -> str:
        text = f"{self.role} {self.server}" + ("" if self.process == NO_PROCESS else f"/{self.process}")
        return text if len(text) <= _NAME else f"{text[:_NAME]}..."


@dataclass(frozen=True, slots=True)
class Refusal:
    code: AckCode
    reason: str


class Here(NamedTuple):
    """The message has arrived."""


class Up(NamedTuple):
    """To the parent."""


class Down(NamedTuple):
    hops: tuple[Position, ...]
    """Members right below that are it, or lead to it."""
    broadcast: bool = False


Way = Here | Up | Down | Refusal


def checked(dst: Position) -> Position | Refusal:
    """The destination in its normal form."""
    if dst.role not in LEVELS:
        return Refusal(AckCode.DST_ROLE_ILLEGAL, f"unknown role {dst.role[:_NAME]!r}")
    server = _ranks(dst.server)
    if server is None:
        return Refusal(
            AckCode.DST_SERVER_RANK_ILLEGAL, f"{dst.server[:_NAME]!r} is neither a list of server ranks nor {ALL}"
        )
    if dst.role not in HAS_PROCESS:
        return Position(dst.role, server)
    process = _ranks(dst.process)
    if process is None:
        return Refusal(
            AckCode.DST_PROCESS_RANK_ILLEGAL, f"{dst.process[:_NAME]!r} is neither a list of ranks nor {ALL}"
        )
    return Position(dst.role, server, process)


def _ranks(text: str) -> str | None:
    names = text.split(",")
    if ALL in names:
        return ALL
    return text if all(map(is_rank, names)) else None


MAX_ROUTES = 200_000
_HOPS = 4
"""Ways to one member that are remembered."""


class Routes:
    """Who takes a position over takes its messages over, as long as it is connected.

    The one that had the position before may still be there, and may come back after a break of the network. It does not
    get the position back by that, only by the end of the one that took it over.
    """

    def __init__(self, own: Position, is_connected: Callable[[Position], bool] = lambda hop: True) -> None:
        """`is_connected`: of one right below us."""
        self.own, self._is_connected = own, is_connected
        self._below: dict[Position, tuple[Position, ...]] = {}
        """By member: those right below us that lead to it, the one that came last first."""

    def learn(self, path: Iterable[Position], via: Position) -> Refusal | None:
        """Members that are reached over `via`."""
        members = list(path)
        strange = [each for each in members if LEVELS.get(each.role, 9) >= LEVELS[self.own.role] or not each.is_named]
        if strange:
            return Refusal(AckCode.CLIENT_ERROR, f"no path to a {self.own.role}: {strange[0].role:.20}")
        if len(self._below) + len(members) > MAX_ROUTES:
            self._forget_the_lost()
            if len(self._below) + len(members) > MAX_ROUTES:
                return Refusal(AckCode.TOO_MANY_REGISTERED, f"more than {MAX_ROUTES} members")
        for member in members:
            hops = self._below.get(member, ())
            if via not in hops:
                self._below[member] = (via, *hops)[:_HOPS]
        return None

    def _forget_the_lost(self) -> None:
        self._below = {member: hops for member, hops in self._below.items() if any(map(self._is_connected, hops))}

    def _hop(self, member: Position) -> Position | None:
        hops = self._below.get(member, ())
        return next((hop for hop in hops if self._is_connected(hop)), hops[0] if hops else None)

    def way(self, dst: Position, from_above: bool = False) -> Way:
        """`dst` is in its normal form."""
        if self._is_here(dst):
            return Here()
        if LEVELS[dst.role] < LEVELS[self.own.role]:
            return self._down(dst)
        if from_above:
            return Refusal(AckCode.NO_ROUTE, f"no route: {dst} is not below {self.own}")
        return Up()

    def _is_here(self, dst: Position) -> bool:
        own = self.own
        if dst.role != own.role or not _names(dst.server, own.server):
            return False
        return own.role not in HAS_PROCESS or _names(dst.process, own.process)

    def _down(self, dst: Position) -> Way:
        several = dst.server == ALL or "," in dst.server or dst.process == ALL or "," in dst.process
        if not several:
            hop = self._hop(dst)
            return Down((hop,)) if hop else Refusal(AckCode.NO_ROUTE, f"no route to {dst}")
        servers, processes = _several(dst.server), _several(dst.process if dst.role in HAS_PROCESS else ALL)
        hops = {
            self._hop(member) or member: None
            for member in self._below
            if member.role == dst.role
            and (servers is None or member.server in servers)
            and (processes is None or member.process in processes)
        }
        return Down(tuple(hops), broadcast=True) if hops else Refusal(AckCode.NO_ROUTE, f"no route to any {dst}")


def _names(ranks: str, rank: str) -> bool:
    return ranks == ALL or rank in ranks.split(",")


def _several(ranks: str) -> frozenset[str] | None:
    """None: all of them."""
    return None if ranks == ALL else frozenset(ranks.split(","))
