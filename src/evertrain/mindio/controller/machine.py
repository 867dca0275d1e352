"""The controller's decisions, as a machine without clock, socket or process.

`handle` takes one event and the time and returns what to do about it; `deadline` says when to come back with a `Tick`
if nothing happens before. Everything else about a job (who connects how, who starts processes) is the shell's business.

There is one way through the states, and start, recovery and restart all take it:

    Idle -> Gathering -> Building -> Repairing -> Running -> Releasing -> Ended
               ^____________|____________|___________|            (a fault: everybody out again)

    any state -> Closing -> Dumping -> Gathering (restart) or Ended (termination, giving up)

A fault at any time tells every rank that is at work to stop, orders a replacement for the one whose process is lost,
and gathers again; a generation that was being built is abandoned. Every state that waits has a deadline with a next
step. Three don't wait but rest, and leave only when something happens: Idle (no agent yet), Running, and Releasing (the
script's own code after the training may take its time); a script that does not use Evertrain rests in Gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evertrain.mindio import plan
from evertrain.mindio.controller import policy
from evertrain.mindio.controller.incident import Incident, fault_fields, milliseconds, wall_time
from evertrain.mindio.controller.policy import Decision, History, Situation
from evertrain.mindio.controller.roster import AT_WORK, Member, Place, Roster
from evertrain.mindio.protocol import (
    Dump,
    Dumped,
    End,
    Ended,
    Exit,
    Fault,
    Finished,
    Go,
    Hello,
    Join,
    Joined,
    Log,
    Message,
    Observed,
    Out,
    Ping,
    Release,
    Repair,
    Repaired,
    Resumed,
    Spawn,
    Started,
    Stop,
    Suspect,
    Terminate,
)
from evertrain.mindio.protocol import Incident as IncidentMessage
from evertrain.mindio.timing import Timing

# --- events and actions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromRank:
    rank: int
    incarnation: int
    message: Message


@dataclass(frozen=True, slots=True)
class FromAgent:
    message: Message


@dataclass(frozen=True, slots=True)
class LinkLost:
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class AgentLost:
    reason: str = "the link to the agent broke"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = FromRank | FromAgent | LinkLost | AgentLost | Tick


@dataclass(frozen=True, slots=True)
class Send:
    """To this incarnation of the rank only; if it is not linked any more, the message is void."""

    rank: int
    incarnation: int
    message: Message


@dataclass(frozen=True, slots=True)
class ToAgent:
    message: Message


@dataclass(frozen=True, slots=True)
class OpenGeneration:
    """Accept store keys with this prefix."""

    prefix: str


@dataclass(frozen=True, slots=True)
class CloseGeneration:
    """Forget the keys with this prefix and answer who waits for one with an error."""

    prefix: str


Action = Send | ToAgent | OpenGeneration | CloseGeneration

# --- states ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Idle:
    """No agent yet."""


@dataclass(slots=True)
class Gathering:
    """Waits until every rank is out; each one has its own expiry in the roster."""


@dataclass(slots=True)
class Building:
    """The ranks connect to each other and hash their copies."""

    start: plan.Start
    deadline: float
    waiting: set[int]
    digests: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Repairing:
    """Copies travel."""

    start: plan.Start
    deadline: float
    waiting: set[int]


@dataclass(slots=True)
class Running:
    waiting: set[int]
    """Ranks that have not completed a step since `Go`."""
    unfinished: set[int]


@dataclass(slots=True)
class Releasing:
    """The training is over; the scripts run to their ends."""


@dataclass(slots=True)
class Closing:
    """Everybody who can gets out, so that somebody can write the last checkpoint."""

    purpose: str
    """restart, exit or terminate."""
    code: int
    reason: str
    deadline: float
    last_deadline: float
    """How long to wait on if nobody with a clean state is out yet."""
    dump_deadline: float


@dataclass(slots=True)
class Dumping:
    closing: Closing
    rank: int
    deadline: float
    tried: set[int]


@dataclass(slots=True)
class Over:
    code: int
    reason: str


State = Idle | Gathering | Building | Repairing | Running | Releasing | Closing | Dumping | Over

CONSEQUENCES = frozenset({"link", "disconnected"})
"""What survivors see of somebody else's fault. While an incident is open these are not faults of their own."""


class Machine:
    """Leads a job of `world_size` ranks from its start to its end.

    `wall_offset` is wall-clock time minus monotonic time, for the timestamps in the records.
    """

    def __init__(
        self,
        world_size: int,
        timing: Timing,
        *,
        max_restarts: int = 0,
        can_dump: bool = True,
        wall_offset: float = 0.0,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"a job has at least one rank, not {world_size}")
        if max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, not {max_restarts}")
        self.world_size = world_size
        self.timing = timing
        self.max_restarts = max_restarts
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
        self._distrusted: set[int] = set()
        self._left: set[int] = set()
        self._seeds: dict[int, int] = {}
        self._protected = False
        self._trained = False
        self._attempt = 0
        """Counts the Stops of the job, so that an `Out` that crossed with one can be told from its answer."""
        self._seasoned = 0
        """Processes that have been told to go and were not replaced since."""
        self._begun_anew = True
        """All processes are new because they were meant to be: at the start and after a counted restart."""
        self._slowest_start = 0.0
        self._actions: list[Action] = []
        self._now = 0.0
        self._handlers: dict[type[Message], Callable[[Member, Any], None]] = {
            Out: self._on_out,
            Joined: self._on_joined,
            Repaired: self._on_repaired,
            Resumed: self._on_resumed,
            Finished: self._on_finished,
            Dumped: self._on_dumped,
            Log: self._on_log,
        }
        self._agent_handlers: dict[type[Message], Callable[[Any], None]] = {
            Hello: self._on_agent,
            Started: self._on_started,
            Observed: self._on_observed,
            Ended: self._on_ended,
            Suspect: self._on_suspect,
            Terminate: self._on_terminate,
        }

    # What the shell asks.

    def handle(self, event: Event, now: float) -> list[Action]:
        self._actions, self._now = [], max(now, self._now)
        if not isinstance(self.state, Over):
            match event:
                case FromRank(rank, incarnation, message):
                    member = self._member(rank, incarnation)
                    handler = self._handlers.get(type(message))
                    if member is not None and handler is not None:
                        handler(member, message)
                case FromAgent(message):
                    agent_handler = self._agent_handlers.get(type(message))
                    if agent_handler is not None:
                        agent_handler(message)
                case LinkLost(rank, incarnation):
                    self._on_link_lost(rank, incarnation)
                case AgentLost(reason):
                    self._end(70, reason)
                case Tick():
                    self._on_tick()
        return self._actions

    @property
    def deadline(self) -> float | None:
        """When to send the next `Tick`, if nothing else happens; None for never."""
        times = [self._roster.deadline]
        if isinstance(self.state, Building | Repairing | Closing | Dumping):
            times.append(self.state.deadline)
        return min((time for time in times if time is not None), default=None)

    @property
    def ended(self) -> tuple[int, str] | None:
        return (self.state.code, self.state.reason) if isinstance(self.state, Over) else None

    def seed_of(self, rank: int) -> int | None:
        return self._seeds.get(rank)

    def running_for(self, rank: int) -> bool:
        """True if other ranks have trained, so that a new process of this one will receive their state."""
        return self._seasoned > int(self._roster[rank].seasoned)

    def refusal(self, rank: int, incarnation: int) -> str | None:
        """Why a process that introduces itself like this has no place in the job, or None if it has."""
        if not 0 <= rank < self.world_size:
            return f"rank {rank} is not in a job of {self.world_size}"
        current = self._roster[rank].incarnation
        if incarnation != current:
            return f"incarnation {incarnation} of rank {rank} is not the current one, {current}"
        return None

    # Messages of the agent.

    def _on_agent(self, hello: Hello) -> None:
        if isinstance(self.state, Idle):
            self.state = Gathering()
            for member in self._roster:
                self._spawn(member)

    def _on_started(self, started: Started) -> None:
        fields = {"rank": started.rank, "incarnation": started.incarnation, "pid": started.pid, "warm": started.warm}
        self._tell("started", **fields)

    def _on_suspect(self, suspect: Suspect) -> None:
        if 0 <= suspect.rank < self.world_size:
            self._send(self._roster[suspect.rank], Ping(number=suspect.number))

    def _on_observed(self, observed: Observed) -> None:
        fault = observed.fault
        if not 0 <= fault.rank < self.world_size:
            return
        if fault.kind == "exit" and fault.exit_code == 0:
            self._on_ended(Ended(rank=fault.rank, incarnation=fault.incarnation))
        elif member := self._member(fault.rank, fault.incarnation):
            self._on_fault(member, fault)
        else:
            self._explain(fault)

    def _on_ended(self, ended: Ended) -> None:
        detail = "ended with code 0 before the training was over"
        fault = Fault(kind="exit", rank=ended.rank, incarnation=ended.incarnation, detail=detail, exit_code=0)
        member = self._member(ended.rank, ended.incarnation)
        if member is None:
            self._explain(fault)
        elif member.place is Place.LEAVING or not self._protected:
            self._tell("ended", rank=ended.rank, incarnation=ended.incarnation, code=0)
            self._roster.move(member, Place.LEAVING)
            self._left.add(member.rank)
            if len(self._left) == self.world_size:
                self._end(0, "all ranks are done")
        else:
            self._on_fault(member, fault)

    def _on_terminate(self, terminate: Terminate) -> None:
        code = 130 if "SIGINT" in terminate.reason else 143
        last = self._now + terminate.grace
        match self.state:
            case Closing(purpose="terminate") as closing:
                closing.deadline, closing.last_deadline = min(closing.deadline, last), min(closing.last_deadline, last)
                closing.dump_deadline = min(closing.dump_deadline, last)
            case Dumping(closing=Closing(purpose="terminate")) as dumping:
                dumping.deadline = min(dumping.deadline, last)
            case Dumping() as dumping:
                closing = dumping.closing
                closing.purpose, closing.code, closing.reason = "terminate", code, terminate.reason
                dumping.deadline = min(dumping.deadline, last)
            case _:
                half = self._now + terminate.grace / 2
                deadline = min(self._now + self.timing.stop, half)
                self._close(Closing("terminate", code, terminate.reason, deadline, half, last))

    # Messages of the ranks.

    def _on_out(self, member: Member, out: Out) -> None:
        if member.place is Place.LEAVING:
            if isinstance(self.state, Releasing):
                self._end(1, f"rank {member.rank} entered the training again after all ranks had finished it")
            return
        if member.place in (Place.LOST, Place.ABSENT):
            return
        before = member.place
        answered = before is not Place.STOPPING or out.attempt >= member.attempt
        if before is Place.STARTING:
            self._slowest_start = max(self._slowest_start, self._now - member.ordered_at)
            self._history.reached_training(member.rank)
        self._seeds.setdefault(member.rank, out.seed)
        self._furthest = max(self._furthest, out.step)
        if answered:
            member.out = out
            self._roster.move(member, Place.OUT)
        if not self._protected:
            self._first_out()
        fault = out.fault
        if fault is None and before in AT_WORK:
            fault = Fault(kind="exception", rank=member.rank, detail="left the training code unasked", at=self._now)
        if fault is not None:
            own = Fault(
                kind=fault.kind,
                rank=member.rank,
                incarnation=member.incarnation,
                detail=fault.detail,
                stack=fault.stack,
                exit_code=fault.exit_code,
                at=fault.at,
            )
            self._on_fault(member, own)
        elif isinstance(self.state, Closing):
            self._closing_progress()
        else:
            self._gathered()

    def _first_out(self) -> None:
        """The script uses Evertrain. From now on every rank has to come to the training, and none may just end."""
        self._protected = True
        for member in self._roster:
            if member.place is Place.STARTING:
                self._roster.expire(member, self._now + self._start_time())
        for rank in sorted(self._left):
            member = self._roster[rank]
            self._roster.move(member, Place.STARTING)
            detail = "ended with code 0 without training, which other ranks do"
            fault = Fault(kind="exit", rank=rank, incarnation=member.incarnation, detail=detail, exit_code=0)
            self._left.discard(rank)
            self._on_fault(member, fault)

    def _on_joined(self, member: Member, joined: Joined) -> None:
        state = self.state
        if not isinstance(state, Building) or joined.generation != self.generation or member.rank not in state.waiting:
            return
        if joined.error:
            return self._attempt_failed(member.rank, f"rank {member.rank} could not join: {joined.error}")
        state.waiting.discard(member.rank)
        state.digests[member.rank] = joined.digest
        if not state.waiting:
            self._repair(state)

    def _on_repaired(self, member: Member, repaired: Repaired) -> None:
        state = self.state
        if not isinstance(state, Repairing) or repaired.generation != self.generation:
            return
        if repaired.ok and repaired.step not in (-1, state.start.step):
            detail = f"rank {member.rank} is at step {repaired.step} after the repair, not at {state.start.step}"
            return self._attempt_failed(member.rank, detail)
        if not repaired.ok:
            if 0 <= repaired.source < self.world_size:
                self._distrusted.add(repaired.source)
                detail = f"rank {member.rank} got a wrong copy from rank {repaired.source}: {repaired.detail}"
                return self._attempt_failed(repaired.source, detail)
            return self._attempt_failed(member.rank, f"the repair of rank {member.rank} failed: {repaired.detail}")
        state.waiting.discard(member.rank)
        if not state.waiting:
            self._go(state.start)

    def _on_resumed(self, member: Member, resumed: Resumed) -> None:
        if isinstance(self.state, Running) and resumed.generation == self.generation:
            self._furthest = max(self._furthest, resumed.step)
            self._resumed(member, self.state)

    def _on_finished(self, member: Member, finished: Finished) -> None:
        self._furthest = max(self._furthest, finished.step)
        if not isinstance(self.state, Running) or member.place is not Place.INSIDE:
            return
        self._roster.move(member, Place.FINISHED)
        self._resumed(member, self.state)
        self.state.unfinished.discard(member.rank)
        if not self.state.unfinished:
            self.state = Releasing()
            for each in self._roster:
                self._roster.move(each, Place.LEAVING)
                self._send(each, Release())

    def _resumed(self, member: Member, running: Running) -> None:
        if member.rank in running.waiting:
            running.waiting.discard(member.rank)
            if not running.waiting and self._incident is not None:
                self._close_incident("restarted" if self._incident.all_restarted else "recovered")

    def _on_dumped(self, member: Member, dumped: Dumped) -> None:
        state = self.state
        if isinstance(state, Dumping) and member.rank == state.rank:
            fields = {"rank": member.rank, "step": dumped.step, "path": dumped.path, "detail": dumped.detail}
            self._tell("checkpoint", dump=True, ok=dumped.ok, **fields)
            if dumped.ok:
                self._finish(state.closing)
            else:
                self._dump(state.closing, state.tried)

    def _on_log(self, member: Member, log: Log) -> None:
        fields = {name: value for name, value in log.fields.items() if name not in ("event", "at", "t", "incident")}
        self._tell(log.name, **{"rank": member.rank, **fields})

    # What goes wrong.

    def _on_link_lost(self, rank: int, incarnation: int) -> None:
        member = self._member(rank, incarnation)
        if member is None or member.place in (Place.LEAVING, Place.LOST, Place.ABSENT):
            return
        if not self._trained and isinstance(self.state, Gathering):
            # Most likely its process just ended, and the exit code decides whether the script is to blame.
            self._roster.move(member, Place.STOPPING, self._now + self.timing.bound)
            member.link_lost = True
            return
        detail = "the link to the controller broke"
        self._on_fault(member, self._own_fault(member, "disconnected", detail))

    def _on_tick(self) -> None:
        while not isinstance(self.state, Over) and (member := self._roster.pop_expired(self._now)) is not None:
            if member.link_lost:
                kind, detail = "disconnected", "the link to the controller broke"
            elif member.place is Place.STARTING:
                kind, detail = "start", f"not at the training function after {self._start_time():g} s"
            else:
                kind, detail = "unresponsive", f"still in the training code {self.timing.stop:g} s after `Stop`"
            self._on_fault(member, self._own_fault(member, kind, detail))
        match self.state:
            case Building(deadline=deadline, waiting=waiting) if deadline <= self._now:
                rank, more = min(waiting), len(waiting) - 1
                others = f" and {more} more" if more else ""
                detail = f"rank {rank}{others} did not join within {self.timing.rebuild:g} s"
                self._attempt_failed(rank, detail)
            case Repairing(deadline=deadline, waiting=waiting) if deadline <= self._now:
                rank, more = min(waiting), len(waiting) - 1
                others = f" and {more} more" if more else ""
                self._attempt_failed(rank, f"the repair of rank {rank}{others} took too long")
            case Closing(deadline=deadline) if deadline <= self._now:
                self._closing_progress()
            case Dumping(closing=closing, rank=rank, deadline=deadline, tried=tried) if deadline <= self._now:
                self._tell("warning", rank=rank, detail="the checkpoint was not written in time")
                self._dump(closing, tried)
            case _:
                pass

    def _on_fault(self, member: Member, fault: Fault) -> None:
        """A fault of a current incarnation: list it, decide, and begin to carry the decision out."""
        lost = fault.kind in policy.PROCESS_LOST
        if member.place is Place.LOST or (member.place is Place.LEAVING and not isinstance(self.state, Releasing)):
            return
        if not lost and member.place is Place.LEAVING:
            return
        if fault.kind in CONSEQUENCES and not lost and self._incident is not None:
            return self._closing_progress() if isinstance(self.state, Closing) else self._gathered()
        situation = self._situation(member, lost)
        if not self._list(fault, member, lost):
            return self._recover()
        if fault.kind == "uce":
            self._distrusted.add(member.rank)
        if isinstance(self.state, Closing | Dumping):
            return self._fault_while_closing(member, lost)
        decision = policy.decide(fault, situation, self._history)
        self._history.note(fault, situation, decision)
        self._decided(decision)
        if lost:
            self._forgive_consequences()
        if decision.strategy in (policy.RESTART, policy.EXIT):
            if lost:
                self._roster.move(member, Place.LOST)
            return self._give_up_on_processes(decision)
        if decision.strategy == policy.RECOVER_IN_PLACE:
            self._spawn(member)
        self._recover()

    def _fault_while_closing(self, member: Member, lost: bool) -> None:
        """Nobody is replaced any more; the question is only who can still write the checkpoint."""
        if lost:
            self._roster.move(member, Place.LOST)
        if isinstance(self.state, Closing):
            self._closing_progress()
        elif isinstance(self.state, Dumping) and member.rank == self.state.rank:
            self._dump(self.state.closing, self.state.tried)

    def _attempt_failed(self, rank: int, detail: str) -> None:
        """The recovery did not get through although no process failed: try again, or fall back."""
        member = self._roster[rank]
        self._list(self._own_fault(member, "repair", detail), member, lost=False)
        assert self._incident is not None
        self._incident.attempts += 1
        decision = policy.after_failed_attempt(self._incident.attempts, detail, self._situation(member, False))
        self._decided(decision)
        if decision.strategy == policy.RETRY:
            self._recover()
        else:
            self._give_up_on_processes(decision)

    def _list(self, fault: Fault, member: Member, lost: bool) -> bool:
        """Put a fault into the open incident, or open one with it. False if it is listed already."""
        if self._incident is None:
            self._incidents += 1
            self._incident = Incident.open(self._incidents, fault, self._now)
        step = member.out.step if member.out is not None and member.place is Place.OUT else -1
        if not self._incident.add(fault, step, lost=lost, generation=self.generation):
            return False
        self._tell("fault", **fault_fields(fault, step))
        return True

    def _explain(self, fault: Fault) -> None:
        if fault.kind == "exit" and self._incident is not None and self._incident.explain(fault):
            self._tell("fault", update=True, **fault_fields(fault, -1))

    def _forgive_consequences(self) -> None:
        """Survivors that saw the broken link before the death was known did not fail themselves."""
        assert self._incident is not None
        for fault, step in self._incident.faults:
            if fault.kind == "link":
                self._history.forgive(fault.rank, step)

    def _decided(self, decision: Decision) -> None:
        assert self._incident is not None
        self._incident.decide(decision)
        self._tell("decision", decision=decision.strategy, reason=decision.explanation)

    def _situation(self, member: Member, lost: bool) -> Situation:
        out = member.out
        return Situation(
            step=out.step if out is not None and not lost else self._step,
            starting=member.place is Place.STARTING or (member.link_lost and out is None),
            trained=self._trained,
            protected=self._protected,
            released=isinstance(self.state, Releasing),
            world_size=self.world_size,
            restarts_used=self.restarts,
            max_restarts=self.max_restarts,
        )

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
        if self._roster.stopping or self._roster.starting:
            if not self._roster.stopping:
                self._phase("start")
            return
        members = [member.rank for member in self._roster]
        outs = {member.rank: member.out for member in self._roster if member.out is not None}
        odd = plan.odd_ones_out({rank: out.fingerprint for rank, out in outs.items()})
        if odd:
            norm = next(out.summary for rank, out in outs.items() if rank not in odd)
            differing = "; ".join(f"rank {rank}: {outs[rank].summary or 'no description'}" for rank in odd[:8])
            more = f"; and {len(odd) - 8} more" if len(odd) > 8 else ""
            reason = f"the ranks do not train the same model: {differing}{more}; all others: {norm or 'no description'}"
            return self._end(1, reason, reason)
        start, explanation = plan.choose(self._roster.reports(), self._distrusted)
        begins_at_nothing = start is not None and start.fresh and start.step == 0 and self._furthest > 0
        if start is None or (begins_at_nothing and not self._begun_anew):
            return self._nothing_left(start, explanation)
        self._build(start, members, explanation)

    def _nothing_left(self, start: plan.Start | None, explanation: str) -> None:
        """No state has survived. If all processes are new anyway, going on is a restart; else it takes one."""
        situation = self._situation(self._roster[0], True)
        decision = policy.fallback("no state has survived" if start else explanation, situation)
        self._decided(decision)
        if start is None or decision.strategy == policy.EXIT:
            return self._give_up_on_processes(decision)
        self._count_restart()
        self._gathered()

    def _build(self, start: plan.Start, members: list[int], explanation: str) -> None:
        self.generation += 1
        self._prefix = f"g{self.generation}/"
        self._phase("rebuild")
        self._tell("generation", generation=self.generation, step=start.step, ranks=len(members), reason=explanation)
        self._actions.append(OpenGeneration(self._prefix))
        join = Join(
            generation=self.generation,
            members=members,
            step=start.step,
            prefix=self._prefix,
            need_digest=not start.load,
        )
        self.state = Building(start, self._now + self.timing.rebuild, set(members))
        for member in self._roster:
            self._roster.move(member, Place.JOINING)
            self._send(member, join)

    def _repair(self, building: Building) -> None:
        start = building.start
        transfers, explanation = plan.repair(start, building.digests, building.digests)
        if transfers is None:
            return self._attempt_failed(start.holders[0], explanation)
        self._phase("repair", reason=explanation)
        size = max(member.out.state_bytes for member in self._roster if member.out is not None)
        time = self.timing.repair_time(size * max(transfers.fan_out, 1))
        self.state = Repairing(start, self._now + time, set(building.digests))

        def order(action: str, source: int = -1, targets: Sequence[int] = ()) -> Repair:
            return Repair(
                generation=self.generation,
                step=start.step,
                action=action,
                source=source,
                targets=list(targets),
                digest=transfers.digest,
            )

        passive = order("load" if start.load else "none")
        for member in self._roster:
            message = passive
            if targets := transfers.targets_of.get(member.rank):
                message = order("send", member.rank, targets)
            elif (source := transfers.source_of.get(member.rank)) is not None:
                message = order("receive", source, [member.rank])
            self._send(member, message)

    def _go(self, start: plan.Start) -> None:
        if self._incident is not None:
            self._phase("resume")
            self._incident.step = start.step
            self._incident.steps_lost = max(self._furthest - start.step, 0)
            self._incident.generation = self.generation
        self._step = self._furthest = start.step
        self._trained, self._begun_anew = True, False
        self._distrusted.clear()
        ranks = set(range(self.world_size))
        self.state = Running(ranks, set(ranks))
        go = Go(generation=self.generation, step=start.step)
        for member in self._roster:
            member.seasoned = True
            self._roster.move(member, Place.INSIDE)
            self._send(member, go)
        self._seasoned = self.world_size

    # The way out.

    def _give_up_on_processes(self, decision: Decision) -> None:
        assert self._incident is not None
        now, grace = self._now, self.timing.grace
        purpose = "restart" if decision.strategy == policy.RESTART else "exit"
        code = 3 if self.restarts else 1
        deadline = now + self.timing.stop
        self._close(Closing(purpose, code, decision.explanation, deadline, deadline, now + grace))

    def _close(self, closing: Closing) -> None:
        """End the work of all ranks; the state of one is written first, if there is any."""
        released = isinstance(self.state, Releasing | Idle)
        self.state = closing
        if released or not self._trained or not self.can_dump:
            return self._finish(closing)
        for member in self._roster:
            if member.place in (Place.STARTING, Place.STOPPING):
                self._roster.expire(member, None)
        self._stop_all(None)
        self._closing_progress()

    def _closing_progress(self) -> None:
        """Write the checkpoint as soon as everybody who may have a state is out, or has had its time."""
        closing = self.state
        assert isinstance(closing, Closing)
        if self._roster.stopping:
            if closing.deadline > self._now:
                return
            writer, _ = plan.dump_source(self._roster.reports(), self._distrusted)
            if writer is None and closing.last_deadline > self._now:
                closing.deadline = closing.last_deadline
                return
        self._dump(closing, set())

    def _dump(self, closing: Closing, tried: set[int]) -> None:
        rank, explanation = plan.dump_source(self._roster.reports(), self._distrusted | tried)
        if rank is None or closing.dump_deadline <= self._now:
            return self._finish(closing)
        self._phase("dump", reason=explanation)
        self.state = Dumping(closing, rank, closing.dump_deadline, tried | {rank})
        member = self._roster[rank]
        assert member.out is not None
        self._send(member, Dump(step=member.out.step))

    def _finish(self, closing: Closing) -> None:
        if closing.purpose != "restart":
            cause = ""
            if self._incident is not None and closing.purpose == "exit":
                first = self._incident.faults[0][0]
                cause = f"rank {first.rank}: {policy.describe(first)}" + (f"\n{first.stack}" if first.stack else "")
            return self._end(closing.code, closing.reason, cause)
        self._abandon_generation()
        self._count_restart()
        self._distrusted.clear()
        self._left.clear()
        self.state = Gathering()
        leave = Exit(reason=closing.reason)
        for member in self._roster:
            if member.place is not Place.LOST:
                self._send(member, leave)
            self._spawn(member)
        self._phase("start")
        if not self._protected:
            self._close_incident("restarted")

    def _count_restart(self) -> None:
        self.restarts += 1
        self._begun_anew = True
        if self._incident is not None:
            self._incident.all_restarted = True

    def _end(self, code: int, reason: str, cause: str = "") -> None:
        if self._incident is not None:
            self._close_incident("ended")
        self._abandon_generation()
        leave = Exit(reason=reason)
        for member in self._roster:
            if member.place not in (Place.LOST, Place.ABSENT) and member.rank not in self._left:
                self._send(member, leave)
            member.expires = None
        self._tell("ended", code=code, reason=reason)
        self._actions.append(ToAgent(End(code=code, reason=reason, cause=cause)))
        self.state = Over(code, reason)

    # Small helpers.

    def _member(self, rank: int, incarnation: int) -> Member | None:
        """The rank, if this is its current incarnation; an older one has no say any more."""
        if 0 <= rank < self.world_size and self._roster[rank].incarnation == incarnation:
            return self._roster[rank]
        return None

    def _spawn(self, member: Member) -> None:
        if self._incident is not None:
            self._incident.restarted.add(member.rank)
        self._seasoned -= int(member.seasoned)
        member.incarnation += 1
        member.attempt = -1
        member.out = None
        member.link_lost = member.seasoned = False
        member.ordered_at = self._now
        self._distrusted.discard(member.rank)
        # A script without Evertrain never gets to a training function, so nobody waits for it until some rank did.
        expires = self._now + self._start_time() if self._protected else None
        self._roster.move(member, Place.STARTING, expires)
        self._actions.append(ToAgent(Spawn(rank=member.rank, incarnation=member.incarnation)))

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
