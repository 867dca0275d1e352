"""What the controller does all day: it waits for something to do, does it, and waits again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from evertrain.mindio.tft import flows_common as do
from evertrain.mindio.tft import flows_elastic, flows_pause, flows_recover
from evertrain.mindio.tft.flows_common import Failed
from evertrain.mindio.tft.members import Member
from evertrain.mindio.tft.messages import Continue, Destroyed, Exit, Standbys
from evertrain.mindio.tft.numbers import ReportCode
from evertrain.mindio.tft.requests import CONVERSATION, Act, Flow, Over, Signal, Wait

if TYPE_CHECKING:
    from evertrain.mindio.tft.machine import Machine

log = logging.getLogger(__name__)

_WISHES = frozenset({"dump", "pause", "hot switch", "stop switch"})


def lead(m: Machine) -> Flow:
    try:
        if any(member.status.parked for member in m.roster.members.values()):
            # The controller whose place this one took was in the middle of a recovery.
            yield from _recover(m)
        while True:
            yield from _normal(m)
    except Over as end:
        m.state = "EXIT"
        log.error("everybody exits: %s", end)
        say_exit(m)
        m.state = "FINAL"
        raise


def take_over(m: Machine) -> Flow:
    """A standby has become the controller. Ranks that don't find it in time are lost."""
    m.state = "TAKE_OVER"
    members, world = m.roster.members, m.settings.world_size

    def registered(rank: int) -> bool:
        member = members.get(rank)
        return member is not None and member.link is not None and member.groups is not None

    missing = {rank for rank in range(world) if not registered(rank)}

    def check(left: int) -> bool | None:
        if m.touched in missing and registered(m.touched):
            missing.discard(m.touched)
        return True if len(missing) <= left else None

    yield Wait(lambda: check(1), m.settings.takeover)
    # The one that is missing is most likely the process in which the old controller was.
    yield Wait(lambda: check(0), m.settings.grace * 2)
    for rank in sorted(missing):
        if rank not in members:
            members[rank] = Member(rank=rank)
            m.roster.lose(members[rank])
    _adopt_groups(m)
    # A pause that the old controller asked for ends here, and a lock if no recovery follows: nobody else would end it.
    quiet = not m.roster.news and not any(member.status.parked for member in members.values())
    running = [rank for rank in m.roster.healthy if not members[rank].status.parked]
    yield Act(running, lambda sn, _: Continue(sn=sn, unlock=quiet), m.settings.collect_limit, blame=False)
    yield from lead(m)


def _adopt_groups(m: Machine) -> None:
    """Ranks that are gone can't report their groups, but their peers have: they are the same."""
    there = [member for member in m.roster.members.values() if member.groups is not None]
    peers = m.roster.kinds()
    for member in m.roster.members.values():
        if member.groups is None:
            own = [next((group for group in groups if member.rank in group.ranks), None) for groups in peers]
            if own and all(group is not None for group in own):
                member.groups = tuple(group for group in own if group is not None)
                member.arf = all(each.arf for each in there)
                member.zit = all(each.zit for each in there)
                member.uce = True
                m.roster.reported += 1


def _normal(m: Machine) -> Flow:
    """Wait until something happens that isn't training, and deal with it."""
    roster = m.roster
    m.state = "DOWNGRADE" if roster.isolated else "NORMAL"
    m.offered = []  # what was offered for a fault does not bind the platform in what it wants next
    work = yield Wait(lambda: _work(m))
    if work == "proof":
        assert m.unconfirmed is not None
        _, strategy = m.unconfirmed
        m.unconfirmed, m.proof = None, False
        return (yield from do.tell(m, "report_result", int(ReportCode.SUCCESS), do.REPAIR_OK, {}, strategy))
    if work == "standbys":
        return _tell_standbys(m)
    if work == "switch":
        return (yield from flows_pause.switch(m))
    if work == "fault":
        return (yield from _recover(m))
    match work:
        case Signal("dump"):
            yield from _recover(m, dump_wanted=True)
        case Signal("pause"):
            if (yield from flows_pause.pause(m, work)):
                yield from _recover(m)
        case Signal("stop"):
            m.signals.appendleft(work)
            yield from _recover(m)
        case Signal("hot switch"):
            flows_pause.prepare(m, work)
        case Signal("stop switch"):
            flows_pause.cancel(m)
        case Signal("strategy", text="upgrade", param=param) if roster.isolated:
            yield from _grow(m, param)
        case Signal():
            log.warning("the platform said %s %s, and there is no use for it now", work.kind, work.text)


def _work(m: Machine) -> object:
    if m.proof:
        return "proof"
    if m.roster.news:
        return "fault"
    if m.signals:
        return m.pop_signal(_WISHES | CONVERSATION)
    if m.hot and flows_pause.prepared(m):
        return "switch"
    return "standbys" if m.standbys.due and m.roster.initialised() else None


def _recover(m: Machine, dump_wanted: bool = False) -> Flow:
    flows_pause.cancel(m)
    yield from flows_recover.recover(m, dump_wanted)


def _grow(m: Machine, param: str) -> Flow:
    """The ranks that had left may come later than the order to take them back."""

    def check() -> object:
        return "fault" if m.roster.news else (flows_elastic.ready(m) or m.pop_signal(("dump", "stop", "strategy")))

    found = yield Wait(check, m.settings.replacement_limit)
    if found == "fault":
        return
    if isinstance(found, Signal):
        m.signals.appendleft(found)
        return
    if found is None:
        yield from do.tell(
            m, "report_result", int(ReportCode.FAILED), "not all ranks have come back in time", {}, "upgrade"
        )
        return
    try:
        yield from flows_elastic.grow(m, param)
    except Failed as error:
        try:
            yield from flows_recover.last_word(m, error, "upgrade")
        except flows_recover.StartOver:
            log.warning("the platform begins a conversation about the failed growth")


def _tell_standbys(m: Machine) -> None:
    """Ask for standbys where there are too few, and tell everybody where they are."""
    members, standbys = m.roster.members, m.standbys

    def healthy() -> list[int]:
        return [rank for rank in m.roster.healthy if members[rank].link is not None]

    if standbys.stale:
        asked, addresses, epoch = standbys.ask(members, healthy())
        order = Standbys(sn=m.next_sn(), addresses=addresses, epoch=epoch)
        m.send([link for rank in asked if (link := members[rank].link) is not None], order)
    audience = standbys.audience(healthy)
    listening = Standbys(sn=m.next_sn(), addresses=standbys.addresses(), epoch=m.epoch)
    m.send([link for rank in audience if (link := members[rank].link) is not None], listening)


def say_exit(m: Machine) -> None:
    order = Exit(sn=m.next_sn())
    m.send(list(m.links), order)


def say_destroyed(m: Machine) -> None:
    m.send(list(m.links), Destroyed(sn=m.next_sn()))
