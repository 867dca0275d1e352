"""The recoveries of all jobs that are registered: one actor each, and what their managers and platforms say to it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from evertrain import aio
from evertrain.acjob import names
from evertrain.clusterd import keep
from evertrain.clusterd.actor import STRESS, Actor
from evertrain.clusterd.effects import Carrier, Failure
from evertrain.clusterd.faulting import Faults
from evertrain.clusterd.jobinfo import JobInfos
from evertrain.clusterd.machines import Machine, MakeMachine
from evertrain.clusterd.model import MEMORY, NETWORK, Job, JobFaults
from evertrain.clusterd.pages import Pages
from evertrain.clusterd.recover.events import (
    Effect,
    FaultsSeen,
    JobSeen,
    Lost,
    Note,
    NotifyNics,
    NotifyStress,
    PatchGroup,
    ProcessFault,
    ReplacePods,
    Signal,
    StressTest,
    WriteReset,
)
from evertrain.clusterd.recover.state import is_idle
from evertrain.clusterd.services import replies
from evertrain.clusterd.services.ports import About, Order, Reply, Report, Unavailable
from evertrain.clusterd.services.publisher import Line
from evertrain.kube.port import ApiError, Kube

logger = logging.getLogger(__name__)

PATIENCE = 20.0
"""Seconds until who says something is told to come again."""
AT_ONCE = 4
"""Changes of all jobs that nobody waits for, written at the same time: reports come first."""
ON, PAUSE = "on", "pause"


def make_uuid() -> str:
    return f"{time.time_ns():X}-{uuid.uuid4().hex}"


class Recoveries:
    def __init__(
        self,
        kube: Kube,
        machine: MakeMachine,
        carrier: Carrier,
        faults: Faults,
        job_infos: JobInfos,
        clock: Callable[[], float],
    ) -> None:
        self._kube, self._machine, self._carrier, self._clock = kube, machine, carrier, clock
        self._faults, self._job_infos = faults, job_infos
        self._inited: set[str] = set()
        self._actors: dict[str, Actor] = {}
        self._tasks: aio.TaskGroup | None = None
        self._places = asyncio.Semaphore(AT_ONCE)
        self.pages = Pages(kube)

    def __len__(self) -> int:
        return len(self._actors)

    def leads(self, job: str) -> bool:
        """Is somebody there to be led, or a recovery under way?"""
        actor = self._actors.get(job)
        return actor is not None and actor.leads

    def __contains__(self, job: object) -> bool:
        """Is it registered?"""
        return job in self._actors

    def start(self, tasks: aio.TaskGroup, jobs: Mapping[str, Job], left: Sequence[keep.Record]) -> None:
        """Goes on with what another ClusterD has left."""
        self._tasks = tasks
        for record in left:
            job = jobs.get(record.job)
            if job is None:
                self.pages.forget(record.job)
                continue  # gone, and what was kept goes with it
            why = record.lost
            try:
                machine = None if why else self._machine.load(record.state, record.job, make_uuid=make_uuid)
            except Exception as error:
                machine, why = None, str(error)
            if machine is not None:
                logger.warning("job %s: its recovery is taken over in state %s", record.job, machine.state)
                self._inited.add(job.uid)
                self._start(job, machine, record)
            elif is_idle(record.state):
                logger.error("job %s: what was kept can't be read, but no recovery was going on: %s", record.job, why)
                self.pages.forget(record.job)
            else:
                logger.error("job %s: its recovery can't be taken over, it is rescheduled: %s", record.job, why)
                self._inited.add(job.uid)
                actor = self._start(job, self._machine(job.uid, make_uuid=make_uuid), keep.Record(job.uid, b""))
                actor.put(Lost(why))

    # What is seen.

    def seen(self, job: Job) -> None:
        actor = self._actors.get(job.uid)
        if actor is not None:
            actor.put(JobSeen(job))

    def gone(self, job: Job) -> None:
        self._job_infos.forget(job.uid)
        self._inited.discard(job.uid)
        actor = self._actors.pop(job.uid, None)
        if actor is not None:
            actor.put(JobSeen(None))

    def faults_changed(self, faults: JobFaults) -> None:
        actor = self._actors.get(faults.job)
        if actor is not None:
            actor.put(FaultsSeen(faults))

    # What is said.

    def init(self, job: Job) -> Reply:
        if job.uid not in self._inited and not recovers(job):
            return replies.switched_off(job.uid)
        self._inited.add(job.uid)
        return replies.inited(job.uid)

    def is_inited(self, job: str) -> bool:
        return job in self._inited

    async def register(self, job: Job) -> Reply:
        """A job that is not registered yet."""
        if job.group and job.labels.get(names.PROCESS_RECOVER_ENABLE) != ON:
            try:
                await self._carrier.patch_group(job, PatchGroup({names.PROCESS_RECOVER_ENABLE: ON}))
            except (ApiError, OSError, TimeoutError, Failure) as error:
                return replies.unresolved(job.uid, f"its PodGroup can't be written: {error}")
        if job.uid not in self._inited:  # it has gone meanwhile
            return replies.no_job(job.uid)
        if job.uid not in self._actors:  # nobody else has done it meanwhile
            if len(self._actors) >= replies.MOST_JOBS:
                return replies.too_many(job.uid)
            self._start(job, self._machine(job.uid, make_uuid=make_uuid))
        return replies.registered()

    async def report(self, job: str, report: Report) -> Reply:
        actor = self._actors.get(job)
        if actor is None:
            return replies.not_registered(job)
        if isinstance(report, ProcessFault):
            again = {rank: kind for rank, kind in report.faults.items() if kind in (MEMORY, NETWORK)}
            if again:
                self._faults.process_report(job, again)
        try:
            async with aio.timeout(PATIENCE):
                known = await actor.tell(report)
        except TimeoutError:
            raise Unavailable(f"jobId={job}: the report can't be kept now") from None
        return replies.received(job, actor.uuid, report) if known else replies.not_registered(job)

    async def order(self, job: str, order: Order) -> bool:
        actor = self._actors.get(job)
        try:
            async with aio.timeout(PATIENCE):
                if actor is None or not await actor.tell(order, guarded=True):
                    return False
        except TimeoutError:
            raise Unavailable(f"jobId={job}: the order can't be kept now") from None
        if isinstance(order, StressTest) and actor.order:
            self._stress_testing(actor, order.ops)
        return True

    async def signals(self, job: str) -> Line[Signal] | None:
        actor = self._actors.get(job)
        if actor is None:
            return None
        try:
            async with aio.timeout(PATIENCE):
                return await actor.signals()
        except TimeoutError:
            raise Unavailable(f"jobId={job}: what it is to be told can't be kept now") from None

    def nic_orders(self, job: str) -> Line[NotifyNics] | None:
        actor = self._actors.get(job)
        return None if actor is None else actor.nic_orders()

    def stress_orders(self, job: str) -> Line[NotifyStress] | None:
        actor = self._actors.get(job)
        return None if actor is None else actor.stress_orders()

    def answers(self, job: str, about: About) -> Line[str] | None:
        actor = self._actors.get(job)
        return None if actor is None else actor.answers(about)

    # The work.

    def _start(self, job: Job, machine: Machine, left: keep.Record | None = None) -> Actor:
        assert self._tasks is not None
        keeper = keep.Keeper(self._kube, job, exists=left is not None, pages=self.pages)
        actor = Actor(
            job, machine, keeper, self._carry,
            left=left, clock=self._clock, over=self._order_over, places=self._places,
        )  # fmt: skip
        self._actors[job.uid] = actor
        if actor.order == STRESS:
            self._stress_testing(actor, machine.tested)
        actor.put(JobSeen(job))
        faults = self._faults.of(job.uid)
        if faults is not None:
            actor.put(FaultsSeen(faults))
        self._tasks.create_task(self._run(actor), name=f"job {job.uid}")
        return actor

    async def _run(self, actor: Actor) -> None:
        try:
            await actor.run()
        except keep.Overtaken as error:
            logger.error("job %s: %s", actor.job.uid, error)
        except Exception:
            logger.exception("job %s: its recovery has failed; the job has to register again", actor.job.uid)
        finally:
            if self._actors.get(actor.job.uid) is actor:
                del self._actors[actor.job.uid]

    async def _carry(self, job: Job, effect: Effect) -> str:
        match effect:
            case WriteReset(operation="fault"):
                self._job_infos.put(job, effect.ranks)
            case Note(kind="closed"):
                self._job_infos.forget(job.uid)
            case ReplacePods():
                self._faults.expose(effect.uids)
        return await self._carrier.carry(job, effect)

    def _stress_testing(self, actor: Actor, ranks: Iterable[int]) -> None:
        """What a test finds on these nodes is its result, not a fault of the cluster."""
        tested = {actor.job.pod_of(rank) for rank in ranks}
        nodes = {pod.node for rank, pod in actor.job.pods.items() if rank in tested}
        self._faults.stress_testing(actor.job.uid, nodes)

    def _order_over(self, job: Job) -> None:
        self._faults.stress_testing(job.uid, ())


def recovers(job: Job) -> bool:
    """Has it process-level recovery, or a hot switch? `pause` is our own word, and for a while only."""
    enabled = job.labels.get(names.PROCESS_RECOVER_ENABLE)
    if enabled in (ON, PAUSE) or job.labels.get(names.SUB_HEALTHY_STRATEGY) == names.HOT_SWITCH:
        return True
    # The operator writes the label to the PodGroup; where there is none it is written nowhere.
    return not job.group and not enabled and names.RECOVER_STRATEGY in job.annotations
