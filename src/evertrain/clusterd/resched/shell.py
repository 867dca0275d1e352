"""The rescheduler at work: watches feed a queue of jobs and nodes, workers look at one each and do what has to be done.

Where Volcano runs with its Ascend plugin, that one deletes pods and keeps others off nodes with faults, by what
ClusterD writes on pods and into ConfigMaps; then nothing is done here. Everywhere else it is done here.

All that must outlive this process is in the cluster: taints and annotations on nodes, deletion times of pods, and the
record of what was done (job-reschedule-reason).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from evertrain import aio
from evertrain.clusterd.clock import SteadyClock
from evertrain.clusterd.effects import Failure
from evertrain.clusterd.model import Job, Pod
from evertrain.clusterd.recover.events import Note, ReplacePods
from evertrain.clusterd.resched import launchers, reasons, taints
from evertrain.clusterd.resched.decide import (
    DEFAULTS,
    Decision,
    Delete,
    Leave,
    Mark,
    Record,
    Restart,
    Retry,
    Settings,
    decide,
    replaced,
)
from evertrain.clusterd.resched.policy import GRACE_EXIT, policy
from evertrain.clusterd.resched.views import JobView, NodeView, PodView
from evertrain.clusterd.resched.watched import SCHEDULER_CONFIG, SCHEDULER_NAMESPACE, Shared, Watched
from evertrain.clusterd.timeline.incident import FAILED
from evertrain.kube.cache import Cache
from evertrain.kube.port import (
    CONFIG_MAP,
    NODE,
    POD,
    AlreadyExists,
    ApiError,
    Conflict,
    Kube,
    NotFound,
    Object,
)
from evertrain.kube.queue import WorkQueue

logger = logging.getLogger(__name__)

WORKERS = 4
AT_ONCE = 200
"""Pods deleted at the same time."""
TRIES = 5
RESCHEDULED = "rescheduled"
"""How an incident ends in which nobody but us has led the job."""
START_AGAIN = "start again"
"""The phase of it in which pods are replaced. No recovery has one of that name: who finds an incident in it, also one
of an earlier ClusterD, ends it when all pods run."""
LEAD_PATIENCE = 30.0
"""Seconds for a job whose recovery is to lead to say that it is there, from the moment a fault hits it."""
READY_WORD, READY_WORDS = 10.0, 3
"""Seconds between two words about what the rescheduler waits for before it can begin, and after how many of them a
recovery goes on without it."""
AS_IT_SAYS = 1 << 30
"""Stands for a pod's own grace period."""


class Rescheduler:
    def __init__(
        self,
        kube: Kube,
        *,
        shared: Shared | None = None,
        plugin: bool | None = None,
        chips: bool = False,
        settings: Settings = DEFAULTS,
        leads: Callable[[str], bool] = lambda job: True,
        note: Callable[[str, Note], None] = lambda job, note: None,
        phase: Callable[[str], str] = lambda job: "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`shared`: caches of somebody else. `plugin`: whether Volcano's Ascend plugin does the work; found out by its
        configuration if None. `chips`: the scheduler itself keeps pods off chips with faults, as that of the embedded
        cluster does. `leads`: whether there is a recovery for a job, by its uid. `note`: hears what is done for one.
        `phase`: the one that its open incident is in, if it has one."""
        self._kube = kube
        self._watched = Watched(kube, shared)
        self._plugin, self._chips, self._settings = plugin, chips, settings
        self._leads, self._note, self._phase, self._clock = leads, note, phase, clock
        self._queue: WorkQueue[tuple[str, str]] = WorkQueue(max_delay=5.0)
        self._asked: dict[str, int] = {}
        """By uid of a pod: it was asked to go, in so many seconds. The cache may not show it yet."""
        self._unled: dict[str, float] = {}
        """By uid of a job: since when a fault waits for somebody to lead its recovery."""
        self._graceful: dict[str, bool] = {}
        """By uid of a job: whether its launchers are told to end in good order. Missing: nobody knows."""
        self._steady = SteadyClock(clock)
        self._since: dict[str, dict[bool, float]] = {}
        """By uid of a pod: when we first saw that it has no place, and that it has to go (True). What the API server
        says of that is by its own clock."""
        self._recorded: dict[str, float] = {}
        """By uid of a job: when we wrote down that its pods are replaced, the last time."""
        self._places = asyncio.Semaphore(AT_ONCE)
        self._writing = asyncio.Lock()
        self._caches: tuple[Cache, ...] = ()
        """Those without which nothing can be decided."""
        self.ready = asyncio.Event()
        """Set once all is known."""

    @property
    def reports(self) -> Cache:
        """What is reported of the health of nodes."""
        return self._watched.reports

    @property
    def acts(self) -> bool:
        """Nobody else does the work."""
        return not (self._watched.has_plugin if self._plugin is None else self._plugin)

    async def run(self) -> None:
        """Until it is cancelled."""
        watched = self._watched
        watched.listen(self._job_changed, lambda node: self._queue.add(("node", node)), self._look_at_all)
        watched.pods.listen(self._pod_changed)
        async with aio.TaskGroup() as tasks:
            caches = await watched.caches()
            for cache in caches:
                tasks.create_task(cache.run())
            if watched.scheduler not in caches:
                place = f"{SCHEDULER_NAMESPACE}/{SCHEDULER_CONFIG}"
                logger.warning("we may not read ConfigMap %s: Volcano is taken for one without Ascend plugin", place)
                tasks.create_task(watched.run_scheduler())
            self._caches = *caches, watched.jobs, watched.pods, watched.nodes
            for cache in self._caches:
                await cache.synced.wait()
            self._look_at_all()
            self.ready.set()
            for _ in range(WORKERS):
                tasks.create_task(self._work())

    def _look_at_all(self) -> None:
        for item in self._watched.jobs:
            self._queue.add(("job", str(item["metadata"].get("uid"))))
        for item in self._watched.nodes:
            self._queue.add(("node", item["metadata"]["name"]))

    def _job_changed(self, uid: str) -> None:
        self._queue.add(("job", uid))

    def _pod_changed(self, before: Object | None, after: Object | None) -> None:
        if after is None and before is not None:
            self._asked.pop(str(before["metadata"].get("uid")), None)
            self._since.pop(str(before["metadata"].get("uid")), None)

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                await (self._look_at_node(key[1]) if key[0] == "node" else self._look_at_job(key[1]))
                self._queue.forget(key)
            except (ApiError, OSError, TimeoutError) as error:
                delay = self._queue.retry(key)
                if not isinstance(error, Conflict):
                    logger.info("%s %s: %s; again in %.2f s", *key, error, delay)
            except Exception:
                # One that we can't handle must not stop the others.
                logger.exception("%s %s", *key)
                self._queue.retry(key)
            finally:
                self._queue.done(key)

    # Nodes.

    async def _look_at_node(self, name: str) -> None:
        node = self._watched.nodes.get(name)
        if node is None:
            return
        fault = taints.fault(self._watched.node(name), chips=self._chips) if self.acts else None
        wanted = taints.wanted(node, fault)
        if wanted is None:
            return
        logger.warning("node %s: %s", name, "gets pods again" if fault is None else f"gets no pods: {fault[0]}")
        metadata = {"resourceVersion": node["metadata"]["resourceVersion"]}
        with contextlib.suppress(NotFound):
            await self._kube.patch(NODE, name, None, {"metadata": metadata, "spec": {"taints": wanted or None}})

    def _nodes(self, job: JobView) -> dict[str, NodeView]:
        names = {pod.node for pod in (*job.pods, *job.backups) if pod.node}
        return {name: self._watched.node(name) for name in names}

    # Jobs.

    async def _look_at_job(self, uid: str) -> None:
        job = self._watched.job(uid)
        if job is None or not self.acts:
            self._unled.pop(uid, None)
            self._graceful.pop(uid, None)
            self._recorded.pop(uid, None)
            return
        now, nodes = self._steady.now(), self._nodes(job)
        job = self._by_our_clock(job, now)
        led, wake = self._is_led(job, nodes, now)
        # All that we saw ourselves came after what a ClusterD before us has written down.
        last = self._recorded.get(uid, None if self._watched.last_rescheduled(job) is None else 0.0)
        decision = decide(job, nodes, now, settings=self._settings, rescheduled=last, led=led)
        await self._carry_out(job, decision)
        if not decision.actions:
            self._end_incident(job)
            await self._stay(job)
        for due in (decision.wake, wake):
            if due is not None:
                self._queue.add_after(("job", uid), max(0.0, due - self._steady.now()) + 0.01)

    def _by_our_clock(self, job: JobView, now: float) -> JobView:
        """With the times that are waited from as we saw them: that of the API server may be fast or slow."""

        def seen(pod: PodView) -> PodView:
            if pod.deleting:
                return replace(pod, asked=self._since.setdefault(pod.uid, {}).setdefault(True, now))
            if pod.unschedulable and not pod.node:
                return replace(pod, created=self._since.setdefault(pod.uid, {}).setdefault(False, now))
            return pod

        return replace(job, pods=tuple(map(seen, job.pods)), backups=tuple(map(seen, job.backups)))

    def _is_led(self, job: JobView, nodes: dict[str, NodeView], now: float) -> tuple[bool, float | None]:
        """Whether the job's recovery leads or may still come to, and when to ask again."""
        if not policy(job).led or not decide(job, nodes, now, led=False).why:
            self._unled.pop(job.uid, None)
            return True, None
        if self._leads(job.uid):  # its client may be lost, too, and only noticed later
            self._unled.pop(job.uid, None)
            return True, now + LEAD_PATIENCE
        due = self._unled.setdefault(job.uid, now) + LEAD_PATIENCE
        return (True, due) if now < due else (False, None)

    async def replace(self, job: Job, order: ReplacePods) -> None:
        """What a job's recovery has decided. When this returns, the pods are on their way. Raises what the API server
        or the way to it raises, and Failure; it may be asked for any number of times."""
        await self._until_ready(job)
        if not self.acts:
            return
        view = self._watched.job(job.uid)
        if view is None:
            return
        view = _with_known(view, job, order.uids)
        decision = replaced(view, order.uids, order.reason, self._nodes(view), whole_job=order.whole_job)
        await self._carry_out(view, decision)

    async def _until_ready(self, job: Job) -> None:
        """The signals of the job's recovery wait for it. Raises Failure when that has lasted long enough: agents are
        told to go on then, and whoever asked comes again."""
        if self.ready.is_set():
            return
        for _ in range(READY_WORDS):
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(READY_WORD):
                    await self.ready.wait()
                return
            logger.warning("job %s: before its pods can be replaced, we wait for %s", job.uid, self._missing)
        raise Failure(f"the rescheduler has waited {READY_WORDS * READY_WORD:g} s for {self._missing}")

    @property
    def _missing(self) -> str:
        if not self._caches:
            return "the API server to say which kinds it has"
        return ", ".join(each.what for each in self._caches if not each.synced.is_set()) or "its first look at all jobs"

    async def _carry_out(self, job: JobView, decision: Decision) -> None:
        deletions = [
            action for action in decision.actions if isinstance(action, Delete) and not self._was_asked(action)
        ]
        marks = [action for action in decision.actions if isinstance(action, Mark)]
        for node in {action.pod.node for action in deletions if action.pod.node}:
            # New pods come as soon as these are gone, and must not come to the same place.
            await self._look_at_node(node)
        for action in decision.actions:
            match action:
                case Record():
                    await self._record(job, action)
                case Retry() if not self._leads(job.uid) and not self._phase(job.uid):
                    self._begin_incident(job, action.cause, action.why, action.strategy)
                case Restart() if deletions:
                    await self._tell_launchers(job, action)
                case Leave() if deletions:
                    await self._set_graceful(job, True)
        if deletions and decision.why:
            logger.warning("job %s/%s: %s", job.namespace, job.name, decision.why)
            if self._leads(job.uid):
                self._note(job.uid, Note("rescheduling", decision.why))
            else:
                self._begin_incident(job, decision.why, decision.why, f"{policy(job).level}-rescheduling")
        await self._all(self._mark(job, mark) for mark in marks)
        await self._all(self._delete(job, each) for each in deletions if not each.last)
        await self._all(self._delete(job, each) for each in deletions if each.last)

    def _begin_incident(self, job: JobView, cause: str, why: str, strategy: str) -> None:
        """Nobody but us tells of it. If it has begun already, it goes on."""
        self._note(job.uid, Note("opened", cause))
        self._note(job.uid, Note("decision", why, {"strategy": strategy}))
        self._note(job.uid, Note("phase", why, {"phase": START_AGAIN}))

    def _end_incident(self, job: JobView) -> None:
        if self._phase(job.uid) != START_AGAIN:
            return
        if job.failure:
            end = {"outcome": FAILED, "ok": False}
            self._note(job.uid, Note("closed", f"the job has failed: {job.failure}", end))
        elif job.succeeded or (job.runs and not any(pod.uid in self._asked for pod in job.pods)):
            self._note(job.uid, Note("closed", "all pods run again", {"outcome": RESCHEDULED, "ok": True}))

    def _was_asked(self, action: Delete) -> bool:
        grace = AS_IT_SAYS if action.grace is None else action.grace
        return self._asked.get(action.pod.uid, AS_IT_SAYS + 1) <= grace

    async def _all(self, work: Iterable[object]) -> None:
        """All of it, whatever becomes of one."""
        results = await asyncio.gather(*work, return_exceptions=True)  # type: ignore[call-overload]
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _delete(self, job: JobView, action: Delete) -> None:
        pod = action.pod
        self._asked[pod.uid] = AS_IT_SAYS if action.grace is None else action.grace
        logger.info("deleting pod %s/%s: %s", job.namespace, pod.name, action.reason)
        try:
            async with self._places:
                await self._kube.delete(POD, pod.name, job.namespace, uid=pod.uid, grace=action.grace)
        except (NotFound, Conflict):
            self._asked.pop(pod.uid, None)  # gone, or another one by that name
        except BaseException:
            self._asked.pop(pod.uid, None)
            raise

    async def _mark(self, job: JobView, mark: Mark) -> None:
        patch = {"metadata": {"uid": mark.pod.uid, "annotations": dict(mark.annotations)}}
        with contextlib.suppress(NotFound, Conflict):
            await self._kube.patch(POD, mark.pod.name, job.namespace, patch)

    # What others read of it.

    async def _record(self, job: JobView, record: Record) -> None:
        """That it can't be written must not keep pods from being replaced."""
        tasks = [(reason, pod.name, pod.node, str(pod.rank)) for pod, reason in record.tasks]
        since = max(pod.created for pod, _ in record.tasks)
        try:
            async with self._writing:
                await self._write_record(job, tasks, since)
        except Exception as error:  # whatever somebody has written there
            logger.warning(
                "job %s/%s: why its pods are replaced is not written down: %s", job.namespace, job.name, error
            )

    async def _write_record(self, job: JobView, tasks: list[reasons.Task], since: float) -> None:
        for _ in range(TRIES):
            try:
                item = await self._kube.get(CONFIG_MAP, reasons.NAME, reasons.NAMESPACE)
            except NotFound:
                metadata = {"name": reasons.NAME, "namespace": reasons.NAMESPACE}
                item = {"apiVersion": CONFIG_MAP.api_version, "kind": CONFIG_MAP.kind, "metadata": metadata, "data": {}}
            data = item.get("data") or {}
            text = reasons.recorded(data.get(reasons.KEY) or "", job.id, tasks, self._clock(), since)
            if text is None:
                return
            self._recorded[job.uid] = self._steady.now()
            item = item | {"data": {**data, reasons.KEY: text}}
            try:
                if "resourceVersion" in item["metadata"]:
                    await self._kube.replace(CONFIG_MAP, item)
                else:
                    await self._kube.create(CONFIG_MAP, item)
                return
            except (Conflict, AlreadyExists):
                continue
        logger.warning("job %s/%s: too many write %s", job.namespace, job.name, reasons.NAME)

    async def _tell_launchers(self, job: JobView, restart: Restart) -> None:
        now = int(self._clock())
        await self._rewrite(job, lambda item: launchers.restarted(item, restart.pods, restart.whole, now))

    async def _set_graceful(self, job: JobView, leave: bool) -> None:
        now = int(self._clock())
        await self._rewrite(job, lambda item: launchers.leaving(item, leave, now))
        self._graceful[job.uid] = leave

    async def _stay(self, job: JobView) -> None:
        """Nobody has to leave any more, and nobody is on the way out: who comes now must not be told to leave."""
        if policy(job).sub_health != GRACE_EXIT or self._graceful.get(job.uid) is False or job.over:
            return
        if job.pods and not any(pod.deleting or pod.uid in self._asked for pod in job.pods):
            await self._set_graceful(job, False)

    async def _rewrite(self, job: JobView, change: Callable[[Object], Object | None]) -> None:
        """A job whose user has made no such ConfigMap has no launchers that would read it."""
        name = launchers.PREFIX + job.name
        for _ in range(TRIES):
            with contextlib.suppress(Conflict):
                try:
                    item = await self._kube.get(CONFIG_MAP, name, job.namespace)
                except NotFound:
                    return
                changed = change(item)
                if changed is not None:
                    await self._kube.replace(CONFIG_MAP, changed)
                return
        logger.warning("job %s/%s: too many write %s", job.namespace, job.name, name)


def _with_known(view: JobView, job: Job, uids: Iterable[str]) -> JobView:
    """With pods that somebody else has seen before us."""
    here = {pod.uid for pod in view.pods}
    missing = [pod for pod in job.pods.values() if pod.uid in set(uids) - here]
    if not missing:
        return view
    return replace(view, pods=(*view.pods, *map(_view, missing)))


def _view(pod: Pod) -> PodView:
    text = pod.labels.get("version", "")
    return PodView(
        name=pod.name,
        uid=pod.uid,
        rank=pod.rank,
        node=pod.node,
        phase=pod.phase,
        labels=pod.labels,
        annotations=pod.annotations,
        version=int(text) if text.isdecimal() else 0,
        deleting=pod.deleting,
    )
