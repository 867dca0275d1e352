"""What becomes of jobs over their lives, as counted in current-job-statistic. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from evertrain.clusterd.jobs.summary import CUSTOM_ID, CUSTOM_KEY
from evertrain.clusterd.jobs.table import COMPLETE, FAILED, RUNNING
from evertrain.clusterd.model import Job

NAMESPACE, NAME = "mindx-dl", "current-job-statistic"
DATA, TOTAL = "data", "totalJob"
MOST = 10_000
LARGEST = 900 * 1024
"""Bytes: an object may have about 1 MiB."""


class Entry(msgspec.Struct, omit_defaults=True):
    """Of a job. Times are in seconds."""

    id: str
    customID: str = ""
    cardNum: int = 0
    podFirstRunTime: int = 0
    stopTime: int = 0
    podLastRunTime: int = 0
    podLastFaultTime: int = 0
    podFaultTimes: int = 0


_decoder = msgspec.json.Decoder(list[Entry])


class Statistics:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._status: dict[str, str] = {}

    def load(self, data: Mapping[str, str]) -> None:
        """What another ClusterD has counted. What can't be read is counted from here on."""
        try:
            found = _decoder.decode(data.get(DATA) or "[]")
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return
        self._entries = {entry.id: entry for entry in found}

    def keep(self, jobs: Iterable[str]) -> None:
        """Only these are there."""
        known = set(jobs)
        for job in [job for job in self._entries if job not in known]:
            self.remove(job)

    def update(self, job: Job, now: int) -> None:
        entry = self._entries.get(job.uid)
        if entry is None:
            if len(self._entries) >= MOST:
                return
            entry = self._entries[job.uid] = Entry(job.uid)
        key = job.labels.get(CUSTOM_KEY) or ""
        entry.customID = job.labels.get(key) or job.labels.get(CUSTOM_ID) or ""
        entry.cardNum = job.replicas * job.per_pod if job.resource else 0
        # After a restart, what was written says whether the job ran.
        before = self._status.get(job.uid) or _status(entry)
        self._status[job.uid] = job.status
        if job.status == before:
            return
        if job.status == RUNNING:
            entry.podFirstRunTime = entry.podFirstRunTime or now
            entry.podLastRunTime, entry.stopTime = now, 0
        elif job.status == FAILED:
            entry.podLastFaultTime = now
            entry.podFaultTimes += 1
        if job.status in (FAILED, COMPLETE):
            entry.stopTime = now

    def remove(self, job: str) -> None:
        self._entries.pop(job, None)
        self._status.pop(job, None)

    def written(self) -> dict[str, str]:
        """The data of the ConfigMap; of more jobs than it can hold, the newest."""
        parts: list[bytes] = []
        size = 2
        for entry in reversed(self._entries.values()):
            part = msgspec.json.encode(entry)
            size += len(part) + 1
            if size > LARGEST:
                break
            parts.append(part)
        return {DATA: f"[{b','.join(reversed(parts)).decode()}]", TOTAL: str(len(self._entries))}


def _status(entry: Entry) -> str:
    if entry.stopTime:
        return FAILED if entry.podLastFaultTime >= entry.podLastRunTime else COMPLETE
    return RUNNING if entry.podLastRunTime else ""
