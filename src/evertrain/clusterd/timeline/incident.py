"""An incident as the notes of its recovery tell it. Pure.

An incident opens with a note `opened` and closes with `closed`; what a job's recovery notes in between belongs to it.
A job has one open incident at most. The notes carry the recovery id, so a ClusterD that was restarted in the middle
goes on with the same incident.

Times are whole milliseconds from the first note on, and time never runs backwards: a phase lasts from its note to the
next phase's, the last one to the end. So the phases add up to the total exactly, whatever the clock did, in print too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from datetime import datetime, timezone
from typing import Any

from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import Note

FIRST_PHASE = "detect"
UNKNOWN_RANK = -1

MAX_FAULTS = 64
"""Written out; of the others their number is kept. A node's fault may hit thousands of ranks."""
MAX_PHASES = 200
MAX_FALLBACKS = 32
MAX_REMARKS = 32
MAX_TEXT = 1024
MAX_WORD = 256

# How an incident ended, where the notes don't say it in their own word.
RECOVERED, FAILED, ABANDONED, JOB_GONE = "recovered", "failed", "abandoned", "job gone"


@dataclass(frozen=True, slots=True)
class Fault:
    rank: int = UNKNOWN_RANK
    type: str = ""
    """As on the wire: 0 memory, 1 other, 2 network."""
    code: str = ""
    level: str = ""
    node: str = ""
    device: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    began_ms: int


@dataclass(frozen=True, slots=True)
class Fallback:
    at_ms: int
    left: str
    taken: str
    reason: str


@dataclass(frozen=True, slots=True)
class Remark:
    at_ms: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Incident:
    id: str
    job: str
    """The job's uid."""
    name: str
    namespace: str
    opened_ms: int
    updated_ms: int
    cause: str = ""
    faults: tuple[Fault, ...] = ()
    more_faults: int = 0
    decision: str = ""
    reason: str = ""
    phases: tuple[Phase, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    remarks: tuple[Remark, ...] = ()
    closed: bool = False
    ok: bool = False
    outcome: str = ""
    """One word, empty as long as it is open."""
    end: str = ""
    """The outcome in words."""

    @property
    def total_ms(self) -> int:
        """Up to the end; of an open one up to its last note."""
        return self.updated_ms - self.opened_ms

    @property
    def durations(self) -> list[tuple[str, int]]:
        """Each phase in order with its milliseconds."""
        ends = [phase.began_ms for phase in self.phases[1:]] + [self.updated_ms]
        return [(phase.name, end - phase.began_ms) for phase, end in zip(self.phases, ends, strict=True)]

    def record(self) -> dict[str, Any]:
        """For JSON, with the keys that the launcher's incidents have, too."""
        sums: dict[str, int] = {}
        for name, duration in self.durations:
            sums[name] = sums.get(name, 0) + duration
        return {
            "id": self.id,
            "job": self.name,
            "namespace": self.namespace,
            "uid": self.job,
            "opened": wall_time(self.opened_ms),
            "closed": wall_time(self.updated_ms) if self.closed else None,
            "cause": self.cause,
            "faults": [
                {
                    "rank": fault.rank,
                    "type": fault.type,
                    "code": fault.code,
                    "level": fault.level,
                    "node": fault.node,
                    "device": fault.device,
                    "detail": fault.text,
                }
                for fault in self.faults
            ],
            "more_faults": self.more_faults,
            "decision": self.decision,
            "reason": self.reason,
            "phases": [{"phase": name, "ms": duration} for name, duration in self.durations],
            "phases_ms": sums,
            "total_ms": self.total_ms,
            "fallbacks": [
                {"after_ms": each.at_ms - self.opened_ms, "from": each.left, "to": each.taken, "reason": each.reason}
                for each in self.fallbacks
            ],
            "remarks": [
                {"after_ms": each.at_ms - self.opened_ms, "kind": each.kind, "text": each.text} for each in self.remarks
            ],
            "outcome": self.outcome or "open",
            "ok": self.ok if self.closed else None,
            "end": self.end,
        }


def milliseconds(now: float) -> int:
    return round(now * 1000)


def wall_time(ms: int) -> str:
    try:
        at = datetime.fromtimestamp(ms // 1000, timezone.utc)
    except (OverflowError, ValueError, OSError):  # a clock that is far off
        at = datetime.fromtimestamp(0, timezone.utc)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


def fold(current: Incident | None, job: Job, note: Note, at_ms: int) -> tuple[Incident, ...]:
    """The incidents that this note changes or begins, given the job's newest one; empty if it belongs to none.

    More than one only if an incident begins before the last has been closed: that one is closed as abandoned.
    """
    named = _word(note.details.get("id"))
    is_open = current is not None and not current.closed
    if current is not None and is_open and not (note.kind == "opened" and named and named != current.id):
        return (_added(current, note, max(at_ms, current.updated_ms)),)
    if note.kind not in _BEGINNING and not (note.kind == "closed" and named and "began" in note.details):
        return ()  # a late report that was ignored, say: nothing goes on that it could belong to
    if current is not None and current.id == named:
        return ()  # it has been closed: an echo from before a restart
    began = note.details.get("began")  # of one that an earlier ClusterD had no time to write down
    opened_ms = min(milliseconds(began), at_ms) if isinstance(began, float) else at_ms
    begun = Incident(
        id=named or f"{job.uid}-{at_ms}",
        job=job.uid,
        name=job.name,
        namespace=job.namespace,
        opened_ms=opened_ms,
        updated_ms=at_ms,
        phases=(Phase(_word(note.details.get("phase")) or FIRST_PHASE, opened_ms),),
    )
    if current is not None and is_open:
        why = "another incident began before this one had an end"
        return (ended(current, ABANDONED, why, at_ms), _added(begun, note, at_ms))
    return (_added(begun, note, at_ms),)


def ended(incident: Incident, outcome: str, why: str, at_ms: int) -> Incident:
    """Closed from outside, without the note of its recovery."""
    if incident.closed:
        return incident
    return replace(
        incident, closed=True, ok=False, outcome=outcome, end=why, updated_ms=max(at_ms, incident.updated_ms)
    )


_BEGINNING = ("opened", "fault", "decision", "phase", "fallback")


def _added(incident: Incident, note: Note, at_ms: int) -> Incident:
    incident = replace(incident, updated_ms=at_ms)
    text, details = _text(note.text), note.details
    match note.kind:
        case "opened":
            return _with_faults(replace(incident, cause=incident.cause or text), note)
        case "fault":
            return _with_faults(incident, note)
        case "decision":
            strategy = _word(details.get("strategy")) or _word(details.get("decision"))
            return _decided(incident, strategy or incident.decision or text[:MAX_WORD], text)
        case "phase":
            return _entered(incident, _word(details.get("phase")) or text[:MAX_WORD], at_ms)
        case "fallback":
            left = _word(details.get("from")) or incident.decision
            fallback = Fallback(at_ms, left, _word(details.get("to")), text)
            return replace(incident, fallbacks=(*incident.fallbacks, fallback)[:MAX_FALLBACKS])
        case "closed":
            outcome = _word(details.get("outcome"))
            ok = details.get("ok")
            succeeded = ok if isinstance(ok, bool) else outcome not in (FAILED, ABANDONED)
            strategy, cause = _word(details.get("strategy")), _text(details.get("cause"))
            if strategy and strategy != incident.decision:  # of one that was killed before it had written this down
                incident = _decided(incident, strategy, _text(details.get("reason")))
            return replace(
                incident,
                cause=incident.cause or cause,
                closed=True,
                ok=succeeded,
                outcome=outcome or (RECOVERED if succeeded else FAILED),
                end=text,
            )
        case kind:
            remark = Remark(at_ms, _word(kind), text)
            return replace(incident, remarks=(*incident.remarks, remark)[:MAX_REMARKS])


def _decided(incident: Incident, strategy: str, reason: str) -> Incident:
    """A fallback is noted when something failed, and may be known to lead here only now."""
    fallbacks = incident.fallbacks
    if fallbacks and not fallbacks[-1].taken:
        fallbacks = (*fallbacks[:-1], replace(fallbacks[-1], taken=strategy))
    return replace(incident, decision=strategy, reason=reason, fallbacks=fallbacks)


def _entered(incident: Incident, name: str, at_ms: int) -> Incident:
    """Past the bound the last phase goes on counting: they still add up."""
    if incident.phases[-1].name == name or len(incident.phases) >= MAX_PHASES:
        return incident
    return replace(incident, phases=(*incident.phases, Phase(name, at_ms)))


def _with_faults(incident: Incident, note: Note) -> Incident:
    """The same fault is heard of more than once: from the process, that knows its rank, and from the node, that knows
    the code. It is listed once, as whoever knows more describes it."""
    faults, more = list(incident.faults), incident.more_faults
    bare = {(fault.rank, fault.type): index for index, fault in enumerate(faults) if _is_bare(fault)}
    known = {(fault.rank, fault.type) for fault in faults}
    for fault in faults_in(note):
        what = fault.rank, fault.type
        if fault in faults or (_is_bare(fault) and what in known and fault.rank != UNKNOWN_RANK):
            continue
        if what in bare and fault.rank != UNKNOWN_RANK:
            faults[bare.pop(what)] = fault
        elif len(faults) < MAX_FAULTS:
            if _is_bare(fault):
                bare[what] = len(faults)
            faults.append(fault)
            known.add(what)
        else:
            more += 1
    return replace(incident, faults=tuple(faults), more_faults=more)


def _is_bare(fault: Fault) -> bool:
    return not (fault.code or fault.node or fault.text)


def faults_in(note: Note) -> Iterable[Fault]:
    """The faults that a note names: one in its details, or several under `faults`, by rank or as a list."""
    details = note.details
    several = details.get("faults")
    if isinstance(several, Mapping):
        for rank, what in several.items():
            yield _fault(what, rank) if not isinstance(what, str) else Fault(_rank(rank), _word(what))
    elif isinstance(several, (list, tuple)):
        for what in several:
            yield _fault(what, None)
    elif "rank" in details or "code" in details or "node" in details:
        found = _fault(details, None)
        yield replace(found, text=_text(note.text)) if note.kind == "fault" and not found.text else found
    elif note.kind == "fault":
        yield Fault(text=_text(note.text))


def _fault(what: object, rank: object) -> Fault:
    if isinstance(what, Mapping):
        values: Mapping[str, object] = what
    elif is_dataclass(what):
        values = {key: getattr(what, key, "") for key in ("rank", "type", "code", "level", "node", "device", "text")}
    else:
        return Fault(_rank(rank if rank is not None else what))
    device = _word(values.get("device"))
    return Fault(
        rank=_rank(values.get("rank", rank)),
        type=_word(values.get("type")),
        code=_word(values.get("code")),
        level=_word(values.get("level")),
        node=_word(values.get("node")),
        device="" if device == "-1" else device,
        text=_text(values.get("text")),
    )


def _rank(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return UNKNOWN_RANK


def _word(value: object) -> str:
    return _text(value)[:MAX_WORD]


def _text(value: object) -> str:
    """What a program of the user's reported may hold anything."""
    return "" if value is None else str(value)[:MAX_TEXT].encode(errors="replace").decode()
