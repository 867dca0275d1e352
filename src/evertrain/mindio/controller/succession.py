"""Taking over a job from a controller that is gone. Pure.

A new controller knows what its predecessor told it while that lived (a `Memo` of a few counters) and what ranks and
agents say when they link to it: which processes live, and where each one is. If every rank trains in the same
generation, nothing has to be done at all: training needs no controller. Otherwise everybody is told to stop, and the
job goes through the usual path, whatever the old controller was in the middle of: every `Stop` is answered by an `Out`.
All numbers (generation, attempt, pause, incident, incarnation) continue above those that anybody has heard of.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from evertrain.mindio.controller.incident import Incident
from evertrain.mindio.controller.nodes import Nodes
from evertrain.mindio.controller.policy import PROCESS_LOST, RECOVER_IN_PLACE, RETRY, Decision
from evertrain.mindio.controller.roster import Member, Place
from evertrain.mindio.controller.states import CONSEQUENCES, Action, Gathering, Hold, Idle, Running
from evertrain.mindio.protocol import Continue, Fault, Hello, Memo, Stop

MAX_FAULTS = 16
"""Faults of an open incident that a successor is told."""

_LATE = 5.0
"""Seconds that a rank may take to find the new controller after most others have."""

_NOBODY = (0, 0)
"""Whoever asked for a pause asked another controller, and its link is gone."""

_PLACES = {
    "inside": Place.INSIDE,
    "finished": Place.FINISHED,
    "leaving": Place.FINISHED,
    "out": Place.OUT,
    "starting": Place.STARTING,
}
"""A rank that was released is treated like one that has finished: being released once more does no harm."""


class Succession(Nodes):
    def memo(self, epoch: int) -> Memo:
        """What a successor has to know and can't learn from ranks and agents."""
        incident = self._incident
        return Memo(
            epoch=epoch,
            started=not isinstance(self.state, Idle),
            generation=self.generation,
            attempt=self._attempt,
            restarts=self.restarts,
            incidents=self._incidents,
            open_faults=shifted([f for f, _ in incident.faults[:MAX_FAULTS]], self.wall_offset) if incident else [],
            step=self._step,
            furthest=self._furthest,
            protected=self._protected,
            trained=self._trained,
            issued=[member.issued for member in self._roster],
            aside=sorted(self._aside),
            can_share=self._can_share,
            pauses=self._pauses,
            hold=(self._hold.seconds, self._hold.exit_after) if self._hold else None,
            parts=sorted(self._parts),
            master=self._master,
        )

    def standby_changed(self, addresses: list[str], now: float) -> list[Action]:
        """For the timeline: who could take over from now on."""
        self._actions, self._now = [], max(now, self._now)
        self._tell("standby", addresses=addresses)
        return self._actions

    def take_over(
        self, memo: Memo, agents: Mapping[int, Hello], ranks: Mapping[int, Hello], reason: str, now: float
    ) -> list[Action]:
        """Begin where the predecessor ended. `agents` (by node) and `ranks` have said where they are."""
        self._actions, self._now = [], now
        memo = msgspec.structs.replace(memo, open_faults=shifted(memo.open_faults, -self.wall_offset))
        self._continue(memo, agents, ranks)
        for member in self._roster:
            agent = agents.get(self.node_of(member.rank))
            self._place(member, agent, ranks.get(member.rank), memo)
        self._tell("takeover", reason=reason, ranks=len(ranks), agents=sorted(agents))
        if all(member.rank in self._left for member in self._roster):
            self._end(0, "all ranks are done")
            return self._actions
        missed = [node for node in range(self.nnodes) if node not in agents and not self._has_ranks(node, ranks)]
        gone = [node for node in missed if not self._is_awaited(node)]
        if self._all_at_work(ranks):
            self._go_on(memo)
        else:
            self._stop_the_rest(memo, ranks, explained=bool(gone))
        for node in gone:
            self._on_agent_lost(node, "it did not come to the new controller")
        self._gathered()
        return self._actions

    def _has_ranks(self, node: int, ranks: Mapping[int, Hello]) -> bool:
        return any(rank in ranks for rank in self.ranks_of(node))

    def _continue(self, memo: Memo, agents: Mapping[int, Hello], ranks: Mapping[int, Hello]) -> None:
        hellos = list(ranks.values())
        self._agents = set(agents)
        self.generation = max([memo.generation, *(hello.generation for hello in hellos)])
        self._attempt = max([memo.attempt, *(hello.attempt for hello in hellos)])
        self.restarts, self._incidents = memo.restarts, memo.incidents
        self._step = memo.step
        self._furthest = max([memo.furthest, *(hello.step for hello in hellos)])
        self._protected = memo.protected or bool(hellos)
        self._trained = memo.trained or any(_has_trained(hello) for hello in hellos)
        self._begun_anew, self._completed = not self._trained, self._trained
        self._can_share = memo.can_share
        self._pauses = max([memo.pauses, *(hello.pause for hello in hellos)])
        self._hold = Hold(*memo.hold, asker=_NOBODY) if memo.hold else None
        self._parts = set(memo.parts)
        self._aside = set(memo.aside)
        self._master = memo.master
        for agent in agents.values():
            if agent.node == 0 and agent.master_port and not self._master:
                self._master = f"{agent.address}:{agent.master_port}"

    def _place(self, member: Member, agent: Hello | None, hello: Hello | None, memo: Memo) -> None:
        rank = member.rank
        known = memo.issued[rank] if rank < len(memo.issued) else -1
        lives = agent.incarnations.get(rank) if agent else None
        member.incarnation = hello.incarnation if hello else known if lives is None else lives
        member.issued = max(known, member.incarnation)
        member.ordered_at = self._now
        started = self._now + self._start_time() if self._protected else None
        if agent is not None and rank in agent.left:
            self._roster.move(member, Place.LEAVING)
            self._left.add(rank)
        elif hello is not None:
            place = _PLACES.get(hello.place, Place.STARTING)
            member.out = hello.out
            member.seasoned = _has_trained(hello)
            self._seasoned += int(member.seasoned)
            self._roster.move(member, place, started if place is Place.STARTING else None)
        elif agent is not None and lives is not None and rank in agent.booting:
            self._roster.move(member, Place.STARTING, started)
        elif agent is None and rank in self._aside and self.nnodes > 1:
            # The others had gone on without its node; it is started when the node is back.
            self._roster.move(member, Place.STARTING)
            member.awaits_node = True
        else:
            # It lives without a link, or it has ended; its agent says so in a moment, or it is given up.
            member.link_lost = True
            self._roster.move(member, Place.STOPPING, self._now + max(self.timing.stop, _LATE))

    def _all_at_work(self, ranks: Mapping[int, Hello]) -> bool:
        """Does every rank that the job counts on train, or has it finished?"""
        members = [member for member in self._roster if member.rank not in self._aside | self._left]
        return bool(members) and all(
            member.place in (Place.INSIDE, Place.FINISHED) and ranks[member.rank].generation == self.generation
            for member in members
        )

    def _go_on(self, memo: Memo) -> None:
        """Nobody needs to be interrupted."""
        self._active = [member.rank for member in self._roster if member.rank not in self._aside | self._left]
        inside = {rank for rank in self._active if self._roster[rank].place is Place.INSIDE}
        self.state = Running(set(), inside)
        if memo.open_faults:
            self._reopen(memo.open_faults)
            assert self._incident is not None
            self._incident.step, self._incident.generation = self._step, self.generation
            self._close_incident("recovered")
        go_on = Continue(number=self._pauses)
        for member in self._members():
            self._send(member, go_on)  # nobody here knows who has got how far; what is still wanted is asked for anew
        self._pursue()

    def _stop_the_rest(self, memo: Memo, ranks: Mapping[int, Hello], *, explained: bool) -> None:
        self.state = Gathering()
        reported = [hello for hello in ranks.values() if hello.out is not None and hello.out.fault is not None]
        if memo.open_faults:
            self._reopen(memo.open_faults)
        elif self._trained and not explained and not reported:
            detail = "the controller was lost in the middle of a recovery"
            self._reopen([self._own_fault(self._roster[min(ranks, default=0)], "controller", detail)])
        self._attempt += 1
        stop = Stop(attempt=self._attempt, incident=self._incident.id if self._incident else "")
        for rank in ranks:
            member = self._roster[rank]
            if member.place in (Place.OUT, Place.INSIDE, Place.FINISHED):
                member.attempt = self._attempt
                self._roster.move(member, Place.STOPPING, self._now + self.timing.stop)
                self._send(member, stop)
        for hello in reported:
            assert hello.out is not None and hello.out.fault is not None
            fault = hello.out.fault
            if not (explained and fault.kind in CONSEQUENCES):
                self._list(msgspec.structs.replace(fault, rank=hello.rank), hello.out.step, lost=False)
        if self._incident is not None and self._incident.decision is None:
            self._decided(Decision(RETRY, "a new controller has everybody try again"))
        self._phase("stop")

    def _reopen(self, faults: list[Fault]) -> None:
        """Go on with the predecessor's incident, or begin one of our own."""
        if self._incidents == 0 or faults[0].kind == "controller":
            self._incidents += 1
        self._incident = Incident.open(self._incidents, faults[0], self._now)
        for fault in faults:
            lost = fault.kind in PROCESS_LOST
            self._incident.add(fault, -1, lost=lost, generation=self.generation)
            if lost:
                self._incident.restarted.add(fault.rank)
        self._decided(Decision(RECOVER_IN_PLACE, "a new controller goes on with the recovery"))

    def _come_late(self, member: Member, hello: Hello) -> None:
        """A rank that was linked to the predecessor comes when the rest has been told to stop."""
        missing = member.place is Place.STARTING or (member.place is Place.STOPPING and member.link_lost)
        if missing and hello.place not in ("", "starting"):
            member.link_lost = member.awaits_node = False
            member.attempt = self._attempt
            member.out = hello.out
            self._roster.move(member, Place.STOPPING, self._now + self.timing.stop)
            self._send(member, Stop(attempt=self._attempt, incident=self._incident.id if self._incident else ""))


def _has_trained(hello: Hello) -> bool:
    return hello.place in ("inside", "finished", "leaving") or (hello.out is not None and not hello.out.fresh)


def shifted(faults: list[Fault], seconds: float) -> list[Fault]:
    """The same at other times, where a time is known."""
    return [msgspec.structs.replace(fault, at=fault.at + seconds) if fault.at > 0 else fault for fault in faults]
