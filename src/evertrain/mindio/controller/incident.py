"""The record of one incident: its faults, the decision, and where the time went.

An incident opens with a fault in a job that was well and closes when every rank has completed a step again, or with
the job. Faults in between belong to it. Its time is cut into phases without gaps: `enter` ends one phase and begins the
next, and a phase that is entered again (a recovery that had to start over) goes on counting, so that the phases always
add up to the total.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from evertrain.mindio.controller.policy import Decision
from evertrain.mindio.protocol import Fault

PHASES = ("detect", "decide", "stop", "dump", "start", "rebuild", "repair", "resume")
"""detect: fault to its arrival here; decide: to the first order; stop: until all survivors are out; dump: until the
checkpoint is written; start: until the replacements are there; rebuild: until the process group stands; repair: until
every rank has the right state; resume: until every rank has completed a step."""

MAX_STACK = 64 * 1024
MAX_LISTED = 1000
"""Faults written out in the record of one incident; a job may have many more ranks than a reader has patience."""
MAX_STACKS = 16


@dataclass(slots=True)
class Incident:
    number: int
    opened: float
    began: float
    """When the first fault happened; earlier than `opened` by the time it took to detect it."""
    faults: list[tuple[Fault, int]] = field(default_factory=list)
    """With the step of the rank, -1 if unknown; the record then gives the step at which the job went on."""
    decision: Decision | None = None
    restarted: set[int] = field(default_factory=set)
    failed_generations: set[int] = field(default_factory=set)
    """Attempts of the recovery that did not get through."""
    consequences: list[tuple[int, int]] = field(default_factory=list)
    """(rank, step) of retries that the death of another rank would excuse."""
    all_restarted: bool = False
    step: int = -1
    steps_lost: int = 0
    generation: int = 0
    durations: dict[str, float] = field(default_factory=dict)
    phase: str = "decide"
    _since: float = 0.0
    _listed: dict[tuple[int, int, bool, int], int] = field(default_factory=dict)

    @classmethod
    def open(cls, number: int, first: Fault, now: float) -> Incident:
        began = min(first.at, now) if first.at > 0 else now
        return cls(number, opened=now, began=began, durations={"detect": now - began}, _since=now)

    @property
    def id(self) -> str:
        return f"i-{self.number:04d}"

    def add(self, fault: Fault, step: int, *, lost: bool, generation: int) -> bool:
        """List a fault; False if it is one that is listed already, seen by another observer."""
        key = (fault.rank, fault.incarnation, lost, generation)
        if key in self._listed:
            return False
        self._listed[key] = len(self.faults)
        self.faults.append((fault, step))
        return True

    def explain(self, fault: Fault) -> bool:
        """A broken link turns out to have been the end of its process: put the better description in its place."""
        for (rank, incarnation, lost, _), index in self._listed.items():
            listed, step = self.faults[index]
            if (rank, incarnation, lost, listed.kind) == (fault.rank, fault.incarnation, True, "disconnected"):
                self.faults[index] = (fault, step)
                return True
        return False

    def decide(self, decision: Decision) -> None:
        """The incident is named after the coarsest strategy that it took."""
        if self.decision is None or decision.severity >= self.decision.severity:
            self.decision = decision

    def enter(self, phase: str, now: float) -> tuple[str, float] | None:
        """Begin another phase; returns the one that ended and how long it took, or None if it goes on."""
        if phase == self.phase:
            return None
        ended, took = self.phase, now - self._since
        self.durations[ended] = self.durations.get(ended, 0.0) + took
        self.phase, self._since = phase, now
        return ended, took

    def record(self, outcome: str, now: float, wall_offset: float) -> dict[str, Any]:
        """The line for the events file, when the incident closes."""
        durations = dict(self.durations)
        durations[self.phase] = durations.get(self.phase, 0.0) + now - self._since
        record: dict[str, Any] = {
            "event": "incident",
            "id": self.id,
            "opened": wall_time(self.opened, wall_offset),
            "faults": [
                fault_fields(fault, step if step >= 0 else self.step, stack=index < MAX_STACKS)
                for index, (fault, step) in enumerate(self.faults[:MAX_LISTED])
            ],
            "decision": self.decision.strategy if self.decision else "",
            "reason": self.decision.explanation if self.decision else "",
            "phases_ms": {name: milliseconds(durations[name]) for name in PHASES if name in durations},
            "total_ms": milliseconds(now - self.began),
            "step": self.step,
            "steps_lost": self.steps_lost,
            "restarted": sorted(self.restarted),
            "generation": self.generation,
            "outcome": outcome,
        }
        if len(self.faults) > MAX_LISTED:
            record["more_faults"] = len(self.faults) - MAX_LISTED
        return record


def fault_fields(fault: Fault, step: int, *, stack: bool = True) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kind": fault.kind,
        "rank": fault.rank,
        "incarnation": fault.incarnation,
        "detail": fault.detail[:MAX_STACK],
        "step": step,
    }
    if stack and fault.stack:
        fields["stack"] = fault.stack[-MAX_STACK:]
    if fault.exit_code is not None:
        fields["exit_code"] = fault.exit_code
    return fields


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def wall_time(monotonic: float, offset: float) -> str:
    at = datetime.fromtimestamp(monotonic + offset, timezone.utc)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
