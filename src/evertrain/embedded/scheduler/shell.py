"""The scheduler at work: looks at the cluster whenever it changes, decides, carries out.

What was decided but is not yet to be seen in the caches is remembered as if it were, so that no chip is given twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from evertrain import aio
from evertrain.embedded.recorder import NORMAL, WARNING, Recorder, rfc3339
from evertrain.embedded.scheduler.decide import Binding, Decision, Verdict, World, decide
from evertrain.embedded.scheduler.ports import Ports, remember
from evertrain.embedded.scheduler.views import (
    POD_ANNOTATIONS,
    GroupView,
    NodeView,
    PodView,
    QueueView,
    read_group,
    read_node,
    read_pod,
    read_queue,
)
from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, NODE, POD, POD_GROUP, QUEUE, ApiError, Conflict, Kube, NotFound, Object
from evertrain.wire import clusterinfo

logger = logging.getLogger(__name__)

FIRST_RETRY, MAX_RETRY = 0.1, 5.0
MAX_PAUSE = 0.5
AT_ONCE = 16
"""Requests at the same time."""
COMPONENT = "volcano"

Work = Callable[[], Coroutine[Any, Any, bool]]
View = TypeVar("View", PodView, NodeView, GroupView, QueueView)


class Scheduler:
    def __init__(self, kube: Kube, *, shared_network: bool = False) -> None:
        """`shared_network`: all pods are in the network of this machine."""
        self._kube = kube
        self._shared_network = shared_network
        self._pods = Cache(kube, POD)
        self._nodes = Cache(kube, NODE)
        self._groups = Cache(kube, POD_GROUP)
        self._queues = Cache(kube, QUEUE)
        labels = ",".join(f"{name}={value}" for name, value in clusterinfo.LABELS.items())
        self._reports = Cache(kube, CONFIG_MAP, clusterinfo.NAMESPACE, labels=labels)
        self._reported = clusterinfo.Reports()
        self._recorder = Recorder(kube, COMPONENT)
        self._changed = asyncio.Event()
        self._views: dict[tuple[str, str, str], Any] = {}
        self._assumed: dict[str, Binding] = {}
        """By uid of the pod: bound, but the cache doesn't show it yet."""
        self._written: dict[str, tuple[str, Verdict]] = {}
        """By uid of the group: the version it had when this was written to it."""
        self._told: dict[str, str] = {}
        """By uid of the pod or group: the last complaint."""
        self._ports: dict[str, Ports] = {}
        """By party: those that its pods had so far."""
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._retry = FIRST_RETRY

    async def run(self) -> None:
        """Until it is cancelled."""
        caches = [self._pods, self._nodes, self._groups, self._queues]
        for cache, matters in zip(caches, (_pod_matters, _node_matters, _group_matters, _queue_matters), strict=True):
            cache.listen(partial(self._look, matters))
        self._reports.listen(self._look_at_report)
        caches.append(self._reports)
        async with aio.TaskGroup() as tasks:
            for cache in caches:
                tasks.create_task(cache.run())
            tasks.create_task(self._recorder.run())
            for cache in caches:
                await cache.synced.wait()
            self._changed.set()
            pause = 0.0
            while True:
                await self._changed.wait()
                # Whatever else comes in the meantime is decided in one go. Deciding takes half of the time at most.
                await asyncio.sleep(pause)
                self._changed.clear()
                began = time.perf_counter()
                decision = decide(self._world(), time.time_ns())
                pause = min(MAX_PAUSE, time.perf_counter() - began)
                failed = await self._carry_out(decision)
                if failed:
                    asyncio.get_running_loop().call_later(self._retry, self._changed.set)
                self._retry = min(MAX_RETRY, self._retry * 2) if failed else FIRST_RETRY

    def _look(self, matters: Callable[[Object, Object], bool], before: Object | None, after: Object | None) -> None:
        try:
            if before is None or after is None or matters(before, after):
                self._changed.set()
        except (KeyError, TypeError, ValueError, AttributeError):
            self._changed.set()  # it can't be read; the next look says so

    def _look_at_report(self, before: Object | None, after: Object | None) -> None:
        """They are rewritten every few seconds, mostly with the same content."""
        name = (after or before or {})["metadata"]["name"]
        if self._reported.update(name, str(((after or {}).get("data") or {}).get(name) or "")):
            self._changed.set()

    def _world(self) -> World:
        views: dict[tuple[str, str, str], Any] = {}

        def read(cache: Iterable[Object], reader: Callable[[Object], View]) -> list[View]:
            found = []
            for item in cache:
                metadata = item["metadata"]
                key = (item.get("kind", ""), metadata.get("uid", ""), metadata.get("resourceVersion", ""))
                view = self._views.get(key)
                if view is None:
                    try:
                        view = reader(item)
                    except (KeyError, TypeError, ValueError, AttributeError) as error:
                        logger.warning("%s %s can't be read: %s", item.get("kind"), metadata.get("name"), error)
                        continue
                views[key] = view
                found.append(view)
            return found

        pods, health = read(self._pods, read_pod), self._reported.health
        groups = read(self._groups, read_group)
        self._ports = remember(pods, self._ports, {*(pod.party for pod in pods), *(group.key for group in groups)})
        world = World(
            pods=[self._as_assumed(pod) for pod in pods],
            nodes=[
                replace(node, health=health[node.name]) if node.name in health else node
                for node in read(self._nodes, read_node)
            ],
            groups=groups,
            queues=read(self._queues, read_queue),
            shared_network=self._shared_network,
            ports=self._ports,
        )
        self._views = views
        there = {pod.uid for pod in pods} | {group.uid for group in world.groups}
        for memory in (self._assumed, self._written, self._told):
            for uid in [uid for uid in memory if uid not in there]:
                del memory[uid]
        return world

    def _as_assumed(self, pod: PodView) -> PodView:
        binding = self._assumed.get(pod.uid)
        if binding is None:
            return pod
        if pod.node and (pod.chips or not binding.chips):
            del self._assumed[pod.uid]
            return pod
        return replace(pod, node=binding.node, chips=binding.chips)

    async def _carry_out(self, decision: Decision) -> bool:
        """True if something has to be tried again."""
        work: list[Work] = [partial(self._bind, binding) for binding in decision.bindings]
        work += [partial(self._complain, key, message) for key, message in decision.complaints.items()]
        work += [partial(self._write, verdict) for verdict in decision.verdicts]
        return any(await asyncio.gather(*(self._guarded(each) for each in work)))

    async def _guarded(self, work: Work) -> bool:
        async with self._slots:
            try:
                return await work()
            except (NotFound, Conflict):
                return False  # gone or changed meanwhile: the caches will tell
            except (ApiError, OSError, TimeoutError) as error:
                logger.warning("scheduling: %s", error)
                return True

    async def _bind(self, binding: Binding) -> bool:
        pod = self._pods.get(binding.pod.name, binding.pod.namespace)
        if pod is None or pod["metadata"].get("uid") != binding.pod.uid:
            return False
        self._assumed[binding.pod.uid] = binding
        try:
            if binding.bound:
                patch = {"metadata": {"annotations": dict(binding.annotations)}}
                await self._kube.patch(POD, binding.pod.name, binding.pod.namespace, patch)
            else:
                await self._kube.bind(pod, binding.node, binding.annotations)
        except BaseException as error:
            self._assumed.pop(binding.pod.uid, None)
            if isinstance(error, ApiError):
                message = f"binding rejected: {error}"
                self._recorder.tell(_named(pod, POD.kind), WARNING, "FailedScheduling", message)
            raise
        if not binding.bound:
            message = f"Successfully assigned {binding.pod.key} to {binding.node}"
            self._recorder.tell(_named(pod, POD.kind), NORMAL, "Scheduled", message)
            self._told.pop(binding.pod.uid, None)
        return False

    async def _complain(self, key: str, message: str) -> bool:
        namespace, name = key.split("/", 1)
        pod = self._pods.get(name, namespace)
        if pod is None:
            return False
        uid = pod["metadata"].get("uid", "")
        if self._told.get(uid) == message:
            return False
        self._told[uid] = message
        self._recorder.tell(_named(pod, POD.kind), WARNING, "FailedScheduling", message)
        now = rfc3339(time.time())
        others = [c for c in (pod.get("status") or {}).get("conditions") or [] if c.get("type") != "PodScheduled"]
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastProbeTime": None,
            "lastTransitionTime": now,
        }
        patch: Object = {"status": {"conditions": [*others, condition]}}
        try:
            await self._kube.patch(POD, name, namespace, patch, status=True)
        except BaseException:
            self._told.pop(uid, None)
            raise
        return False

    async def _write(self, verdict: Verdict) -> bool:
        group = verdict.group
        status = dict(group.status)
        condition = _condition(verdict)
        current: list[Object] = status.get("conditions") or []
        told = _same(current, condition)
        unchanged = (status.get("phase"), *(status.get(name) or 0 for name in ("running", "succeeded", "failed"))) == (
            verdict.phase,
            verdict.running,
            verdict.succeeded,
            verdict.failed,
        )
        if unchanged and told:
            return False
        version, before = self._written.get(group.uid, ("", None))
        if version == group.version and before == verdict:
            return False  # written already; the cache has yet to see it
        self._written[group.uid] = (group.version, verdict)
        patch: Object = {
            "phase": verdict.phase,
            "running": verdict.running or None,
            "succeeded": verdict.succeeded or None,
            "failed": verdict.failed or None,
        }
        if condition is not None and not told:
            patch["conditions"] = [*(c for c in current if c.get("type") != condition["type"]), condition]
            if verdict.complaint and self._told.get(group.uid) != verdict.complaint:
                self._told[group.uid] = verdict.complaint
                item = self._groups.get(group.name, group.namespace)
                if item is not None:
                    self._recorder.tell(_named(item, POD_GROUP.kind), WARNING, "Unschedulable", verdict.complaint)
        try:
            await self._kube.patch(POD_GROUP, group.name, group.namespace, {"status": patch}, status=True)
        except BaseException:
            self._written.pop(group.uid, None)
            raise
        return False


def _pod_matters(before: Object, after: Object) -> bool:
    """Most changes of a pod don't concern its place: what its containers do, who has written what."""
    return _pod_facts(before) != _pod_facts(after)


def _pod_facts(pod: Object) -> tuple[Any, ...]:
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    return (
        spec.get("nodeName"),
        spec.get("schedulingGates"),
        spec.get("tolerations"),
        (pod.get("status") or {}).get("phase"),
        metadata.get("deletionTimestamp"),
        metadata.get("labels"),
        [annotations.get(name) for name in POD_ANNOTATIONS],
    )


def _node_matters(before: Object, after: Object) -> bool:
    return read_node(before) != read_node(after)


def _group_matters(before: Object, after: Object) -> bool:
    return (before.get("spec"), (before.get("status") or {}).get("phase")) != (
        after.get("spec"),
        (after.get("status") or {}).get("phase"),
    )


def _queue_matters(before: Object, after: Object) -> bool:
    return read_queue(before) != read_queue(after)


def _condition(verdict: Verdict) -> Object | None:
    if verdict.complaint:
        word, reason, message = "Unschedulable", "NotEnoughResources", verdict.complaint
    elif verdict.phase == "Running":
        word, reason, message = "Scheduled", "tasks in gang are ready to be scheduled", ""
    else:
        return None
    return {
        "type": word,
        "status": "True",
        "reason": reason,
        **({"message": message} if message else {}),
        "lastTransitionTime": rfc3339(time.time()),
        "transitionID": str(uuid.uuid4()),
    }


def _same(conditions: list[Object], wanted: Object | None) -> bool:
    """Is the wanted condition the newest?"""
    if wanted is None:
        return True
    if not conditions:
        return False
    return all(conditions[-1].get(name) == wanted.get(name) for name in ("type", "status", "reason", "message"))


def _named(item: Object, kind: str) -> Object:
    """Objects from a list may come without their kind."""
    default = POD_GROUP.api_version if kind == POD_GROUP.kind else "v1"
    return {**item, "kind": kind, "apiVersion": item.get("apiVersion") or default}
