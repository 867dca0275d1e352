"""Notes as Events on the AscendJob: which are told, in which words, and how many. Pure.

As in Kubernetes itself: the same again raises the count of the first Event; of many that differ in their text only the
first few are told, the others are counted on one; a job that tells too much in a short time is not heard for a while.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from evertrain.acjob import names
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import Note
from evertrain.clusterd.recover.names import CANCELLED
from evertrain.clusterd.timeline.incident import Incident, wall_time
from evertrain.kube.port import Object

NORMAL, WARNING = "Normal", "Warning"
COMPONENT = "clusterd"
MAX_MESSAGE = 1024

BURST = 25
"""Events of a job at once; a recovery has about five."""
REFILL_SECONDS = 12.0
SIMILAR = 10
SIMILAR_SECONDS = 600.0
MAX_JOBS = 4096
"""Of which is remembered what they told."""
MAX_TEXTS = 64
"""Of one job."""


@dataclass(frozen=True, slots=True)
class Words:
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Told:
    """An Event to write: a new one, or the new count of one."""

    name: str
    words: Words
    count: int
    first: float
    last: float


def words(note: Note, incident: Incident) -> Words | None:
    """Phases are in the timeline only: there are many, and nobody has to act on one."""
    match note.kind:
        case "opened":
            return Words(WARNING, "RecoveryStarted", _message(note.text))
        case "fault":
            return Words(WARNING, "TrainingFault", _message(note.text))
        case "decision":
            return Words(NORMAL, "RecoveryDecided", _message(f"{incident.decision}: {incident.reason}"))
        case "fallback":
            last = incident.fallbacks[-1] if incident.fallbacks else None
            path = f"{last.left} -> {last.taken}: " if last is not None and last.taken else ""
            return Words(WARNING, "RecoveryFallback", _message(path + note.text))
        case "closed":
            taken = f"after {incident.total_ms / 1000:.1f} s"
            text = _message(f"{incident.outcome} {taken}: {incident.end}")
            if not incident.ok:
                return Words(WARNING, "RecoveryFailed", text)
            return Words(NORMAL, "RecoveryCancelled" if incident.outcome == CANCELLED else "RecoverySucceeded", text)
    return None


class Correlator:
    """Decides what becomes of each Event of each job."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, _Told] = OrderedDict()

    def tell(self, job: Job, said: Words, now: float) -> Told | None:
        known = self._jobs.pop(job.uid, None) or _Told(now)
        self._jobs[job.uid] = known
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        return known.tell(job, said, now)

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)


class _Told:
    """What one job has told."""

    def __init__(self, now: float) -> None:
        self._tokens = float(BURST)
        self._at = now
        self._events: OrderedDict[Words, Told] = OrderedDict()
        self._similar: dict[tuple[str, str], list[float]] = {}

    def tell(self, job: Job, said: Words, now: float) -> Told | None:
        self._tokens = min(float(BURST), self._tokens + max(0.0, now - self._at) / REFILL_SECONDS)
        self._at = now
        if self._tokens < 1.0:
            return None
        self._tokens -= 1.0
        key = self._key(said, now)
        if key is not said:
            said = Words(said.type, said.reason, f"(combined from similar events): {said.message}"[:MAX_MESSAGE])
        known = self._events.pop(key, None)
        if known is None:
            told = Told(_name(job, key, now), said, 1, now, now)
        else:
            told = Told(known.name, said, known.count + 1, known.first, now)
        self._events[key] = told
        while len(self._events) > MAX_TEXTS:
            self._events.popitem(last=False)
        return told

    def _key(self, said: Words, now: float) -> Words:
        """Itself, or what stands for all that are like it, if there were many lately."""
        alike = said.type, said.reason
        times = [at for at in self._similar.get(alike, ()) if now - at < SIMILAR_SECONDS]
        if said not in self._events:
            times.append(now)
        self._similar[alike] = times[-SIMILAR - 1 :]
        return said if len(times) <= SIMILAR else Words(said.type, said.reason, "")


def event(job: Job, told: Told) -> Object:
    message = told.words.message
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": told.name, "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": told.words.type,
        "reason": told.words.reason,
        "message": message,
        "count": told.count,
        "firstTimestamp": _timestamp(told.first),
        "lastTimestamp": _timestamp(told.last),
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
    }


def again(told: Told) -> Object:
    """The patch for an Event that is there."""
    return {"count": told.count, "lastTimestamp": _timestamp(told.last), "message": told.words.message}


def _name(job: Job, key: Words, now: float) -> str:
    content = "\0".join((job.uid, key.type, key.reason, key.message, repr(now)))
    return f"{job.name[:230]}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _timestamp(now: float) -> str:
    return wall_time(round(now * 1000))[:19] + "Z"


def _message(text: str) -> str:
    return text.encode(errors="replace").decode()[:MAX_MESSAGE]
