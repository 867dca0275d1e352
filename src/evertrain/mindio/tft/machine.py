"""The controller of the callback interface, without clock and socket.

`handle(event, now)` takes what happened and returns what is to be sent; `deadline` says when a `Tick` is due. Inside,
one flow leads: a generator that reads like the script of a recovery (see the `flows_` modules) and asks for orders to
be carried out, for the platform to be told something, or for a condition to come true. Here is what drives it, and
what happens whatever the flow is at: links, registrations, signs of life.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from evertrain.mindio.tft import admission, flows, flows_common
from evertrain.mindio.tft.members import Member, Roster
from evertrain.mindio.tft.messages import (
    Alive,
    AnyMessage,
    Bye,
    DpReport,
    Heartbeat,
    Hello,
    InitReport,
    Leaving,
    Register,
    Reply,
    StandbyUp,
)
from evertrain.mindio.tft.numbers import ControllerRepairType, Result
from evertrain.mindio.tft.requests import (
    CHOICES,
    CONVERSATION,
    Act,
    Action,
    CallPlatform,
    Close,
    Event,
    Flow,
    FromLink,
    LinkLost,
    Outcome,
    Over,
    PlatformDone,
    Send,
    Signal,
    Tell,
    Wait,
)
from evertrain.mindio.tft.settings import EPOCH_REPAIRS, EPOCH_SERIALS, Settings
from evertrain.mindio.tft.standbys import Standbys

log = logging.getLogger(__name__)

_NOT_YET = object()
_STANDSTILL = 1.0
"""Called this many seconds after its deadline, the controller itself has stood still."""


class Machine:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.roster = Roster(settings.world_size)
        self.state = "STANDBY" if settings.passive else "INIT"
        self.active = not settings.passive
        self.ended: str | None = None
        """Why the controller has stopped leading; None while it leads."""
        self.epoch = settings.epoch
        self.repair_id = settings.epoch * EPOCH_REPAIRS
        self.repair_step = 0
        self.repair_type = ControllerRepairType.NONE
        """Of the recovery under way, as the ranks are told."""
        self.unconfirmed: tuple[int, str] | None = None
        """The step that some rank has to get beyond, and the strategy that has then succeeded."""
        self.proof = False
        self.signals: deque[Signal] = deque()
        self.offered: list[str] = []
        self.pause_limit = 0.0
        self.answer_limit = 0.0
        """How long the platform said that its next strategy may take."""
        self.hot: set[int] = set()
        """Ranks for which a second process is being prepared."""
        self.shadows: dict[int, Member] = {}
        self.stopped: set[int] = set()
        self.cleaned: set[int] = set()
        self.touched = -1
        """The rank that the event at hand is about."""
        self.now = 0.0
        self.links: dict[int, Member] = {}
        """Links that have registered."""
        self._dying: set[int] = set()
        """Links of processes that the platform saw end."""
        self.hellos: dict[int, Hello] = {}
        self.knocks = admission.Knocks(settings)
        self.standbys = Standbys(settings)
        self._sn = settings.epoch * EPOCH_SERIALS
        self._act_sn = 0
        self._alive_at = 0.0
        self.departed: set[int] = set()
        """Ranks that heard nothing of this controller for so long that they look for another one."""
        self._calls = itertools.count(1)
        self._out: list[Action] = []
        self._request: Act | Tell | Wait | None = None
        self._until: float | None = None
        self._outcome = Outcome()
        self._pending: set[int] = set()
        self._orders: dict[int, AnyMessage] = {}
        self._call = 0
        self._called: Any = _NOT_YET
        self._running = False
        self._flow: Flow | None = None
        if self.active:
            self._start(flows.lead(self))

    # --- the outside

    def handle(self, event: Event, now: float) -> list[Action]:
        deadline = self.deadline
        if deadline is not None and now - deadline > _STANDSTILL:
            self._stood_still(now - deadline)
        self.now = now
        self.touched = -1
        match event:
            case FromLink(link, message):
                self._receive(link, message)
            case LinkLost(link):
                self._unlink(link)
            case Signal():
                self._signal(event)
            case PlatformDone(call, ok):
                if call == self._call:
                    self._called = ok
        self._expire()
        self.run()
        out, self._out = self._out, []
        return out

    @property
    def deadline(self) -> float | None:
        times = [self._until] if self._until is not None else []
        if self.ended is None:
            # All graces are of one length, so the first one that began is the first one that ends.
            times.extend(itertools.islice(self.roster.grace.values(), 1))
            times.extend(self.knocks.deadlines())
            if self.roster.heard and self.active:
                times.append(next(iter(self.roster.heard.values())) + self.settings.longest_silence)
            if self.links and self.active:
                times.append(self._alive_at)
        return min(times, default=None)

    def known(self, rank: int) -> bool:
        return rank in self.roster.members

    @property
    def linked(self) -> int:
        return len(self.links)

    def progress(self) -> dict[str, Any]:
        """See `tft_query_progress`. It is asked by another thread than that of the events."""
        members = list(self.roster.members.values())
        return {
            "step": max((member.status.step for member in members), default=0),
            "known": [member.rank for member in members if not member.offline],
            "raised": {m.rank: m.status.error for m in members if not m.lost and not m.offline and m.status.error},
        }

    def leave(self) -> list[Action]:
        """The controller is destroyed: the processes neither reconnect nor go elsewhere."""
        self.ended = self.ended or "destroyed"
        flows.say_destroyed(self)
        out, self._out = self._out, []
        return out

    # --- for the flows

    def send(self, links: Sequence[int], message: AnyMessage) -> None:
        if links:
            self._out.append(Send(links, message))

    def close(self, link: int, why: str) -> None:
        self._out.append(Close(link, why))
        self.hellos.pop(link, None)
        self.links.pop(link, None)
        self._dying.discard(link)

    def next_sn(self) -> int:
        self._sn += 1
        return self._sn

    def pop_signal(self, kinds: Iterable[str]) -> Signal | None:
        """The oldest signal of one of these kinds."""
        for place, signal in enumerate(self.signals):
            if signal.kind in kinds:
                del self.signals[place]
                return signal
        return None

    def has_signal(self, kind: str) -> bool:
        return any(signal.kind == kind for signal in self.signals)

    def forget_conversation(self) -> None:
        """What the platform said before it could know what it is about to be told."""
        self.signals = deque(signal for signal in self.signals if signal.kind not in CONVERSATION)

    def forget_choices(self) -> None:
        """What the platform has chosen for faults of before: of those of now it has not heard."""
        self.signals = deque(signal for signal in self.signals if signal.kind not in CHOICES)

    def forget_answered(self) -> None:
        """What the platform said about faults that have been dealt with since."""
        dealt_with = self.roster.errors.keys()
        self.signals = deque(s for s in self.signals if s.kind not in CONVERSATION or not s.faults.keys() <= dealt_with)

    def until_all(self, ranks: Iterable[int], fits: Callable[[int], bool]) -> Callable[[], bool | None]:
        """A check for `Wait` that looks only at the rank about which there is something new."""
        pending = {rank for rank in ranks if not fits(rank)}

        def check() -> bool | None:
            if self.touched in pending and fits(self.touched):
                pending.discard(self.touched)
            return True if not pending else None

        return check

    # --- links and what comes over them

    def _receive(self, link: int, message: AnyMessage) -> None:
        if isinstance(message, Hello):
            return admission.hello(self, link, message)
        if isinstance(message, Register):
            return admission.register(self, link, message)
        member = self.links.get(link)
        if member is None or member.link != link:
            return
        shadow = self.shadows.get(member.rank) is member
        if shadow and not isinstance(message, Heartbeat):
            return  # it only shows how far it is; what it is part of is known from the process that it will replace
        self.touched = member.rank
        if not shadow:
            self.roster.hear(member, self.now)
        match message:
            case Heartbeat(status=status):
                self._status(member, status, shadow)
            case Reply():
                self._reply(member, message)
            case InitReport():
                first = member.groups is None
                if (wrong := self.roster.report(member, message)) is not None:
                    log.error("%s", wrong)
                elif first and self.roster.initialised():
                    flows_common.sane(self)  # better said now than when something has to be repaired
                self.standbys.stale = True
            case DpReport():
                self.roster.report_dp(member, message)
            case StandbyUp(ip=ip, port=port):
                self.standbys.up(member.rank, ip or member.ip, port)
            case Leaving():
                self.departed.add(member.rank)
            case Bye():
                member.left = True
                self.roster.heard.pop(member.rank, None)
                self.roster.judge(member)
                self._drop_pending(member.rank)

    def _status(self, member: Member, status: Any, shadow: bool) -> None:
        if shadow:
            member.status = status
            return
        self.roster.update(member, status)
        if self.unconfirmed is not None and not member.fresh and member.status.step > self.unconfirmed[0]:
            self.proof = True

    def _reply(self, member: Member, reply: Reply) -> None:
        act = self._request
        if isinstance(act, Act) and reply.sn == self._act_sn and member.rank in self._pending:
            self._pending.discard(member.rank)
            self._outcome.replies[member.rank] = reply
            if reply.result != Result.OK:
                self._strand()
        self._status(member, reply.status, False)

    def _unlink(self, link: int) -> None:
        self.knocks.lost(link)
        self.hellos.pop(link, None)
        member = self.links.pop(link, None)
        ended = link in self._dying
        self._dying.discard(link)
        if member is None or member.link != link:
            return
        member.link = None
        self.touched = member.rank
        if self.shadows.get(member.rank) is member:
            del self.shadows[member.rank]
        elif self.ended is None and not member.left and not member.offline:
            self.roster.grace[member.rank] = self.now + self.settings.grace
            if ended:
                self._ended(member)

    def _ended(self, member: Member) -> None:
        """The platform has seen this rank's process end: it needs no time to come back.

        Only a link that breaks proves that the process meant is the one that is known here, and not its successor.
        """
        if member.link is not None:
            self._dying.add(member.link)
        elif member.rank in self.roster.grace:
            if self._deserted():
                return self._step_down()
            self.declare_lost(member)
        elif member.offline:
            self._not_replaced(member)

    def _not_replaced(self, member: Member) -> None:
        """Nobody will come. The old process may still have its link, if what was between has only been cut off."""
        if member.rank in self.roster.errors:
            log.warning("rank %d: the process that was to replace another has ended before it came here", member.rank)
            self.roster.news.add(member.rank)

    def declare_lost(self, member: Member) -> None:
        log.warning("rank %d is lost", member.rank)
        self.roster.lose(member)
        self.standbys.gone(member.rank)
        self._drop_pending(member.rank)

    def _drop_pending(self, rank: int) -> None:
        if rank in self._pending:
            self._pending.discard(rank)
            self._outcome.silent.add(rank)
            self._strand()

    def _strand(self) -> None:
        if isinstance(self._request, Act) and self._request.together:
            self._outcome.stranded |= self._pending
            self._pending.clear()

    def resend(self, member: Member) -> None:
        """The order under way may have been lost with the old link; a processor that has it answers again."""
        if member.rank in self._pending and member.link is not None:
            self.send([member.link], self._orders[member.rank])

    def _expire(self) -> None:
        grace = self.roster.grace
        while grace and next(iter(grace.values())) <= self.now:
            if self._deserted():
                return self._step_down()
            self.declare_lost(self.roster.members[next(iter(grace))])
        for link in self.knocks.expired(self.now):
            admission.send_away(self, link)
        if not self.active or self.ended is not None:
            return
        if self.links and self.now >= self._alive_at:
            self._alive_at = self.now + self.settings.alive_every
            self.send(list(self.links), Alive())
        while self.roster.heard:
            rank, heard = next(iter(self.roster.heard.items()))
            if heard + self.settings.longest_silence > self.now:
                break
            log.warning("rank %d has been silent for %.1f s", rank, self.now - heard)
            self.declare_lost(self.roster.members[rank])

    # --- standing still

    def _stood_still(self, late: float) -> None:
        """Nothing was read meanwhile, so nobody's silence or lateness can be judged by this time."""
        log.warning("this controller has stood still for %.1f s", late)
        for times in (self.roster.heard, self.roster.grace):
            for rank in times:
                times[rank] += late
        if self._until is not None:
            self._until += late

    def _deserted(self) -> bool:
        """Whether as many ranks have gone elsewhere as a standby needs to lead."""
        return 2 * len(self.departed) >= self.settings.world_size

    def _step_down(self) -> None:
        """Two controllers must not both decide what is saved. Those that are left here go and look for the other."""
        self.ended = "it has said nothing for too long, and another controller leads the job"
        log.error("this controller leads no more: %s", self.ended)
        self._flow, self._request, self._until = None, None, None
        for link in list(self.links):
            self.close(link, self.ended)

    # --- the platform

    def _signal(self, signal: Signal) -> None:
        if signal.kind in ("ended", "not replaced"):
            for rank in filter(self.known, signal.faults):
                member = self.roster.members[rank]
                if signal.kind == "not replaced" and member.offline:
                    self._not_replaced(member)
                else:
                    self._ended(member)
            return
        for rank, kind in signal.faults.items():
            if signal.kind in ("stop", "global") and self.known(rank):
                if self.roster.told.get(rank) != 1:
                    self.roster.told[rank] = kind
                if self.roster.errors.get(rank) != 1 and rank not in self.roster.isolated:
                    self.roster.news.add(rank)
        self.signals.append(signal)

    # --- the flow

    def takeover(self) -> None:
        """Half of the ranks have come to this standby: it leads from now on."""
        log.warning("this standby takes over the control of the job")
        self.active = True
        self._start(flows.take_over(self))

    def inherits(self, message: Register) -> bool:
        """Whether a process has come that says that this controller of the platform has the place of another one.

        It has trained under it, or was started to replace a process that had. Only then have all ranks been there.
        """
        if self.settings.rank >= 0 or self.state != "NORMAL" or self.repair_id:
            return False
        trained = message.status.step > 0 or message.status.parked
        return message.repair_id > 0 if message.replaces else trained

    def inherit(self, repair_id: int) -> None:
        """The platform's process was started anew. Whoever does not find this controller in time is lost."""
        log.warning("this controller takes over the control of the job from one that is gone")
        self.repair_id = (repair_id // EPOCH_REPAIRS + 1) * EPOCH_REPAIRS
        self._start(flows.take_over(self))

    def _start(self, flow: Flow) -> None:
        self._flow, self._request, self._until = flow, None, None

    def run(self) -> None:
        """Let the flow go as far as it can."""
        if self._running:
            return
        self._running = True
        try:
            while self._flow is not None:
                try:
                    result = self._result()
                    if result is _NOT_YET:
                        return
                    self._begin(self._flow.send(result))
                except (StopIteration, Over) as end:
                    self._flow, self._request, self._until = None, None, None
                    self.ended = self.ended or str(end) or "over"
                    return
                except Exception:
                    # A mistake in here must not leave the ranks waiting for ever.
                    log.exception("the controller does not know how to go on: everybody exits")
                    self._flow, self._request, self._until = None, None, None
                    self.ended = "an error in the controller"
                    flows.say_exit(self)
                    return
        finally:
            self._running = False

    def _result(self) -> Any:
        late = self._until is not None and self.now >= self._until
        match self._request:
            case None:
                return None
            case Act(blame=blame, healthy=healthy):
                if healthy and self.roster.news:
                    self._outcome.silent |= self._pending
                    self._pending.clear()
                if late:
                    for rank in self._pending:
                        member = self.roster.members[rank]
                        member.mute = member.mute or blame
                        self.roster.judge(member)
                    self._outcome.silent |= self._pending
                    self._pending.clear()
                if not self._pending:
                    self._orders = {}
                    return self._outcome
            case Tell():
                if self._called is not _NOT_YET:
                    return self._called
                if late:
                    return False
            case Wait(check):
                result = check()
                if result is not None or late:
                    return result
        return _NOT_YET

    def _begin(self, request: Act | Tell | Wait) -> None:
        self._request = request
        limit: float | None
        match request:
            case Act(limit=limit):
                self._begin_act(request)
            case Tell(name, args):
                limit = self.settings.action_limit
                self._called = _NOT_YET
                if self.settings.platform:
                    self._call = next(self._calls)
                    self._out.append(CallPlatform(self._call, name, args))
                else:
                    self._called = True
            case Wait(limit=limit):
                pass
        self._until = None if limit is None else self.now + limit

    def _begin_act(self, act: Act) -> None:
        sn = self._act_sn = self.next_sn()
        self._outcome = Outcome()
        members = self.roster.members
        reachable = [rank for rank in act.ranks if members[rank].link is not None or rank in self.roster.grace]
        self._outcome.silent = set(act.ranks) - set(reachable)
        self._pending = set(reachable)
        links = {rank: link for rank in reachable if (link := members[rank].link) is not None}
        if act.same:
            if reachable:
                order = act.make(sn, reachable[0])
                self._orders = dict.fromkeys(reachable, order)
                self.send(list(links.values()), order)
        else:
            self._orders = {rank: act.make(sn, rank) for rank in reachable}
            for rank, link in links.items():
                self.send([link], self._orders[rank])
