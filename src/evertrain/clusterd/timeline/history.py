"""The newest incidents of each job, and how they are written for others. Pure.

What is published is a ConfigMap per job: whoever may look at the job can read what happened to it, and a ClusterD that
takes over from another goes on with the incident that is open. It is small; everything is in the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import Note
from evertrain.clusterd.timeline.incident import ABANDONED, JOB_GONE, Incident, ended, fold
from evertrain.kube.port import ASCEND_JOB, Object

PUBLISHED = 20
MAX_BYTES = 256 * 1024
"""An object may have a bit more than a MiB, and every write of it is kept in etcd for a while."""

CONFIG_MAP_PREFIX = "recovery-timeline-"
LABEL = "evertrain.dev/recovery-timeline"
KEY = "incidents.json"
UID = "job-uid"

_decoder = msgspec.json.Decoder(tuple[Incident, ...])


class Unreadable(Exception):
    """What was published is not a timeline; the message says why."""


class History:
    """The newest incidents by job, oldest first."""

    def __init__(self, keep: int = PUBLISHED) -> None:
        self._keep = keep
        self._jobs: dict[str, tuple[Incident, ...]] = {}

    def of(self, job: str) -> tuple[Incident, ...]:
        return self._jobs.get(job, ())

    def jobs(self) -> list[str]:
        return list(self._jobs)

    def all(self) -> list[Incident]:
        return [each for incidents in self._jobs.values() for each in incidents]

    def restore(self, incidents: Iterable[Incident]) -> list[Incident]:
        """Those of an earlier run, in their order. Those that had to be closed since they can't be open any more.

        Of two versions of an incident the one that goes further is right; what an earlier source doesn't have is newer
        than all of it, or old. The order is not left to the times alone: a clock may have been put back.
        """
        found: dict[str, list[Incident]] = {}
        for incident in incidents:
            found.setdefault(incident.job, []).append(incident)
        closed: list[Incident] = []
        for job, restored in found.items():
            known = list(self.of(job))
            merged = _merged(known, restored) if known else restored
            stale = [each for each in merged[:-1] if not each.closed]
            ends = {each.id: ended(each, ABANDONED, "a newer incident began", each.updated_ms) for each in stale}
            closed += ends.values()
            self._put(job, [ends.get(each.id, each) for each in merged])
        return closed

    def note(self, job: Job, note: Note, at_ms: int) -> tuple[Incident, ...]:
        """The incidents that are other than before."""
        incidents = self.of(job.uid)
        changed = fold(incidents[-1] if incidents else None, job, note, at_ms)
        if changed:
            ids = {each.id for each in changed}
            self._put(job.uid, [*(each for each in incidents if each.id not in ids), *changed])
        return changed

    def forget(self, job: str, at_ms: int) -> Incident | None:
        """The job is gone. If an incident was open, this is its end."""
        incidents = self._jobs.pop(job, ())
        if not incidents or incidents[-1].closed:
            return None
        return ended(incidents[-1], JOB_GONE, "the job was deleted", at_ms)

    def _put(self, job: str, incidents: Sequence[Incident]) -> None:
        self._jobs[job] = tuple(incidents[-self._keep :])


def _merged(known: list[Incident], restored: Iterable[Incident]) -> list[Incident]:
    for incident in restored:
        place = next((index for index, each in enumerate(known) if each.id == incident.id), None)
        if place is not None:
            known[place] = max(known[place], incident, key=lambda each: (each.closed, each.updated_ms))
        elif incident.opened_ms > known[-1].opened_ms:
            known.append(incident)
        else:
            known.insert(0, incident)
    return known


def config_map(job: Job, incidents: Sequence[Incident]) -> Object:
    """The newest of them that are small enough together."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": CONFIG_MAP_PREFIX + job.name,
            "namespace": job.namespace,
            "labels": {LABEL: "true"},
            "ownerReferences": [
                {
                    "apiVersion": ASCEND_JOB.api_version,
                    "kind": ASCEND_JOB.kind,
                    "name": job.name,
                    "uid": job.uid,
                }
            ],
        },
        "data": {UID: job.uid, KEY: encoded(incidents)},
    }


def encoded(incidents: Sequence[Incident]) -> str:
    pieces: list[bytes] = []
    size = 2
    for incident in reversed(incidents):
        piece = msgspec.json.encode(incident)
        size += len(piece) + 1
        if size > MAX_BYTES and pieces:
            break
        pieces.append(piece)
    return (b"[" + b",".join(reversed(pieces)) + b"]").decode()


def decoded(data: Mapping[str, str] | None, uid: str = "") -> tuple[Incident, ...]:
    """Raises Unreadable. With a uid: nothing if it is the timeline of an earlier job of that name."""
    values = data or {}
    text = values.get(KEY)
    if text is None:
        raise Unreadable(f"it has no {KEY}")
    if uid and values.get(UID) != uid:
        return ()
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Unreadable(str(error)) from None
