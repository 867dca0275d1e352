"""What interrupts the training on purpose, and how it goes on without everybody.

Three things wait for the end of a step: a pause that somebody asked for, a process that was prepared to take a rank's
place (hot switch), and a rank that the others went on without and that is back. For each of them all ranks are told to
pause: they say where they are, and are told the next step that all of them can reach. When all of them wait there, the
pause is held until `Continue`; for the other two everybody is told to get out, which costs nothing there, and the next
generation is built as after a fault.

A fault in between takes precedence, and the recovery takes along who is ready. What is still wanted afterwards, a pause
for example, is asked for again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from evertrain.mindio import plan
from evertrain.mindio.controller import policy
from evertrain.mindio.controller.job import Job
from evertrain.mindio.controller.policy import Decision
from evertrain.mindio.controller.roster import Member, Place
from evertrain.mindio.controller.states import (
    Building,
    Closing,
    Gathering,
    Hold,
    Releasing,
    Repairing,
    Running,
    Send,
    Shadow,
    ToAgent,
    ToControl,
)
from evertrain.mindio.protocol import (
    Answer,
    At,
    Command,
    Continue,
    Exit,
    Fault,
    Kill,
    Log,
    Message,
    Out,
    Pause,
    PauseAt,
    Paused,
    Prepare,
    Promote,
    Release,
)

PAUSE_SECONDS = 600.0
"""A pause without a limit of its own ends after this time."""


class Planned(Job):
    # Commands.

    def _on_command(self, link: int, command: Command) -> None:
        asker = (link, command.request)
        match command.order:
            case "pause":
                self._on_pause(asker, command)
            case "continue":
                if self._hold is None:
                    return self._answer(asker, False, "the job is not paused")
                self._release_hold("asked for")
                self._answer(asker, True, "the job goes on")
            case "hot-switch":
                self._on_hot_switch(asker, command.rank)
            case "cancel-switch":
                if self._shadow is None:
                    return self._answer(asker, False, "no switch is being prepared")
                rank = self._shadow.member.rank
                self._end_shadow("it was cancelled")
                self._answer(asker, True, f"the switch of rank {rank} is cancelled")
            case "status":
                fields = self._status()
                state = "paused" if fields["paused"] else type(self.state).__name__.lower()
                self._answer(asker, True, state, **fields)
            case _:
                self._answer(asker, False, f"there is no order {command.order!r}")

    def _on_pause(self, asker: tuple[int, int], command: Command) -> None:
        if self._hold is not None:
            return self._answer(asker, False, "the job is paused already, or about to be")
        if reason := self._not_training():
            return self._answer(asker, False, reason)
        if not command.timeout >= 0:
            return self._answer(asker, False, f"a pause can't last {command.timeout} s")
        self._hold = Hold(command.timeout or PAUSE_SECONDS, command.exit_after, asker)
        self._pursue()

    def _on_hot_switch(self, asker: tuple[int, int], rank: int) -> None:
        if not 0 <= rank < self.world_size:
            return self._answer(asker, False, f"there is no rank {rank}; ranks are 0 to {self.world_size - 1}")
        if reason := self._not_training():
            return self._answer(asker, False, reason)
        if self.world_size == 1:
            return self._answer(asker, False, "the only rank has nobody to get its state from")
        if self._shadow is not None:
            return self._answer(asker, False, f"a switch of rank {self._shadow.member.rank} is being prepared already")
        if rank in self._aside:
            return self._answer(asker, False, f"rank {rank} is being replaced already")
        current = self._roster[rank]
        if alone := self._held_alone(current):
            reason = f"no other rank holds {', '.join(alone)}: the new process of rank {rank} could not get it"
            return self._answer(asker, False, reason)
        current.issued += 1
        member = Member(rank, incarnation=current.issued, place=Place.STARTING, ordered_at=self._now)
        self._shadow = Shadow(member, asker, self._now + self._start_time())
        self._tell("switch", rank=rank, incarnation=member.incarnation, state="preparing")
        self._actions.append(ToAgent(Prepare(rank=rank, incarnation=member.incarnation)))

    def _held_alone(self, member: Member) -> list[str]:
        """The parts of the state that would be lost with this rank's process."""
        others = {part for other in self._members() if other is not member and other.out for part in other.out.parts}
        return [part for part in member.out.parts if part not in others] if member.out else []

    def _not_training(self) -> str:
        if self._trained and isinstance(self.state, Gathering | Building | Repairing | Running):
            return ""
        return "the job does not train yet" if not self._trained else "the training is over"

    def _status(self) -> dict[str, Any]:
        starting = self._roster.starting
        paused = isinstance(self.state, Running) and self._hold is not None and self._hold.deadline is not None
        missing = [m.rank for m in self._roster if m.rank in self._aside or (m.awaits_node and m.rank in starting)]
        return {
            "world_size": self.world_size,
            "generation": self.generation,
            "step": max([self._furthest, *self._seen.values()]),
            "active": [rank for rank in self._active if rank not in missing],
            "missing": missing,
            "pids": {str(member.rank): member.pid for member in self._roster if member.pid},
            "paused": paused,
            "switch": self._shadow.member.rank if self._shadow else None,
            "restarts": self.restarts,
            "incidents": self._incidents,
        }

    def _answer(self, asker: tuple[int, int], ok: bool, text: str, **fields: Any) -> None:
        link, request = asker
        self._actions.append(ToControl(link, Answer(request=request, ok=ok, text=text, fields=fields)))

    # To the end of a step and on.

    def _pursue(self) -> None:
        state = self.state
        if not isinstance(state, Running) or self._incident is not None:
            return
        if not state.unfinished:
            return self._all_finished()
        if state.pausing or (self._hold is None and not self._somebody_ready()):
            return
        self._pauses += 1
        state.pausing = True
        state.paused.clear()
        state.at.clear()
        pause = Pause(number=self._pauses)
        for member in self._members():
            self._send(member, pause)

    def _somebody_ready(self) -> bool:
        shadow = self._shadow is not None and self._shadow.member.place is Place.OUT
        return shadow or any(self._roster[rank].place is Place.OUT for rank in self._aside)

    def _on_at(self, member: Member, at: At) -> None:
        state = self.state
        if not isinstance(state, Running) or not state.pausing or at.number != self._pauses:
            return
        self._furthest = max(self._furthest, at.step)
        state.at[member.rank] = at.step
        if len(state.at) == len(self._active):
            where = PauseAt(number=self._pauses, step=max(state.at.values()) + 1)
            for each in self._members():
                self._send(each, where)

    def _on_paused(self, member: Member, paused: Paused) -> None:
        state = self.state
        if not isinstance(state, Running) or paused.generation != self.generation:
            return
        self._furthest = max(self._furthest, paused.step)
        if not state.pausing:
            return self._send(member, Continue(number=self._pauses))
        state.paused.add(member.rank)
        if len(state.paused) < len(self._active):
            return
        if self._hold is None:
            return self._switch_over()
        self._tell("paused", step=paused.step, seconds=self._hold.seconds)
        if self._hold.deadline is None:  # otherwise it was paused before, and a fault came in between
            self._hold.deadline = self._now + self._hold.seconds
            self._answer(self._hold.asker, True, f"paused at step {paused.step}", step=paused.step)

    def _release_hold(self, why: str) -> None:
        """The pause is over: go on, or take the opportunity for what waits as well."""
        hold, self._hold = self._hold, None
        assert hold is not None
        if hold.deadline is None:
            self._answer(hold.asker, False, f"the pause is over before it has begun: {why}")
        self._tell("continued", reason=why)
        state = self.state
        if isinstance(state, Running) and state.pausing and len(state.paused) == len(self._active):
            self._switch_over()

    def _switch_over(self) -> None:
        """Everybody waits at the same step, or has finished: build the next generation if there is a reason to."""
        state = self.state
        assert isinstance(state, Running)
        ready = [rank for rank in sorted(self._aside) if self._roster[rank].place is Place.OUT]
        shadow = self._shadow.member if self._shadow and self._shadow.member.place is Place.OUT else None
        if not ready and shadow is None:
            state.pausing = False
            state.paused.clear()
            go_on = Continue(number=self._pauses)
            for member in self._members():
                self._send(member, go_on)
            return
        if shadow is not None:
            self._list(self._own_fault(shadow, "hot-switch", "its process is exchanged"), self._furthest, lost=False)
            self._decided(Decision(policy.HOT_SWITCH, f"a new process for rank {shadow.rank} is ready"))
        for rank in ready:
            self._list(self._own_fault(self._roster[rank], "rejoin", "it is back"), self._furthest, lost=False)
        if ready:
            size = self.world_size - len(self._aside) + len(ready)
            back = f"rank {ready[0]} is" if len(ready) == 1 else f"ranks {', '.join(map(str, ready))} are"
            self._decided(Decision(policy.ELASTIC, f"{back} back: {size} of {self.world_size} ranks go on"))
        self._recover()

    def _all_finished(self) -> None:
        """Who is still starting comes to the end, too: its script may do something after the training."""
        if any(self._roster[rank].place is Place.OUT for rank in self._aside):
            return self._switch_over()
        missing = [self._roster[rank] for rank in self._aside]
        if any(member.place is Place.STARTING and not member.awaits_node for member in missing):
            return
        for member in missing:  # their node is gone, or they could not be started
            self._roster.move(member, Place.LOST)
        self._drop_plans("the training is over")
        self.state = Releasing()
        for member in self._members():
            self._roster.move(member, Place.LEAVING)
            self._send(member, Release())

    # Time.

    def _planned_deadlines(self) -> tuple[float | None, ...]:
        return (self._hold.deadline if self._hold else None, self._shadow.expires if self._shadow else None)

    def _planned_tick(self) -> None:
        shadow, hold = self._shadow, self._hold
        if shadow is not None and shadow.expires is not None and shadow.expires <= self._now:
            self._shadow_failed("it did not get to the training in time")
        if hold is None or hold.deadline is None or hold.deadline > self._now:
            return
        if not hold.exit_after:
            return self._release_hold(f"nobody said so within {hold.seconds:g} s")
        reason = f"the pause of {hold.seconds:g} s is over and nobody said how to go on"
        self._hold = None
        last = self._now + self.timing.grace
        self._close(Closing("terminate", 1, reason, self._now + self.timing.stop, last, last))

    # A process in the shadow of another.

    def is_prepared(self, rank: int, incarnation: int) -> bool:
        """Is this the process that is to take the rank's place?"""
        return self._shadow is not None and (self._shadow.member.rank, self._shadow.member.incarnation) == (
            rank,
            incarnation,
        )

    def _from_shadow(self, message: Message) -> None:
        assert self._shadow is not None
        member = self._shadow.member
        if isinstance(message, Out):
            if message.fault is not None:
                return self._shadow_failed(policy.describe(message.fault))
            if self._others_differ(message):
                return self._shadow_failed("it does not train the same model as the others")
            member.out, member.place = message, Place.OUT
            self._shadow.expires = None
            self._tell("switch", rank=member.rank, incarnation=member.incarnation, state="ready")
            self._pursue()
        elif isinstance(message, Log):
            self._tell("log", rank=member.rank, name=message.name)

    def _others_differ(self, out: Out) -> bool:
        known = self._roster[self._active[0]].out if self._active else None
        return known is not None and known.fingerprint != out.fingerprint

    def _shadow_failed(self, why: str) -> None:
        self._end_shadow(f"the new process failed: {why}")

    def _end_shadow(self, why: str) -> None:
        shadow, self._shadow = self._shadow, None
        assert shadow is not None
        member = shadow.member
        self._tell("switch", rank=member.rank, incarnation=member.incarnation, state="ended", reason=why)
        self._actions.append(ToAgent(Kill(rank=member.rank, incarnation=member.incarnation, reason=why)))
        self._answer(shadow.asker, False, f"the switch of rank {member.rank} came to nothing: {why}")

    def _swap(self) -> None:
        if self._shadow is None or self._shadow.member.place is not Place.OUT:
            return
        member = self._roster[self._shadow.member.rank]
        if member.place is not Place.OUT:
            return
        reports = self._roster.reports()
        others = {rank: report for rank, report in reports.items() if rank != member.rank}
        with_it, _ = plan.choose(reports, self._distrusted, self._parts)
        without, _ = plan.choose(others, self._distrusted, self._parts)
        if with_it is None or without is None or (without.step, without.load) != (with_it.step, with_it.load):
            return self._end_shadow(f"nobody but rank {member.rank} has its state")
        self._actions.append(Send(member.rank, member.incarnation, Exit(reason="another process has taken over")))
        self._seasoned -= int(member.seasoned)
        self._take_shadow(member)

    def _take_shadow(self, member: Member) -> bool:
        shadow = self._shadow
        if shadow is None or shadow.member.rank != member.rank:
            return False
        self._shadow = None
        new = shadow.member
        if self._incident is not None:
            self._incident.restarted.add(member.rank)
        member.incarnation, member.out, member.attempt = new.incarnation, new.out, -1
        member.ordered_at, member.link_lost, member.seasoned = new.ordered_at, False, False
        member.pid = new.pid
        self._distrusted.discard(member.rank)
        self._roster.move(member, new.place, shadow.expires)
        self._tell("switch", rank=member.rank, incarnation=member.incarnation, state="taken")
        self._actions.append(ToAgent(Promote(rank=member.rank, incarnation=member.incarnation)))
        self._answer(shadow.asker, True, f"rank {member.rank} has a new process at step {self._furthest}")
        return True

    # Without everybody.

    def _has_replacement(self, rank: int) -> bool:
        shadow = self._shadow
        ready = shadow is not None and shadow.member.rank == rank and shadow.member.place is Place.OUT
        return ready or self._has_spare(rank)

    def _others(self, rank: int) -> int:
        if not self.elastic or not self._can_share or not self._trained:
            return 0
        others = self.world_size - len(self._aside | {rank})
        return others if others >= self.elastic else 0

    def _fault_aside(self, member: Member, fault: Fault) -> None:
        """A process that nobody waits for has failed; the others are not interrupted."""
        if member.place is Place.LOST:
            return
        own_incident = self._incident is None
        fault = msgspec.structs.replace(fault, rank=member.rank, incarnation=member.incarnation)
        if self._list(fault, -1, lost=True):
            self._history.failed_starts[member.rank] += 1
            decision = policy.in_background(fault, self._history)
            self._decided(decision)
            if decision.strategy == policy.RECOVER_IN_PLACE:
                self._spawn(member)
            else:
                self._roster.move(member, Place.LOST)
                self._actions.append(
                    ToAgent(Kill(rank=member.rank, incarnation=member.incarnation, reason=decision.explanation))
                )
        if own_incident:
            self._close_incident("recovered")
            self._pursue()

    # The end of all plans.

    def _drop_plans(self, why: str, *, keep_pause: bool = False) -> None:
        if self._shadow is not None:
            self._end_shadow(why)
        if self._hold is not None and not keep_pause:
            if self._hold.deadline is None:
                self._answer(self._hold.asker, False, f"the job was not paused: {why}")
            self._hold = None
