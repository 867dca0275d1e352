"""A job under control: its data and the moves that lead it from state to state.

`Machine` hears what happens and calls these moves; here is how a generation comes about, how the job is closed, and how
all of it gets into the timeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from evertrain.mindio import plan
from evertrain.mindio.controller import policy
from evertrain.mindio.controller.incident import Incident, fault_fields, milliseconds, wall_time
from evertrain.mindio.controller.policy import Decision, History, Situation
from evertrain.mindio.controller.roster import AT_WORK, Member, Place, Roster
from evertrain.mindio.controller.states import (
    CONSEQUENCES,
    Action,
    Building,
    CloseGeneration,
    Closing,
    Dumping,
    Gathering,
    Hold,
    Idle,
    OpenGeneration,
    Over,
    Releasing,
    Repairing,
    Running,
    Send,
    Shadow,
    State,
    ToAgent,
)
from evertrain.mindio.protocol import Dump, End, Exit, Fault, Go, Join, Message, Repair, Stop, spans
from evertrain.mindio.protocol import Incident as IncidentMessage
from evertrain.mindio.timing import REPAIR_BYTES_PER_SECOND, Timing


class Job(ABC):
    def __init__(
        self,
        world_size: int,
        timing: Timing,
        max_restarts: int,
        can_dump: bool,
        wall_offset: float,
        elastic: int = 0,
        restarts_asked: bool = True,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"a job has at least one rank, not {world_size}")
        if max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, not {max_restarts}")
        if not 0 <= elastic <= world_size:
            raise ValueError(f"a job of {world_size} ranks can't go on with at least {elastic}")
        self.world_size = world_size
        self.elastic = elastic
        """With how few ranks the job may go on while others are missing; 0 if it has to wait for all."""
        self.timing = timing
        self.max_restarts = max_restarts
        self.restarts_asked = restarts_asked
        """Somebody wants these restarts, even if one begins at step 0; otherwise their number is the default."""
        self.can_dump = can_dump
        self.wall_offset = wall_offset
        self.state: State = Idle()
        self.generation = 0
        self.restarts = 0
        self._roster = Roster(world_size)
        self._history = History()
        self._incident: Incident | None = None
        self._incidents = 0
        self._prefix = ""
        """Of the generation that is open; empty if there is none."""
        self._step = 0
        """Of the last Go."""
        self._furthest = 0
        """The newest step that any rank was known to have completed."""
        self._reached: dict[int, int] = {}
        """By rank that came out since the last Go: the steps it had completed, even if their result is lost."""
        self._seen: dict[int, int] = {}
        """By node: the newest step that its agent has seen. For those who ask; nothing is decided by it."""
        self._distrusted: set[int] = set()
        self._parts: set[str] = set()
        """All parts of the state that any rank is to hold."""
        self._left: set[int] = set()
        self._active: list[int] = []
        """Members of the newest generation."""
        self._aside: set[int] = set()
        """Ranks that the job does not wait for."""
        self._can_share: bool | None = None
        """Can ranks take over the data of others? None as long as nobody has said."""
        self._hold: Hold | None = None
        self._shadow: Shadow | None = None
        self._pauses = 0
        self._protected = False
        self._trained = False
        self._completed = False
        """Some rank has completed a step."""
        self._attempt = 0
        """Counts the Stops of the job, so that an `Out` that crossed with one can be told from its answer."""
        self._seasoned = 0
        """Processes that have been told to go and were not replaced since."""
        self._begun_anew = True
        """All processes are new because they were meant to be: at the start and after a counted restart."""
        self._slowest_start = 0.0
        self._actions: list[Action] = []
        self._now = 0.0

    def saw_step(self, node: int, step: int) -> None:
        """An agent says how far its ranks are."""
        if isinstance(self.state, Running):
            self._seen[node] = step

    # The way through a generation.

    def _recover(self) -> None:
        """Everybody out. Cheap when that is under way already, so that many faults at once stay linear."""
        if isinstance(self.state, Building | Repairing | Running | Releasing):
            self.state = Gathering()
            self._stop_all(self._now + self.timing.stop)
        self._gathered()

    def _stop_all(self, expires: float | None) -> None:
        self._phase("stop")
        self._attempt += 1
        stop = Stop(attempt=self._attempt, incident=self._incident.id if self._incident else "")
        for member in self._roster:
            if member.place in AT_WORK:
                member.attempt = self._attempt
                if expires is not None and member.place is Place.JOINING and member.out is not None:
                    # It may be hashing, loading or receiving, and hears of nothing else meanwhile.
                    busy = member.out.state_bytes / REPAIR_BYTES_PER_SECOND
                    self._roster.move(member, Place.STOPPING, expires + busy)
                else:
                    self._roster.move(member, Place.STOPPING, expires)
                self._send(member, stop)
        self._abandon_generation()

    def _abandon_generation(self) -> None:
        if self._prefix:
            self._actions.append(CloseGeneration(self._prefix))
            self._prefix = ""

    def _gathered(self) -> None:
        """If everybody is out: agree on a step and build the next generation."""
        if not isinstance(self.state, Gathering):
            return
        if self._roster.stopping or len(self._roster.starting) > len(self._roster.starting & self._aside):
            if not self._roster.stopping:
                self._phase("start")
            return
        self._swap()
        outs = {member.rank: member.out for member in self._roster if member.place is Place.OUT and member.out}
        members = list(outs)
        odd = plan.odd_ones_out({rank: out.fingerprint for rank, out in outs.items()})
        if odd:
            norm = next(out.summary for rank, out in outs.items() if rank not in odd)
            differing = "; ".join(f"rank {rank}: {outs[rank].summary or 'no description'}" for rank in odd[:8])
            more = f"; and {len(odd) - 8} more" if len(odd) > 8 else ""
            reason = f"the ranks do not train the same model: {differing}{more}; all others: {norm or 'no description'}"
            return self._end(1, reason, reason)
        start, explanation = plan.choose(self._roster.reports(), self._distrusted, self._parts)
        begins_at_nothing = start is not None and start.fresh and start.step == 0 and self._furthest > 0
        if start is None or (begins_at_nothing and not self._begun_anew):
            return self._nothing_left(start, explanation)
        if begins_at_nothing and not self.restarts_asked:
            return self._end(1, self._too_dear(), self._first_cause())
        self._build(start, members, explanation)

    def _nothing_left(self, start: plan.Start | None, explanation: str) -> None:
        """No state has survived. If all processes are new anyway, going on is a restart; else it takes one."""
        first = self._roster[0]
        if self._incident is None:
            self._list(self._own_fault(first, "repair", explanation), -1, lost=False)
        decision = policy.fallback("no state has survived" if start else explanation, self._situation(first, 0))
        if start is not None and not self.restarts_asked:
            decision = Decision(policy.EXIT, self._too_dear())
        self._decided(decision)
        if start is None or decision.strategy == policy.EXIT:
            return self._give_up_on_processes(decision)
        self._count_restart()
        self._gathered()

    def _too_dear(self) -> str:
        return (
            "no state has survived and there is no checkpoint (--ft-checkpoint-dir): not restarted, because that would "
            "begin at step 0 again; --max-restarts N allows it"
        )

    def _build(self, start: plan.Start, members: list[int], explanation: str) -> None:
        self.generation += 1
        self._prefix = f"g{self.generation}/"
        self._phase("rebuild")
        self._tell("generation", generation=self.generation, step=start.step, ranks=len(members), reason=explanation)
        self._actions.append(OpenGeneration(self._prefix))
        join = Join(
            generation=self.generation,
            spans=spans(members),
            step=start.step,
            prefix=self._prefix,
            need_digest=not start.load,
        )
        self.state = Building(start, self._now + self._rebuild_time(), set(members))
        self._active = members
        self._aside.difference_update(members)
        for member in self._members():
            self._roster.move(member, Place.JOINING)
            self._send(member, join)

    def _rebuild_time(self) -> float:
        return self.timing.rebuild_time(max((each.out.state_bytes for each in self._roster if each.out), default=0))

    def _repair(self, building: Building) -> None:
        start = building.start
        outs = {member.rank: member.out for member in self._roster if member.out is not None}
        parts = {rank: outs[rank].parts for rank in building.digests if rank in outs}
        transfers, explanation = plan.repair(start, parts, building.digests)
        if transfers is None:
            return self._attempt_failed(start.holders[0], explanation)
        self._phase("repair", reason=explanation)
        size = max(out.state_bytes for out in outs.values())
        time = self.timing.repair_time(size * max(transfers.fan_out, 1))
        self.state = Repairing(start, self._now + time, set(building.digests))
        passive = Repair(generation=self.generation, step=start.step, load=start.load)
        for member in self._members():
            sends, receives = transfers.sends.get(member.rank, []), transfers.receives.get(member.rank, [])
            message = passive
            if sends or receives:
                wanted = [(part, source, transfers.digests[part]) for part, source in receives]
                message = Repair(generation=self.generation, step=start.step, sends=sends, receives=wanted)
            self._send(member, message)

    def _go(self, start: plan.Start) -> None:
        if self._incident is not None:
            self._phase("resume")
            self._incident.step = start.step
            # A step that only some had completed when the job stopped is the one that was under way.
            done = min(self._reached.values(), default=self._furthest)
            self._incident.steps_lost = max(done - start.step, 0)
            self._incident.generation = self.generation
        self._step = self._furthest = start.step
        self._reached.clear()
        self._seen.clear()
        self._trained, self._begun_anew = True, False
        self._distrusted.clear()
        self.state = Running(set(self._active), set(self._active))
        go = Go(generation=self.generation, step=start.step, pauses=self._pauses)
        for member in self._members():
            member.seasoned = True
            self._roster.move(member, Place.INSIDE)
            self._send(member, go)
        self._seasoned = len(self._active)
        if self._incident is None:
            self._pursue()

    # The way out.

    def _give_up_on_processes(self, decision: Decision) -> None:
        now, grace = self._now, self.timing.grace
        purpose = "restart" if decision.strategy == policy.RESTART else "exit"
        code = 3 if self.restarts and not decision.script else 1
        deadline = now + self.timing.stop
        self._close(Closing(purpose, code, decision.explanation, deadline, deadline, now + grace))

    def _close(self, closing: Closing) -> None:
        """End the work of all ranks; the state of one is written first, if there is any."""
        released = isinstance(self.state, Releasing | Idle)
        self._drop_plans(closing.reason, keep_pause=closing.purpose == "restart")
        self.state = closing
        if released or not self._trained or not self.can_dump:
            return self._finish(closing)
        for member in self._roster:
            if member.place in (Place.STARTING, Place.STOPPING):
                self._roster.expire(member, None)
        self._stop_all(None)
        self._closing_progress()

    def _closing_progress(self, news: Member | None = None) -> None:
        """Write the checkpoint as soon as everybody who may have a state is out, or has had its time."""
        closing = self.state
        assert isinstance(closing, Closing)
        if self._roster.stopping and closing.deadline > self._now:
            # After the first deadline the first rank that has anything to write will do.
            able = closing.overdue and news is not None and news.out is not None and news.out.clean
            if not able or (len(self._parts) > 1 and not self._can_dump()):
                return
        elif (
            self._roster.stopping and not closing.overdue and closing.last_deadline > self._now and not self._can_dump()
        ):
            closing.overdue, closing.deadline = True, closing.last_deadline
            return
        self._dump(closing, set(), set())

    def _can_dump(self) -> bool:
        return bool(plan.dump_sources(self._roster.reports(), self._distrusted, self._parts)[1])

    def _dump(self, closing: Closing, tried: set[int], written: set[tuple[int, str]]) -> None:
        """Have every part of the newest clean step written, one rank for each; what is written already stays."""
        excluded = self._distrusted | tried
        step, writers, explanation = plan.dump_sources(self._roster.reports(), excluded, self._parts)
        if not writers or closing.dump_deadline <= self._now:
            return self._finish(closing)
        self._phase("dump", reason=explanation)
        due = {rank: {part for part in parts if (step, part) not in written} for rank, parts in writers.items()}
        waiting = {rank: parts for rank, parts in due.items() if parts}
        if not waiting:
            return self._finish(closing)
        closing.mark = closing.mark or f"dump at {wall_time(self._now, self.wall_offset)}"
        self.state = Dumping(closing, step, waiting, closing.dump_deadline, tried, written)
        for rank, parts in waiting.items():
            self._send(self._roster[rank], Dump(step=step, parts=tuple(sorted(parts)), mark=closing.mark))

    def _finish(self, closing: Closing) -> None:
        if closing.purpose != "restart":
            return self._end(closing.code, closing.reason, self._first_cause() if closing.purpose == "exit" else "")
        self._abandon_generation()
        self._count_restart()
        self._distrusted.clear()
        self._left.clear()
        self._aside.clear()
        self.state = Gathering()
        leave = Exit(reason=closing.reason)
        for member in self._roster:
            if member.place is not Place.LOST:
                self._send(member, leave)
            self._spawn(member)
        self._phase("start")
        if not self._protected:
            self._close_incident("restarted")

    def _first_cause(self) -> str:
        """What the incident began with, leaving out what survivors merely saw of it."""
        faults = [fault for fault, _ in self._incident.faults] if self._incident else []
        if not faults:
            return ""
        first = next((fault for fault in faults if fault.kind not in CONSEQUENCES), faults[0])
        if first.kind == "script":  # the reason says what is wrong; this is the place in the script
            return f"rank {first.rank}, here:\n{first.stack.rstrip()}" if first.stack else ""
        stack = f"{first.stack.rstrip()}\n" if first.stack else ""
        same = sorted({fault.rank for fault in faults if (fault.kind, fault.detail) == (first.kind, first.detail)})
        many = f" (the same on ranks {policy.rank_list(same)})" if len(same) > 1 else ""
        return f"{stack}rank {first.rank}: {policy.describe(first)}{many}"

    def _count_restart(self) -> None:
        self.restarts += 1
        self._begun_anew = True
        if self._incident is not None:
            self._incident.all_restarted = True

    def _end(self, code: int, reason: str, cause: str = "") -> None:
        if self._incident is not None:
            self._close_incident("ended")
        self._abandon_generation()
        self._drop_plans(reason)
        leave = Exit(reason=reason)
        for member in self._roster:
            if member.place not in (Place.LOST, Place.ABSENT) and member.rank not in self._left:
                self._send(member, leave)
            member.expires = None
        self._tell("ended", code=code, reason=reason)
        self._actions.append(ToAgent(End(code=code, reason=reason, cause=cause)))
        self.state = Over(code, reason)

    # What is written down.

    def _attempt_failed(self, rank: int, detail: str, kind: str = "repair") -> None:
        """The recovery did not get through although no process failed: try again, or fall back."""
        member = self._roster[rank]
        self._list(self._own_fault(member, kind, detail), self._step_of(member), lost=False)
        assert self._incident is not None
        self._incident.failed_generations.add(self.generation)
        attempts = len(self._incident.failed_generations)
        decision = policy.after_failed_attempt(attempts, detail, self._situation(member, self._step))
        self._decided(decision)
        if decision.strategy == policy.RETRY:
            self._recover()
        else:
            self._give_up_on_processes(decision)

    def _list(self, fault: Fault, step: int, *, lost: bool) -> bool:
        """Put a fault into the open incident, or open one with it. False if it is listed already."""
        if self._incident is None:
            self._incidents += 1
            self._incident = Incident.open(self._incidents, fault, self._now)
        if not self._incident.add(fault, step, lost=lost, generation=self.generation):
            return False
        self._tell("fault", **fault_fields(fault, step))
        return True

    def _explain(self, fault: Fault) -> None:
        """A process that was given up turns out to have ended."""
        if fault.kind == "exit" and self._incident is not None and self._incident.explain(fault):
            self._tell("fault", update=True, **fault_fields(fault, -1))

    def _forgive_consequences(self) -> None:
        """A process died: survivors that saw broken links before that was known did not fail themselves."""
        assert self._incident is not None
        for rank, step in self._incident.consequences:
            self._history.forgive(rank, step)
        self._incident.consequences.clear()
        self._incident.failed_generations.discard(self.generation)

    def _decided(self, decision: Decision) -> None:
        assert self._incident is not None
        self._incident.decide(decision)
        self._tell("decision", decision=decision.strategy, reason=decision.explanation)

    def _situation(self, member: Member, step: int) -> Situation:
        return Situation(
            step=step,
            starting=member.place is Place.STARTING or (member.link_lost and member.out is None),
            trained=self._trained,
            protected=self._protected,
            released=isinstance(self.state, Releasing),
            world_size=self.world_size,
            restarts_used=self.restarts,
            max_restarts=self.max_restarts,
            spare=self._has_replacement(member.rank),
            others=self._others(member.rank),
            completed=self._completed,
            asked=self.restarts_asked,
        )

    # What happens on purpose, or without everybody: see `planned`.

    @abstractmethod
    def _pursue(self) -> None:
        """If something waits for the end of a step, have all ranks pause there."""

    @abstractmethod
    def _swap(self) -> None:
        """Everybody is out: a prepared process takes its rank's place."""

    @abstractmethod
    def _take_shadow(self, member: Member) -> bool:
        """The rank's process is lost; True if a prepared one takes its place."""

    @abstractmethod
    def _drop_plans(self, why: str, *, keep_pause: bool = False) -> None:
        """Nothing comes of a pause or a switch any more; a pause may outlive the processes."""

    @abstractmethod
    def _has_replacement(self, rank: int) -> bool:
        """A process for this rank would be there at once."""

    @abstractmethod
    def _others(self, rank: int) -> int:
        """How many ranks may go on without this one; 0 if they have to wait for it."""

    # Who has the processes: see `nodes`.

    @abstractmethod
    def _order_process(self, member: Member) -> None:
        """Have the member's new process started."""

    @abstractmethod
    def _has_spare(self, rank: int) -> bool:
        """A warm spare waits where this rank's process is started."""

    # Small helpers.

    def _members(self) -> Iterator[Member]:
        """Of the newest generation."""
        return (self._roster[rank] for rank in self._active)

    def _member(self, rank: int, incarnation: int) -> Member | None:
        """The rank, if this is its current incarnation; an older one has no say any more."""
        if 0 <= rank < self.world_size and self._roster[rank].incarnation == incarnation:
            return self._roster[rank]
        return None

    def _step_of(self, member: Member) -> int:
        """Of a rank that is out; what it is at while it trains, nobody here knows."""
        return member.out.step if member.out is not None and member.place is Place.OUT else -1

    def _spawn(self, member: Member) -> None:
        if self._incident is not None:
            self._incident.restarted.add(member.rank)
        self._seasoned -= int(member.seasoned)
        member.seasoned = False
        if self._take_shadow(member):
            return
        member.issued += 1
        member.incarnation = member.issued
        member.attempt = -1
        member.out = None
        member.link_lost = False
        member.pid = 0
        member.ordered_at = self._now
        self._distrusted.discard(member.rank)
        # A script without Evertrain never gets to a training function, so nobody waits for it until some rank did.
        expires = self._now + self._start_time() if self._protected else None
        self._roster.move(member, Place.STARTING, expires)
        self._order_process(member)

    def _start_time(self) -> float:
        """A replacement gets at least twice the time that the slowest start took."""
        return max(self.timing.start, 2 * self._slowest_start)

    def _own_fault(self, member: Member, kind: str, detail: str) -> Fault:
        return Fault(kind=kind, rank=member.rank, incarnation=member.incarnation, detail=detail, at=self._now)

    def _send(self, member: Member, message: Message) -> None:
        self._actions.append(Send(member.rank, member.incarnation, message))

    def _phase(self, phase: str, **fields: Any) -> None:
        if self._incident is not None and (ended := self._incident.enter(phase, self._now)) is not None:
            name, took = ended
            self._tell("phase", phase=name, ms=milliseconds(took), next=phase, **fields)

    def _close_incident(self, outcome: str) -> None:
        assert self._incident is not None
        record = self._incident.record(outcome, self._now, self.wall_offset)
        self._incident = None
        self._tell_record(record)

    def _tell(self, event: str, **fields: Any) -> None:
        record: dict[str, Any] = {"event": event}
        if self._incident is not None:
            record["incident"] = self._incident.id
        record.update(fields)
        self._tell_record(record)

    def _tell_record(self, record: dict[str, Any]) -> None:
        record["at"] = wall_time(self._now, self.wall_offset)
        record["t"] = self._now
        self._actions.append(ToAgent(IncidentMessage(record=record)))
