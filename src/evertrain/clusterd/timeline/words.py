"""Notes as Events on the AscendJob: which are told, and in which words. Pure."""

from __future__ import annotations

from evertrain.acjob import names
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import Note
from evertrain.clusterd.recover.names import CANCELLED
from evertrain.clusterd.timeline.incident import Incident
from evertrain.kube.events import MAX_MESSAGE, Told, Words, timestamp
from evertrain.kube.port import Object

NORMAL, WARNING = "Normal", "Warning"
COMPONENT = "clusterd"


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
        "firstTimestamp": timestamp(told.first),
        "lastTimestamp": timestamp(told.last),
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
    }


def _message(text: str) -> str:
    return text.encode(errors="replace").decode()[:MAX_MESSAGE]
