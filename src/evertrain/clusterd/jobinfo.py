"""fault-job-info: on which super-pods a job that recovers has lost nodes, for noded to free its communication there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from evertrain.clusterd.faulting import Faults
from evertrain.clusterd.faults.outputs import JOB_INFO
from evertrain.clusterd.model import Job, JobFaults, RankFault
from evertrain.clusterd.observe import SYSTEM
from evertrain.clusterd.publish import Publisher, config_map
from evertrain.kube.cache import Cache

KEPT = 10.0
"""Seconds that an entry stays after the recovery: noded may be slow to read it."""


class JobInfos:
    def __init__(self, publisher: Publisher, faults: Faults, settings: Cache, clock: Callable[[], float]) -> None:
        self._publisher, self._faults, self._settings, self._clock = publisher, faults, settings, clock
        self._entries: dict[str, str] = {}
        self._removals: dict[str, asyncio.TimerHandle] = {}

    def start(self, jobs: Collection[str]) -> None:
        """With what another ClusterD has left, of jobs that are there."""
        item = self._settings.get(JOB_INFO, SYSTEM)
        found = {} if item is None else dict(item.get("data") or {})
        self._entries = {job: text for job, text in found.items() if job in jobs}
        for job in self._entries:
            self.forget(job)
        if self._entries != found:
            self._write()

    def put(self, job: Job, ranks: Collection[int]) -> None:
        """These ranks are lost."""
        lost = [(pod, rank) for pod, rank in ((job.pods.get(job.pod_of(rank)), rank) for rank in ranks) if pod]
        faults = JobFaults(job.uid, ranks=tuple(RankFault(rank, pod.rank, pod.uid, pod.node) for pod, rank in lost))
        text = self._faults.job_info(job, faults, int(self._clock()))
        removal = self._removals.pop(job.uid, None)
        if removal is not None:
            removal.cancel()
        if text and self._entries.get(job.uid) != text:
            self._entries[job.uid] = text
            self._write()

    def forget(self, job: str) -> None:
        """Soon."""
        if job in self._entries and job not in self._removals:
            self._removals[job] = asyncio.get_running_loop().call_later(KEPT, self._remove, job)

    def _remove(self, job: str) -> None:
        self._removals.pop(job, None)
        if self._entries.pop(job, None) is not None:
            self._write()

    def _write(self) -> None:
        self._publisher.put(config_map(SYSTEM, JOB_INFO, dict(self._entries)))
