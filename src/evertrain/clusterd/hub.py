"""The hub: watches feed the tables of jobs and faults, those feed one actor for each registered job, and the services
ask it. It keeps nothing that the cluster doesn't keep as well, but who listens: kill it at any point, start it again,
and it goes on.

One that stands by looks on: it keeps what is large current (jobs, pods, nodes and what these publish) and reads it, and
tells nobody. When it leads it lists anew what another one has written last: what is kept of recoveries and of faults,
settings, which jobs there are, which pods are labelled. All else it may know as late as one that has always led.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from evertrain import aio
from evertrain.acjob import names
from evertrain.clusterd import keep, traces
from evertrain.clusterd.effects import Carrier, Notes, Replaces
from evertrain.clusterd.faulting import Faults
from evertrain.clusterd.jobinfo import JobInfos
from evertrain.clusterd.jobs.table import Table, same_places
from evertrain.clusterd.labels import Labels
from evertrain.clusterd.machines import MakeMachine
from evertrain.clusterd.model import Job, JobFaults
from evertrain.clusterd.observe import Observer
from evertrain.clusterd.publish import ROUND, Publisher
from evertrain.clusterd.ranktables import RankTables
from evertrain.clusterd.recover.events import NotifyNics, NotifyStress, Signal
from evertrain.clusterd.recover.names import FAULT_TYPE, SUB_HEALTH, VOLCANO
from evertrain.clusterd.recoveries import PATIENCE, Recoveries
from evertrain.clusterd.services import replies
from evertrain.clusterd.services.ports import About, Order, Reply, Report, Subscription, Summary, Unavailable
from evertrain.clusterd.summaries import Summaries
from evertrain.kube.port import ApiError, Kube, Object

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 0.5
"""Seconds between two looks at jobs."""


class Rescheduler(Replaces, Protocol):
    async def run(self) -> None: ...


class Hub:
    def __init__(
        self,
        kube: Kube,
        *,
        machine: MakeMachine,
        rescheduler: Rescheduler,
        timeline: Notes,
        observer: Observer,
        faults: Faults,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kube = kube
        self._rescheduler = rescheduler
        self.observer = observer
        self._faults = faults
        self._publisher = Publisher(kube, upkeep=ROUND)
        self._carrier = Carrier(kube, rescheduler, timeline, observer.switches.get)
        self._job_infos = JobInfos(self._publisher, faults, observer.settings, clock)
        self._recoveries = Recoveries(kube, machine, self._carrier, faults, self._job_infos, clock)
        self._labels = Labels(self._carrier.carry)
        self._table = Table()
        self._summaries = Summaries(self._publisher, observer.nodes, clock)
        self._traces = traces.Traces(kube, observer.switches)
        self._rank_tables = RankTables(observer)
        self._dirty: dict[str, None] = {}
        self._news = asyncio.Event()
        self._leads = False
        """Are others told of jobs, or is only read what they are?"""
        self._by_service: dict[str, set[str]] = {}
        """Jobs by their label jobID: those of an inference service share one."""
        self.looks_on = asyncio.Event()
        """Set once what is large has been read: not much is missing to lead."""
        self.ready = asyncio.Event()
        """Set once all is known, and everybody may ask."""

    @property
    def jobs(self) -> Mapping[str, Job]:
        """By uid, as they are now."""
        return self._table.jobs

    @property
    def registrations(self) -> int:
        """How many jobs are registered."""
        return len(self._recoveries)

    async def run(self, leads: asyncio.Event | None = None) -> None:
        """Runs until it is cancelled; it only looks on until `leads` is set, if that is given. Who asks afterwards is
        told to come again."""
        try:
            await self._run(leads)
        finally:
            self.ready.clear()
            self._recoveries.pages.close()

    async def _run(self, leads: asyncio.Event | None) -> None:
        self.observer.listen(self._job_changed)
        self._faults.listen(self._recoveries.faults_changed, self._labels_changed)
        async with aio.TaskGroup() as tasks:
            caches = await self.observer.large()
            for cache in caches:
                tasks.create_task(cache.run())
            for cache in caches:
                await cache.synced.wait()
            self._look()
            tasks.create_task(self._looking())
            self.looks_on.set()
            if leads is not None:
                await leads.wait()
            if self.observer.groups not in caches:
                logger.info("there are no PodGroups: labels and annotations of jobs are on the AscendJobs")
                tasks.create_task(self.observer.run_groups())
            for cache in self.observer.small():
                tasks.create_task(cache.run())
            await self.observer.catch_up()
            labelled = await self.observer.pods_labelled(FAULT_TYPE, SUB_HEALTH)
            for cache in self.observer.small():
                await cache.synced.wait()
            await self._summaries.start(self._kube)
            await self._faults.remember()
            self._lead()
            left = await keep.kept(self._kube, self._recoveries.pages, self._table.jobs)
            await self._faults.start()
            self._labels_found(labelled)
            self._recoveries.start(tasks, self._table.jobs, left)
            self._job_infos.start(self._table.jobs)
            await self._summaries.tidy(self._kube, self._table.jobs)
            tasks.create_task(self._faults.run())
            tasks.create_task(self._labels.run())
            tasks.create_task(self._publisher.run())
            tasks.create_task(self._summaries.run())
            tasks.create_task(self._rescheduler.run())
            self.ready.set()
            logger.info("%d jobs, %d of them in a recovery", len(self._table.jobs), len(self._recoveries))

    # Jobs.

    def _job_changed(self, uid: str) -> None:
        self._dirty[uid] = None
        self._news.set()

    async def _looking(self) -> None:
        while True:
            await self._news.wait()
            began = time.monotonic()
            self._look()
            # What changes meanwhile is looked at together: a job with thousands of pods must not eat the whole core.
            await asyncio.sleep(min(LONGEST_PAUSE, 2 * (time.monotonic() - began)))

    def _look(self) -> None:
        """At all jobs that may have changed."""
        self._news.clear()
        dirty, self._dirty = self._dirty, {}
        for uid in dirty:
            try:
                self._look_at(uid)
            except Exception:
                # One job that we can't read must not hide the others.
                logger.exception("job %s can't be read", uid)

    def _look_at(self, uid: str) -> None:
        found = self.observer.job(uid)
        if found is None:
            gone = self._table.remove(uid)
            if gone is not None and self._leads:
                self._gone(gone)
            return
        before = self._table.jobs.get(uid)
        job, is_news = self._table.update(*found)
        if is_news and self._leads:
            self._tell(before, job)

    def _lead(self) -> None:
        """From now on everybody hears of jobs; now of those that were only read before."""
        self._look()
        self._leads = True
        for job in self._table.jobs.values():
            try:
                self._tell(None, job)
            except Exception:
                logger.exception("job %s can't be told of", job.uid)

    def _tell(self, before: Job | None, job: Job) -> None:
        if before is None or not same_places(before, job):
            self._faults.job(job.uid, job)
            self._summaries.update(job)
        if before is not None and before.labels.get(names.JOB_ID) != job.labels.get(names.JOB_ID):
            self._leave_service(before)
        if service := job.labels.get(names.JOB_ID):
            self._by_service.setdefault(service, set()).add(job.uid)
        self._recoveries.seen(job)

    def _gone(self, job: Job) -> None:
        self._faults.job(job.uid, None)
        self._summaries.gone(job)
        self._recoveries.gone(job)
        self._leave_service(job)

    def _leave_service(self, job: Job) -> None:
        service = job.labels.get(names.JOB_ID, "")
        jobs = self._by_service.get(service, set())
        jobs.discard(job.uid)
        if not jobs:
            self._by_service.pop(service, None)

    # Faults.

    def _labels_changed(self, labels: Mapping[str, str]) -> None:
        self._labels.want(labels, self._table.jobs.values())

    def _labels_found(self, labelled: Iterable[Object]) -> None:
        """SubHealth that a ClusterD before us has written, of faults that may be over since; but not for a hot switch.
        (Separate stays with the pod.)"""
        for pod in labelled:
            if VOLCANO not in (pod["metadata"].get("annotations") or {}):
                self._labels.found(str(pod["metadata"].get("uid")), SUB_HEALTH)
        self._labels_changed(self._labels.wanted)

    # What services ask for: recovery.

    def job(self, job: str) -> Job | None:
        return self._table.jobs.get(job)

    def leads(self, job: str) -> bool:
        return self._recoveries.leads(job)

    def registered(self, job: str) -> bool:
        return job in self._recoveries

    def super_pod(self, node: str) -> int | None:
        return self._faults.super_pod(node)

    async def init(self, job: str) -> Reply:
        found = await self._find(job)
        return replies.unresolved(job, "there is no such job") if found is None else self._recoveries.init(found)

    async def register(self, job: str) -> Reply:
        self._check()
        if job in self._recoveries:
            return replies.registered()
        if not self._recoveries.is_inited(job):
            return replies.not_inited(job)
        found = await self._find(job)
        return replies.no_job(job) if found is None else await self._recoveries.register(found)

    async def report(self, job: str, report: Report) -> Reply:
        self._check()
        return await self._recoveries.report(job, report)

    async def order(self, job: str, order: Order) -> bool:
        self._check()
        return await self._recoveries.order(job, order)

    async def signals(self, job: str) -> Subscription[Signal] | None:
        self._check()
        return await self._recoveries.signals(job)

    async def nic_orders(self, job: str) -> Subscription[NotifyNics] | None:
        self._check()
        return self._recoveries.nic_orders(job)

    async def stress_orders(self, job: str) -> Subscription[NotifyStress] | None:
        self._check()
        return self._recoveries.stress_orders(job)

    def answers(self, job: str, about: About) -> Subscription[str] | None:
        return self._recoveries.answers(job, about)

    def _check(self) -> None:
        if not self.ready.is_set():
            raise Unavailable("ClusterD has only begun to look at the cluster")

    async def _find(self, job: str) -> Job | None:
        self._check()
        if job not in self._table.jobs and job:
            await self.observer.until_job(job)
            self._look()
        return self._table.jobs.get(job)

    # What services ask for: faults, jobs and the rest.

    def jobs_of(self, name: str, member: str = "") -> Sequence[str]:
        if name in self._table.jobs:
            return [name]
        found = sorted(self._by_service.get(name, ())) if name else []
        namespace = self._namespace(member)
        return [uid for uid in found if not namespace or self._namespace(uid) == namespace]

    def _namespace(self, job: str) -> str:
        """Empty if there is no such job."""
        found = self._table.jobs.get(job)
        return "" if found is None else found.namespace

    def faults(self) -> Mapping[str, JobFaults]:
        return self._faults.now

    def fault_changes(self, jobs: Collection[str] | None = None) -> Subscription[JobFaults]:
        return self._faults.subscribe(jobs)

    def heard(self, service: str, more: int) -> None:
        self._faults.heard(service, more)

    def summaries(self) -> Mapping[str, Summary]:
        return self._summaries.now

    def summary_changes(self) -> Subscription[Summary]:
        return self._summaries.subscribe()

    def rank_tables(self, job: str, member: str = "") -> Subscription[str]:
        return self._rank_tables.subscribe(job, self._namespace(member))

    def public_fault_resources(self) -> frozenset[str]:
        return self._faults.public_resources()

    async def public_fault(self, message: Mapping[str, object]) -> str:
        self._check()
        try:
            async with aio.timeout(PATIENCE):
                return await self._faults.public_fault(message)
        except TimeoutError:
            raise Unavailable("what is wrong can't be kept now") from None

    async def trace(self, namespace: str, name: str) -> Mapping[str, str] | None:
        with _available():
            return await self._traces.get(namespace, name)

    async def set_trace(self, namespace: str, name: str, switches: Mapping[str, str]) -> bool:
        job = self.observer.jobs.get(name, namespace)
        if job is None:
            return False
        with _available():
            await self._traces.set(namespace, name, job["metadata"]["uid"], switches)
        return True

    def trace_changes(self, job: str) -> Subscription[Mapping[str, str]]:
        return self._traces.subscribe(lambda: self._table.jobs.get(job))


@contextlib.contextmanager
def _available() -> Iterator[None]:
    try:
        yield
    except (ApiError, OSError, TimeoutError) as error:
        raise Unavailable(f"the API server does not do it: {error}") from None
