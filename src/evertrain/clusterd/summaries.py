"""Keeps others up to date about jobs: job-summary-*, current-job-statistic, and who subscribes to the Job service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from evertrain.clusterd.jobs import statistics, summary
from evertrain.clusterd.model import Job
from evertrain.clusterd.publish import Publisher, config_map
from evertrain.clusterd.services.publisher import Everyone, Line
from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, Kube, NotFound

logger = logging.getLogger(__name__)

SERIAL = "product-serial-number"
PAUSE = 0.2
"""Seconds between two writes of the same job's summary."""
KEPT = 60.0
"""Seconds that a job's ConfigMaps stay after it is gone, for those who come late."""


class Summaries:
    def __init__(self, publisher: Publisher, nodes: Cache, clock: Callable[[], float]) -> None:
        self._publisher, self._nodes, self._clock = publisher, nodes, clock
        self._known: dict[str, summary.Summary] = {}
        self._everyone: Everyone[summary.Summary] = Everyone(key=lambda each: each.job.uid)
        self._unwritten: dict[str, summary.Summary] = {}
        """By uid."""
        self._parts: dict[str, int] = {}
        """By uid: how many ConfigMaps there are."""
        self._news = asyncio.Event()
        self._counted = statistics.Statistics()
        self._removals: dict[tuple[str, str], tuple[asyncio.TimerHandle, int]] = {}
        """By namespace and name: of how many ConfigMaps of a job that is gone."""

    def update(self, job: Job) -> None:
        self._counted.update(job, int(self._clock()))
        before = self._known.get(job.uid)
        serials = {pod.node: self._serial(pod.node) for pod in job.pods.values() if pod.node}
        now = summary.summarise(job, int(self._clock()), before, serials)
        if now is before:
            return
        self._known[job.uid] = now
        removal = self._removals.pop((job.namespace, job.name), None)
        if removal is not None:  # of an earlier job of that name
            timer, count = removal
            timer.cancel()
            self._parts[job.uid] = count
        self._publish(now)

    def gone(self, job: Job) -> None:
        self._counted.remove(job.uid)
        known = self._known.pop(job.uid, None)
        if known is None:
            return
        last = summary.deleted(known, int(self._clock()))
        key = (job.namespace, job.name)
        for other in self._known.values():
            if (other.job.namespace, other.job.name) == key:  # it has the name, and the ConfigMaps, already
                self._everyone.publish(last)
                count = self._parts.pop(job.uid, 0)
                self._parts[other.job.uid] = max(count, self._parts.get(other.job.uid, 0))
                self._unwritten.pop(job.uid, None)
                self._unwritten[other.job.uid] = other
                self._news.set()
                return
        self._publish(last)
        loop = asyncio.get_running_loop()
        count = len(last.tables)
        self._removals[key] = (loop.call_later(KEPT, self._remove, key, count), count)

    @property
    def now(self) -> Mapping[str, summary.Summary]:
        return self._known

    def subscribe(self) -> Line[summary.Summary]:
        return self._everyone.subscribe()

    async def start(self, kube: Kube) -> None:
        """With what another ClusterD has counted, before any job is told."""
        with contextlib.suppress(NotFound):
            item = await kube.get(CONFIG_MAP, statistics.NAME, statistics.NAMESPACE)
            self._counted.load(item.get("data") or {})

    async def tidy(self, kube: Kube, jobs: Mapping[str, Job]) -> None:
        """Removes the summaries of jobs that went while nobody looked."""
        self._counted.keep(jobs)
        for item in (await kube.list(CONFIG_MAP, labels="outside-job-info=true")).items:
            metadata = item["metadata"]
            if (item.get("data") or {}).get("job_id") not in jobs:
                name, namespace = metadata["name"], metadata["namespace"]
                if name.startswith(summary.PREFIX) and not _is_of(name, namespace, jobs.values()):
                    self._publisher.remove(namespace, name)

    async def run(self) -> None:
        """Writes the ConfigMaps. Of a job that changes all the time not every state is written: some are large."""
        while True:
            await self._news.wait()
            self._news.clear()
            began = time.monotonic()
            unwritten, self._unwritten = self._unwritten, {}
            for now in unwritten.values():
                try:
                    self._write(now)
                except Exception:
                    # One job that can't be told of must not hide the others.
                    logger.exception("job %s can't be summarised", now.job.uid)
                await asyncio.sleep(0)
            self._publisher.put(config_map(statistics.NAMESPACE, statistics.NAME, self._counted.written()))
            await asyncio.sleep(max(PAUSE, 4 * (time.monotonic() - began)))

    def _publish(self, now: summary.Summary) -> None:
        self._everyone.publish(now)
        self._unwritten[now.job.uid] = now
        self._news.set()

    def _write(self, now: summary.Summary) -> None:
        items = now.config_maps()
        for item in items:
            self._publisher.put(item)
        for number in range(len(items), self._parts.get(now.job.uid, 0)):
            self._publisher.remove(now.job.namespace, summary.name_of(now.job.name, number))
        if now.operator == summary.DELETE:
            self._parts.pop(now.job.uid, None)
        else:
            self._parts[now.job.uid] = len(items)

    def _remove(self, key: tuple[str, str], count: int) -> None:
        self._removals.pop(key, None)
        for number in range(count):
            self._publisher.remove(key[0], summary.name_of(key[1], number))

    def _serial(self, node: str) -> str:
        item = self._nodes.get(node)
        return "" if item is None else str((item["metadata"].get("annotations") or {}).get(SERIAL) or "")


def _is_of(name: str, namespace: str, jobs: Iterable[Job]) -> bool:
    return any(job.namespace == namespace and summary.name_of(job.name, 0) == name for job in jobs)
