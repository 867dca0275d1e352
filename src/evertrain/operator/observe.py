"""Looks at everything that belongs to one job.

Most of it comes from caches that watches keep current. A few things are asked for only when they matter: whether a
queue that the cache doesn't know really doesn't exist, Volcano's retry counts once pods have failed, and the ConfigMap
for the rank table once pods have got their chips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from evertrain.acjob import names
from evertrain.acjob.conditions import is_finished
from evertrain.acjob.job import Job
from evertrain.acjob.pods import is_extra, is_going, phase
from evertrain.acjob.ranktable import TABLE_ANNOTATIONS, mounts_file
from evertrain.acjob.validation import queue_of, validate
from evertrain.kube.cache import Cache, Key, key_of
from evertrain.kube.port import (
    ASCEND_JOB,
    CONFIG_MAP,
    POD,
    POD_GROUP,
    QUEUE,
    SERVICE,
    Kube,
    NotFound,
    Object,
)
from evertrain.operator.actions import Observed
from evertrain.operator.rankfile import RankFiles

OURS = f"{names.OPERATOR_NAME}={names.CONTROLLER}"


class Observer:
    def __init__(
        self,
        kube: Kube,
        files: RankFiles,
        *,
        gang: bool,
        namespace: str | None = None,
        token_of: Callable[[str], str] = lambda uid: "",
        job_tls: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._kube = kube
        self._files = files
        self._gang = gang
        self._token_of = token_of
        self.jobs = Cache(kube, ASCEND_JOB, namespace)
        self.pods = Cache(kube, POD, namespace, labels=OURS)
        self.services = Cache(kube, SERVICE, namespace, labels=OURS)
        self.clusterd = Cache(kube, SERVICE, names.CLUSTERD_NAMESPACE, fields=f"metadata.name={names.CLUSTERD_SERVICE}")
        self.pods.index("job", job_key)
        self.caches = [self.jobs, self.pods, self.services, self.clusterd]
        if gang:
            self.pod_groups = Cache(kube, POD_GROUP, namespace)
            self.queues = Cache(kube, QUEUE)
            self.caches += [self.pod_groups, self.queues]
        self._job_tls = job_tls
        self._written: dict[Key, Object] = {}
        self._tables: dict[Key, object] = {}
        """By job: the state of the pods for which its rank table is known to be right."""

    def listen(self, changed: Callable[[Key], None]) -> None:
        """Calls with the key of each job that may have to be looked at."""

        def by(key: Callable[[Object], Key | None]) -> Callable[[Object | None, Object | None], None]:
            def listener(before: Object | None, after: Object | None) -> None:
                found = key(after or before or {})
                if found is not None:
                    changed(found)

            return listener

        self.jobs.listen(by(key_of))
        self.pods.listen(by(_job_of_label))
        self.services.listen(by(_job_of_label))
        if self._gang:
            self.pod_groups.listen(by(_job_of_owner))

    async def synced(self) -> None:
        """All is known. Without Volcano there are no PodGroups; that is no reason to leave jobs without a word."""
        for cache in self.caches:
            await (cache.answered if cache.kind in (POD_GROUP, QUEUE) else cache.synced).wait()

    def wrote(self, job: Object) -> None:
        """The job as the API server has it after a write of ours. Until the watch brings it, or something newer, it is
        the truth: acting on an older one could undo what was just decided."""
        self._written[key_of(job)] = job

    def failed(self, key: Key) -> None:
        self._tables.pop(key, None)

    def job(self, key: Key) -> Object | None:
        namespace, name = key
        cached = self.jobs.get(name, namespace)
        written = self._written.get(key)
        if cached is None or written is None or _uid(written) != _uid(cached) or _version(cached) >= _version(written):
            self._written.pop(key, None)
            return cached
        return written

    async def observe(self, key: Key, now: datetime) -> Observed | None:
        """None if there is no such job."""
        item = self.job(key)
        if item is None:
            self._tables.pop(key, None)
            return None
        namespace, name = key
        pods = tuple(self.pods.select("job", f"{namespace}/{name}"))
        uid = _uid(item)
        seen = Observed(
            job=item,
            now=now,
            pods=pods,
            service=self._service(item),
            pod_group=self.pod_groups.get(f"{name}-{uid}", namespace) if self._gang else None,
            gang=self._gang,
            has_groups=not self._gang or self.pod_groups.is_served,
            clusterd=self._clusterd(),
            token=self._token_of(uid),
            certificates=self._job_tls(),
        )
        status = item.get("status") or {}
        if is_finished(status.get("conditions") or []) or item["metadata"].get("deletionTimestamp"):
            return seen
        return await self._complete(key, seen, status)

    async def _complete(self, key: Key, seen: Observed, status: Object) -> Observed:
        fields: dict[str, Any] = {}
        if self._gang and self.queues.is_served and "startTime" not in status:
            fields["queue_error"] = await self._queue_error(queue_of(seen.job))
        if not fields.get("queue_error") and validate(seen.job) is None:
            job = Job(seen.job)
            if job.retry_times > 0 and self._gang and any(phase(pod) == "Failed" for pod in seen.pods):
                fields["retry_config"] = await self._find(names.RETRY_CONFIG, names.RETRY_CONFIG_NAMESPACE)
            state = frozenset(map(_chip_state, seen.pods))
            begun = bool(seen.pods) or "startTime" in status
            if job.chips[1] > 0 and begun and self._tables.get(key) != (job.uid, job.total, state):
                fields["rank_config"] = await self._find(names.RANK_TABLE_CONFIG + job.name, job.namespace)
                if mounts_file(job):
                    fields["rank_file"] = self._files.read(job.namespace, job.name)
                self._tables[key] = (job.uid, job.total, state)
        return replace(seen, **fields)

    def _service(self, item: Object) -> Object | None:
        metadata = item["metadata"]
        leader = names.LEADERS.get((metadata.get("labels") or {}).get(names.FRAMEWORK, ""))
        if leader is None:
            return None
        return self.services.get(f"{metadata['name']}-{leader.lower()}-0", metadata.get("namespace"))

    def _clusterd(self) -> str:
        service = self.clusterd.get(names.CLUSTERD_SERVICE, names.CLUSTERD_NAMESPACE)
        address = ((service or {}).get("spec") or {}).get("clusterIP") or ""
        return "" if address == "None" else str(address)

    async def _queue_error(self, queue: str | None) -> str:
        if queue is None or self.queues.get(queue) is not None:
            return ""
        try:
            await self._kube.get(QUEUE, queue)
        except NotFound as error:
            return error.message
        return ""

    async def _find(self, name: str, namespace: str) -> Object | None:
        try:
            return await self._kube.get(CONFIG_MAP, name, namespace)
        except NotFound:
            return None


def job_key(item: Object) -> str | None:
    found = _job_of_label(item)
    return None if found is None else "/".join(found)


def _job_of_label(item: Object) -> Key | None:
    metadata = item["metadata"]
    name = (metadata.get("labels") or {}).get(names.JOB_NAME)
    return None if name is None else (metadata.get("namespace") or "", name)


def _job_of_owner(item: Object) -> Key | None:
    metadata = item["metadata"]
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == names.KIND:
            return metadata.get("namespace") or "", owner["name"]
    return None


def _chip_state(pod: Object) -> tuple[object, ...]:
    """All of a pod that its part of the rank table depends on."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    written = tuple(annotations.get(name) for name in TABLE_ANNOTATIONS)
    address = (pod.get("status") or {}).get("podIP")
    return metadata["uid"], is_going(pod), is_extra(pod), written, address, (pod.get("spec") or {}).get("nodeName")


def _uid(item: Object) -> str:
    return str(item["metadata"].get("uid"))


def _version(item: Object) -> int:
    return int(item["metadata"].get("resourceVersion") or 0)
