"""The controller's decisions, as a machine without clock, socket or process.

`handle` takes one event and the time and returns what to do about it; `deadline` says when to come back with a `Tick`
if nothing happens before. Everything else about a job (who connects how, who starts processes) is the shell's business.

There is one way through the states, and start, recovery and restart all take it:

    Idle -> Gathering -> Building -> Repairing -> Running -> Releasing -> Ended
               ^____________|____________|___________|            (a fault: everybody out again)

A pause, a switch and the return of a rank begin in Running and are in `planned`.

    any state -> Closing -> Dumping -> Gathering (restart) or Ended (termination, giving up)

A fault at any time tells every rank that is at work to stop, orders a replacement for the one whose process is lost,
and gathers again; a generation that was being built is abandoned. Every state that waits has a deadline with a next
step. Three don't wait but rest, and leave only when something happens: Idle (no agent yet), Running, and Releasing (the
script's own code after the training may take its time); a script that does not use Evertrain rests in Gathering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from evertrain.mindio.controller import policy
from evertrain.mindio.controller.nodes import DEFAULT_NODE_WAIT, WAIT
from evertrain.mindio.controller.roster import AT_WORK, Member, Place
from evertrain.mindio.controller.states import (
    CONSEQUENCES,
    Action,
    AgentLost,
    Building,
    CloseGeneration,
    Closing,
    Dumping,
    Event,
    FromAgent,
    FromControl,
    FromRank,
    Gathering,
    Idle,
    LinkLost,
    OpenGeneration,
    Over,
    Releasing,
    Repairing,
    Running,
    Send,
    Tick,
    ToAgent,
    ToControl,
)
from evertrain.mindio.controller.succession import Succession
from evertrain.mindio.protocol import (
    At,
    Command,
    Dumped,
    Ended,
    Fault,
    Finished,
    Hello,
    Joined,
    Log,
    Message,
    Observed,
    Out,
    Paused,
    Ping,
    Repaired,
    Resumed,
    Spares,
    Started,
    Suspect,
    Terminate,
    Updating,
)
from evertrain.mindio.timing import Timing

__all__ = [
    "Action",
    "AgentLost",
    "CloseGeneration",
    "Event",
    "FromAgent",
    "FromControl",
    "FromRank",
    "LinkLost",
    "Machine",
    "OpenGeneration",
    "Send",
    "Tick",
    "ToAgent",
    "ToControl",
]


class Machine(Succession):
    """Leads a job of `world_size` ranks from its start to its end.

    `wall_offset` is wall-clock time minus monotonic time, for the timestamps in the records. `node_loss` says what to
    do about a lost node and `node_wait` how many seconds a node may take to come or to come back.
    """

    def __init__(
        self,
        world_size: int,
        timing: Timing,
        *,
        max_restarts: int = 0,
        can_dump: bool = True,
        wall_offset: float = 0.0,
        elastic: int = 0,
        nnodes: int = 1,
        node_loss: str = WAIT,
        least_nodes: int = 1,
        node_wait: float = DEFAULT_NODE_WAIT,
        restarts_asked: bool = True,
    ) -> None:
        super().__init__(
            world_size, timing, max_restarts, can_dump, wall_offset, elastic, restarts_asked,
            nnodes=nnodes, node_loss=node_loss, node_wait=node_wait, least_nodes=least_nodes,
        )  # fmt: skip
        self._handlers: dict[type[Message], Callable[[Member, Any], None]] = {
            Hello: self._on_hello,
            Out: self._on_out,
            Updating: self._on_updating,
            Joined: self._on_joined,
            Repaired: self._on_repaired,
            Resumed: self._on_resumed,
            At: self._on_at,
            Paused: self._on_paused,
            Finished: self._on_finished,
            Dumped: self._on_dumped,
            Log: self._on_log,
        }
        self._agent_handlers: dict[type[Message], Callable[[Any], None]] = {
            Started: self._on_started,
            Ended: self._on_ended,
            Suspect: self._on_suspect,
            Terminate: self._on_terminate,
        }

    # What the shell asks.

    def handle(self, event: Event, now: float) -> list[Action]:
        self._actions, self._now = [], max(now, self._now)
        if not isinstance(self.state, Over):
            match event:
                case FromRank(rank, incarnation, message) if self.is_prepared(rank, incarnation):
                    self._from_shadow(message)
                case FromRank(rank, incarnation, message):
                    member = self._member(rank, incarnation)
                    handler = self._handlers.get(type(message))
                    if member is not None and handler is not None:
                        handler(member, message)
                case FromAgent(Hello() as hello, node):
                    self._on_agent(node, hello)
                case FromAgent(Observed() as observed, node):
                    self._on_observed(observed, node)
                case FromAgent(Spares() as spares, node):
                    self._on_spares(spares, node)
                case FromAgent(message):
                    agent_handler = self._agent_handlers.get(type(message))
                    if agent_handler is not None:
                        agent_handler(message)
                case FromControl(link, Command() as command):
                    self._on_command(link, command)
                case LinkLost(rank, incarnation) if self.is_prepared(rank, incarnation):
                    self._shadow_failed("its link to the controller broke")
                case LinkLost(rank, incarnation):
                    self._on_link_lost(rank, incarnation)
                case AgentLost(reason, node):
                    self._on_agent_lost(node, reason)
                case Tick():
                    self._on_tick()
        return self._actions

    @property
    def deadline(self) -> float | None:
        """When to send the next `Tick`, if nothing else happens; None for never."""
        times = [self._roster.deadline, *self._planned_deadlines()]
        if isinstance(self.state, Idle | Building | Repairing | Closing | Dumping):
            times.append(self.state.deadline)
        return min((time for time in times if time is not None), default=None)

    @property
    def ended(self) -> tuple[int, str] | None:
        return (self.state.code, self.state.reason) if isinstance(self.state, Over) else None

    def running_for(self, rank: int) -> bool:
        """True if other ranks have trained, so that a new process of this one will receive their state."""
        return self._seasoned > int(self._roster[rank].seasoned)

    def refusal(self, rank: int, incarnation: int) -> str | None:
        """Why a process that introduces itself like this has no place in the job, or None if it has."""
        if not 0 <= rank < self.world_size:
            return f"rank {rank} is not in a job of {self.world_size}"
        current = self._roster[rank].incarnation
        if incarnation != current and not self.is_prepared(rank, incarnation):
            return f"incarnation {incarnation} of rank {rank} is not the current one, {current}"
        return None

    # Messages of the agent.

    def _on_started(self, started: Started) -> None:
        fields = {"rank": started.rank, "incarnation": started.incarnation, "pid": started.pid, "warm": started.warm}
        self._tell("started", **fields)
        member = self._member(started.rank, started.incarnation)
        if member is None and self._shadow is not None and self.is_prepared(started.rank, started.incarnation):
            member = self._shadow.member
        if member is not None:
            member.pid = started.pid

    def _on_suspect(self, suspect: Suspect) -> None:
        if 0 <= suspect.rank < self.world_size:
            self._send(self._roster[suspect.rank], Ping(number=suspect.number))

    def _on_observed(self, observed: Observed, node: int) -> None:
        fault = observed.fault
        if not 0 <= fault.rank < self.world_size:
            return
        if observed.partial and self.nnodes > 1 and self._on_partial(observed, node) is None:
            return
        if fault.kind == "exit" and fault.exit_code == 0:
            self._on_ended(Ended(rank=fault.rank, incarnation=fault.incarnation))
        elif self.is_prepared(fault.rank, fault.incarnation):
            self._shadow_failed(policy.describe(fault))
        elif member := self._member(fault.rank, fault.incarnation):
            self._on_fault(member, fault, observed.step if observed.step >= 0 else None)
        else:
            self._explain(fault)

    def _on_ended(self, ended: Ended) -> None:
        member = self._member(ended.rank, ended.incarnation)
        detail = "ended with code 0 before the training was over"
        if member is not None and member.out is None and not self._trained:
            detail = "ended with code 0 and never called a function with @training.resilient"
        fault = Fault(kind="exit", rank=ended.rank, incarnation=ended.incarnation, detail=detail, exit_code=0)
        if self.is_prepared(ended.rank, ended.incarnation):
            self._shadow_failed("it ended with code 0 before it got to the training")
        elif member is None:
            self._explain(fault)
        elif member.place is Place.LEAVING or not self._protected:
            self._tell("ended", rank=ended.rank, incarnation=ended.incarnation, code=0)
            self._roster.move(member, Place.LEAVING)
            self._left.add(member.rank)
            if len(self._left | self._aside) == self.world_size:
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

    def _on_hello(self, member: Member, hello: Hello) -> None:
        self._uses_training()
        self._come_late(member, hello)

    def _uses_training(self) -> None:
        """The script uses Evertrain. From now on every rank has to come to the training, and none may just end."""
        if self._protected:
            return
        self._protected = True
        for each in self._roster:
            if each.place is Place.STARTING and not each.awaits_node:
                self._roster.expire(each, self._now + self._start_time())
        if self._left:
            gone = self._roster[min(self._left)]
            self._roster.move(gone, Place.STARTING)
            detail = "ended with code 0 without training, which other ranks do"
            fault = self._own_fault(gone, "exit", detail)
            self._on_fault(gone, msgspec.structs.replace(fault, exit_code=0))

    def _on_out(self, member: Member, out: Out) -> None:
        if member.place is Place.LEAVING:
            if isinstance(self.state, Releasing):
                self._end(1, f"rank {member.rank} entered the training again after all ranks had finished it")
            return
        if member.place in (Place.LOST, Place.ABSENT):
            return
        before = member.place
        answered = before is not Place.STOPPING or out.attempt >= member.attempt
        if before is Place.STARTING and self._trained and member.rank in self._aside:
            self._tell("ready", rank=member.rank, incarnation=member.incarnation)
        if before is Place.STARTING:
            self._slowest_start = max(self._slowest_start, self._now - member.ordered_at)
            self._history.reached_training(member.rank)
        self._completed = self._completed or (self._trained and out.step > self._step)
        self._furthest = max(self._furthest, out.step)
        if not out.fresh:
            self._reached[member.rank] = out.step
        self._parts.update(out.parts)
        if answered:
            member.out = out
            self._roster.move(member, Place.OUT)
        self._uses_training()
        if isinstance(self.state, Over):
            return
        fault = out.fault
        if fault is None and before in AT_WORK:
            fault = Fault(kind="exception", rank=member.rank, detail="left the training code unasked", at=self._now)
        if fault is not None:
            fault = msgspec.structs.replace(fault, rank=member.rank, incarnation=member.incarnation)
            self._on_fault(member, fault, out.step)
        else:
            self._is_out(member)

    def _is_out(self, member: Member) -> None:
        if isinstance(self.state, Closing):
            self._closing_progress(member)
        else:
            self._gathered()
            self._pursue()

    def _on_updating(self, member: Member, updating: Updating) -> None:
        """It will be out, but not before its update is made. Meanwhile its agent watches it as it does in any step."""
        answers = member.place is Place.STOPPING and updating.attempt == member.attempt
        if answers and member.expires is not None:
            self._roster.expire(member, self._now + self.timing.first_step)

    def _on_joined(self, member: Member, joined: Joined) -> None:
        state = self.state
        if not isinstance(state, Building) or joined.generation != self.generation or member.rank not in state.waiting:
            return
        if joined.error:
            return self._attempt_failed(member.rank, f"rank {member.rank} could not join: {joined.error}")
        state.waiting.discard(member.rank)
        state.digests[member.rank] = joined.digests
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
            self._completed = True
            self._furthest = max(self._furthest, resumed.step)
            self._can_share = resumed.elastic and self._can_share is not False
            self._resumed(member, self.state)

    def _on_finished(self, member: Member, finished: Finished) -> None:
        self._completed = True
        self._furthest = max(self._furthest, finished.step)
        if not isinstance(self.state, Running) or member.place is not Place.INSIDE:
            return
        self._roster.move(member, Place.FINISHED)
        self._resumed(member, self.state)
        self.state.unfinished.discard(member.rank)
        if not self.state.unfinished:
            self._all_finished()

    def _resumed(self, member: Member, running: Running) -> None:
        if member.rank in running.waiting:
            running.waiting.discard(member.rank)
            if not running.waiting and self._incident is not None:
                self._close_incident("restarted" if self._incident.all_restarted else "recovered")
                self._pursue()

    def _on_dumped(self, member: Member, dumped: Dumped) -> None:
        state = self.state
        if not isinstance(state, Dumping) or member.rank not in state.waiting:
            return
        fields = {"rank": member.rank, "step": dumped.step, "path": dumped.path, "detail": dumped.detail}
        if not dumped.ok:
            self._tell("checkpoint", dump=True, ok=False, **fields)
            return self._dump(state.closing, state.tried | {member.rank}, state.written)
        state.written.update((dumped.step, part) for part in dumped.parts)
        state.waiting[member.rank] = {p for p in state.waiting[member.rank] if (state.step, p) not in state.written}
        if not state.waiting[member.rank]:
            del state.waiting[member.rank]
        if not state.waiting:
            self._tell("checkpoint", dump=True, ok=True, **fields)
            self._finish(state.closing)

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
        self._planned_tick()
        while not isinstance(self.state, Over) and (member := self._roster.pop_expired(self._now)) is not None:
            if member.awaits_node:
                self._node_did_not_come(member)
                continue
            if member.link_lost:
                kind, detail = "disconnected", "the link to the controller broke"
            elif member.place is Place.STARTING:
                kind, detail = "start", f"not at the training function after {self._start_time():g} s"
            else:
                kind, detail = "unresponsive", "no answer to `Stop` in time"
            self._on_fault(member, self._own_fault(member, kind, detail))
        match self.state:
            case Idle(deadline=float() as deadline) if deadline <= self._now:
                self._idle_too_long()
            case Building(deadline=deadline, waiting=waiting) if deadline <= self._now:
                rank, more = min(waiting), len(waiting) - 1
                others = f" and {more} more" if more else ""
                detail = f"rank {rank}{others} did not join within {self._rebuild_time():g} s"
                self._attempt_failed(rank, detail)
            case Repairing(deadline=deadline, waiting=waiting) if deadline <= self._now:
                rank, more = min(waiting), len(waiting) - 1
                others = f" and {more} more" if more else ""
                self._attempt_failed(rank, f"the repair of rank {rank}{others} took too long")
            case Closing(deadline=deadline) if deadline <= self._now:
                self._closing_progress()
            case Dumping(closing=closing, waiting=slow, deadline=deadline) if deadline <= self._now:
                self._tell("warning", rank=min(slow), detail="the checkpoint was not written in time")
                self._finish(closing)
            case _:
                pass

    def _on_fault(self, member: Member, fault: Fault, step: int | None = None) -> None:
        """A fault of a current incarnation: list it, decide, and begin to carry the decision out.

        `step` is that of the rank's state, where it could still say so.
        """
        lost = fault.kind in policy.PROCESS_LOST
        if member.rank in self._aside and isinstance(self.state, Gathering | Building | Repairing | Running):
            return self._fault_aside(member, fault)
        if member.place is Place.LOST or (member.place is Place.LEAVING and not (lost and self._is_releasing)):
            return
        if step is not None and fault.kind in CONSEQUENCES and self._incident is not None:
            if isinstance(self.state, Gathering | Closing | Dumping):
                return self._is_out(member)
            if isinstance(self.state, Building | Repairing):
                return self._attempt_failed(member.rank, fault.detail, fault.kind)
        situation = self._situation(member, self._step if step is None else step)
        new = self._list(fault, -1 if step is None else step, lost=lost)
        if fault.kind == "uce":
            self._distrusted.add(member.rank)
        if isinstance(self.state, Closing | Dumping):
            return self._fault_while_closing(member, lost)
        if new:
            decision = policy.decide(fault, situation, self._history)
            self._history.note(fault, situation, decision)
            self._decided(decision)
            if lost:
                self._forgive_consequences()
            elif fault.kind in CONSEQUENCES and self._incident is not None:
                self._incident.consequences.append((member.rank, situation.step))
            if decision.strategy in (policy.RESTART, policy.EXIT):
                if lost:
                    self._roster.move(member, Place.LOST)
                return self._give_up_on_processes(decision)
            if decision.strategy == policy.ELASTIC:
                self._aside.add(member.rank)
            if decision.strategy in (policy.RECOVER_IN_PLACE, policy.ELASTIC):
                self._spawn(member)
        self._recover()

    @property
    def _is_releasing(self) -> bool:
        return isinstance(self.state, Releasing)
