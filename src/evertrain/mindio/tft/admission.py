"""Who may join: greetings, registrations, and the ranks that knock at a standby."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from evertrain.mindio.tft.members import Member
from evertrain.mindio.tft.messages import VERSION, Hello, Refused, Register, Registered, Status, Welcome
from evertrain.mindio.tft.numbers import Result, TrainState
from evertrain.mindio.tft.settings import Settings

if TYPE_CHECKING:
    from evertrain.mindio.tft.machine import Machine

log = logging.getLogger(__name__)

_REMEMBERED = 5
"""A rank that was sent away still counts for this many waiting times: it is looking elsewhere and comes back."""


_JOINING = (TrainState.ISOLATE, TrainState.INIT_FINISH, TrainState.PREREPAIR_FINISH)
"""Of a replacement that a former controller had taken in, but not yet brought into the training."""


class Knocks:
    """Ranks that have come to a standby. When half of the job has come, the old controller is gone."""

    def __init__(self, settings: Settings) -> None:
        self._patience = settings.knock
        self._needed = max(1, (settings.world_size + 1) // 2)
        self._waiting: dict[int, tuple[int, float]] = {}
        self._came: dict[int, float] = {}

    def come(self, link: int, rank: int, now: float) -> bool:
        """Note a rank. True if enough have come."""
        self._waiting[link] = (rank, now + self._patience)
        self._came[rank] = now
        recent = now - _REMEMBERED * self._patience
        return sum(came >= recent for came in self._came.values()) >= self._needed

    def lost(self, link: int) -> None:
        self._waiting.pop(link, None)

    def deadlines(self) -> Iterator[float]:
        return iter([next(iter(self._waiting.values()))[1]] if self._waiting else [])

    def expired(self, now: float) -> list[int]:
        late = [link for link, (_, until) in self._waiting.items() if until <= now]
        for link in late:
            del self._waiting[link]
        return late

    def all(self) -> list[int]:
        links = list(self._waiting)
        self._waiting.clear()
        return links


def hello(machine: Machine, link: int, message: Hello) -> None:
    reason = None
    if message.version != VERSION:
        reason = f"version {message.version} is not spoken here; this is version {VERSION}"
    elif machine.ended is not None:
        reason = f"this controller has ended: {machine.ended}"
    elif message.world_size not in (0, machine.settings.world_size):
        reason = f"rank {message.rank} is one of {message.world_size}, this job has {machine.settings.world_size} ranks"
    elif message.rank < 0 or (message.rank >= machine.settings.world_size and not machine.active):
        reason = f"there is no rank {message.rank}"
    if reason is not None:
        machine.send([link], Refused(reason=reason))
        return machine.close(link, reason)
    machine.hellos[link] = message
    if machine.active:
        return machine.send([link], _welcome(machine))
    if machine.knocks.come(link, message.rank, machine.now):
        machine.takeover()
        machine.send(machine.knocks.all(), _welcome(machine))


def _welcome(machine: Machine) -> Welcome:
    settings = machine.settings
    return Welcome(instance=settings.instance, heartbeat=settings.heartbeat, patience=settings.patience)


def send_away(machine: Machine, link: int) -> None:
    machine.send([link], Refused(reason="this is a standby, and the job has a controller", passive=True))
    machine.close(link, "")


def register(machine: Machine, link: int, message: Register) -> None:
    """Take a process in. What it is told decides whether it takes itself for a replacement."""
    greeting = machine.hellos.get(link)
    if link in machine.links:
        return answer(machine, link, Result.OK)
    if greeting is None or not machine.active:
        return machine.close(link, "a registration was not expected")
    rank = greeting.rank
    if rank >= machine.settings.world_size:
        return answer(machine, link, Result.WAIT_CHECK)
    machine.touched = rank
    if machine.inherits(message):
        machine.inherit(message.repair_id)
    roster = machine.roster
    member = roster.members.get(rank)
    stranger = member is not None and member.process not in ("", greeting.process)
    if member is not None and rank in machine.hot and not member.lost and (message.replaces or stranger):
        return _shadow(machine, link, greeting, message)
    if member is None:
        # A first start, or a rank that comes to a controller that has just taken over.
        member = roster.members[rank] = Member(rank=rank, status=message.status)
        new = message.replaces and machine.repair_id > 0
        member.fresh = new or message.status.run_status in _JOINING
        if new:
            member.status = Status(run_status=TrainState.ISOLATE)
        _link(machine, link, member, greeting)
        roster.judge(member)
        return answer(machine, link, Result.REPAIR if new else Result.OK)
    again = bool(greeting.process) and member.process == greeting.process
    if again or not message.replaces:
        if stranger:
            # It was replaced while it stood still, or its part in a switch was cancelled.
            log.warning("a process that is rank %d no more has come back and is told to end", rank)
            return answer(machine, link, Result.STOP_SERVICE)
        if member.offline or member.left or (member.lost and member.fresh):
            return answer(machine, link, Result.ERROR)
        _link(machine, link, member, greeting)
        roster.update(member, message.status)
        roster.judge(member)
        machine.standbys.missing.add(rank)
        answer(machine, link, Result.REPAIR if message.replaces and member.fresh else Result.OK)
        return machine.resend(member)
    if member.link is not None and member.fault() is None and rank not in roster.errors and rank not in roster.isolated:
        log.warning("a second process has come for rank %d, which is healthy", rank)
        return answer(machine, link, Result.ERROR)
    if member.left:
        return answer(machine, link, Result.ERROR)
    if not member.lost and not member.offline:
        # A new process has come before the end of the old one was noticed. That end is what begins the recovery.
        machine.declare_lost(member)
        machine.run()
    _replace(machine, link, member, greeting)


def _replace(machine: Machine, link: int, member: Member, greeting: Hello) -> None:
    """A new process takes the place of a lost one. It holds nothing yet; what was reported about groups stays."""
    again = member.fresh and not member.lost
    member.lost = member.offline = member.mute = False
    member.fresh = True
    member.status = Status(run_status=TrainState.ISOLATE)
    for done in (machine.stopped, machine.cleaned, machine.roster.dirty):
        done.discard(member.rank)
    _link(machine, link, member, greeting)
    machine.roster.judge(member)
    if again:
        machine.roster.news.add(member.rank)
    machine.standbys.gone(member.rank)
    machine.standbys.missing.add(member.rank)
    answer(machine, link, Result.REPAIR)


def _shadow(machine: Machine, link: int, greeting: Hello, message: Register) -> None:
    rank = greeting.rank
    old = machine.shadows.pop(rank, None)
    if old is not None and old.link is not None:
        machine.close(old.link, "another process has come for the same place")
    shadow = Member(rank=rank, link=link, ip=greeting.ip, process=greeting.process, fresh=True)
    shadow.status = Status(run_status=TrainState.ISOLATE) if message.replaces else message.status
    machine.shadows[rank] = shadow
    machine.links[link] = shadow
    machine.send([link], Registered(result=Result.REPAIR, repair_id=machine.repair_id, hot_switch=True))


def _link(machine: Machine, link: int, member: Member, greeting: Hello) -> None:
    if member.link is not None:
        machine.close(member.link, f"rank {member.rank} has come over another link")
    member.link, member.ip, member.process = link, greeting.ip, greeting.process
    machine.links[link] = member
    machine.roster.grace.pop(member.rank, None)
    machine.departed.discard(member.rank)
    machine.roster.hear(member, machine.now)


def answer(machine: Machine, link: int, result: Result) -> None:
    machine.send([link], Registered(result=result, repair_id=machine.repair_id))
