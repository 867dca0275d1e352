"""What of the cluster the rescheduler watches, and which jobs and nodes a change concerns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from evertrain.acjob import names
from evertrain.clusterd.resched import reasons
from evertrain.clusterd.resched.views import GONE, JobView, NodeView, PodView, read_job, read_node, read_pod
from evertrain.kube.cache import Cache
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NODE, POD, POD_GROUP, ApiError, Kube, NotFound, Object
from evertrain.wire import clusterinfo

OURS = f"{names.OPERATOR_NAME}={names.CONTROLLER}"
SCHEDULER_NAMESPACE, SCHEDULER_CONFIG, PLUGIN = "volcano-system", "volcano-scheduler-configmap", "volcano-npu"
"""Volcano is configured by this; its Ascend plugin is one of the names in it."""
SCHEDULER_AGAIN = 60.0
"""Seconds between two looks whether we may read that now."""
BY_UID, BY_JOB, BY_NODE = "resched uid", "resched job", "resched node"


class Shared(Protocol):
    """Caches of somebody else, who runs them."""

    jobs: Cache
    pods: Cache
    groups: Cache
    nodes: Cache


class Watched:
    def __init__(self, kube: Kube, shared: Shared | None = None) -> None:
        self._kube = kube
        self.jobs = shared.jobs if shared else Cache(kube, ASCEND_JOB)
        self.pods = shared.pods if shared else Cache(kube, POD, labels=OURS)
        self.groups = shared.groups if shared else Cache(kube, POD_GROUP)
        self.nodes = shared.nodes if shared else Cache(kube, NODE)
        labels = ",".join(f"{name}={value}" for name, value in clusterinfo.LABELS.items())
        self.reports = Cache(kube, CONFIG_MAP, clusterinfo.NAMESPACE, labels=labels)
        self.scheduler = Cache(kube, CONFIG_MAP, SCHEDULER_NAMESPACE, fields=f"metadata.name={SCHEDULER_CONFIG}")
        self.reasons = Cache(kube, CONFIG_MAP, reasons.NAMESPACE, fields=f"metadata.name={reasons.NAME}")
        self._shared = shared is not None
        self._reported = clusterinfo.Reports()
        self._read: dict[str, tuple[str, PodView]] = {}
        """By uid of the pod: its version, and what was read of that."""
        self._last: tuple[object, dict[str, Any]] = (None, {})
        """The version of the records, and what was read of that."""
        self.jobs.index(BY_UID, lambda item: str(item["metadata"].get("uid")))
        self.pods.index(BY_JOB, owner_uid)
        self.pods.index(BY_NODE, lambda pod: (pod.get("spec") or {}).get("nodeName"))
        self.groups.index(BY_JOB, owner_uid)

    async def caches(self) -> list[Cache]:
        """To be run by us, and waited for. Without Volcano there are no PodGroups, and nothing to watch; its
        configuration is not among them where we may not read it."""
        ours = [self.reports, self.reasons]
        if await self._may_read_scheduler():
            ours.append(self.scheduler)
        if self._shared:
            return ours
        ours += [self.jobs, self.pods, self.nodes]
        try:
            await self._kube.list(POD_GROUP, labels="evertrain.dev/is-there=nothing")
        except NotFound:
            return ours
        return [*ours, self.groups]

    async def _may_read_scheduler(self) -> bool:
        try:
            await self._kube.list(CONFIG_MAP, SCHEDULER_NAMESPACE, fields=f"metadata.name={SCHEDULER_CONFIG}")
        except ApiError as error:
            return error.code != 403
        except (OSError, TimeoutError):
            pass  # the cache tries until it has an answer
        return True

    async def run_scheduler(self) -> None:
        """Where we may not read it at the start: somebody may notice, and allow it."""
        while True:
            await asyncio.sleep(SCHEDULER_AGAIN)
            if await self._may_read_scheduler():
                break
        await self.scheduler.run()

    def listen(self, job: Callable[[str], None], node: Callable[[str], None], plugin: Callable[[], None]) -> None:
        """Calls with the uid of each job and the name of each node that is to be looked at again; and when another
        scheduler may be at work."""

        def by_job(uid: Callable[[Object], str | None]) -> Callable[[Object | None, Object | None], None]:
            def listener(before: Object | None, after: Object | None) -> None:
                found = uid(after or before or {})
                if found:
                    job(found)

            return listener

        def of_node(name: str) -> None:
            node(name)
            for pod in self.pods.select(BY_NODE, name):
                uid = owner_uid(pod)
                if uid:
                    job(uid)

        def node_changed(before: Object | None, after: Object | None) -> None:
            if before is None or after is None or _node_facts(before) != _node_facts(after):
                of_node((after or before or {})["metadata"]["name"])

        def reported(before: Object | None, after: Object | None) -> None:
            """They are rewritten every few seconds, mostly with the same content."""
            item = after or before or {}
            for name in self._reported.update(_name(item), "" if after is None else _text(item, _name(item))):
                of_node(name)

        self.jobs.listen(by_job(lambda item: str(item["metadata"].get("uid"))))
        self.pods.listen(by_job(owner_uid))
        self.pods.listen(self._forget)
        self.groups.listen(by_job(owner_uid))
        self.nodes.listen(node_changed)
        self.reports.listen(reported)
        self.scheduler.listen(lambda before, after: plugin())

    @property
    def has_plugin(self) -> bool:
        return any(PLUGIN in str(text) for item in self.scheduler for text in (item.get("data") or {}).values())

    def job(self, uid: str) -> JobView | None:
        found = self.jobs.select(BY_UID, uid)
        if not found:
            return None
        groups = sorted(self.groups.select(BY_JOB, uid), key=_name)
        return read_job(found[0], groups[0] if groups else None, self.pods.select(BY_JOB, uid), self._pod)

    def _pod(self, pod: Object) -> PodView:
        metadata = pod["metadata"]
        uid, version = str(metadata.get("uid")), str(metadata.get("resourceVersion"))
        known = self._read.get(uid)
        if known is None or known[0] != version:
            known = self._read[uid] = version, read_pod(pod)
        return known[1]

    def _forget(self, before: Object | None, after: Object | None) -> None:
        if after is None and before is not None:
            self._read.pop(str(before["metadata"].get("uid")), None)

    @property
    def health(self) -> Mapping[str, clusterinfo.Health]:
        """By node, if anything is wrong with it."""
        return self._reported.health

    def node(self, name: str) -> NodeView:
        found = self.nodes.get(name)
        return GONE if found is None else read_node(found, self.health.get(name, clusterinfo.WELL))

    def last_rescheduled(self, job: JobView) -> float | None:
        found = self.reasons.get(reasons.NAME, reasons.NAMESPACE)
        version = None if found is None else found["metadata"].get("resourceVersion")
        if self._last[0] != version:
            self._last = version, reasons.read(_text(found or {}, reasons.KEY))
        return reasons.last(self._last[1], job.id)


def owner_uid(item: Object) -> str | None:
    """The uid of the AscendJob that an object was made for."""
    for owner in item["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == names.KIND:
            return str(owner.get("uid"))
    return None


def _node_facts(node: Object) -> tuple[object, ...]:
    return read_node(node), (node.get("spec") or {}).get("taints")


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])


def _text(item: Object, key: str) -> str:
    return str((item.get("data") or {}).get(key) or "")
