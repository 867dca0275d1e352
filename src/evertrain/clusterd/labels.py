"""`fault-type` of pods that related faults have hit, which Volcano reads: what is wanted, and what is written.

A scheduler that misses `Separate` leaves a pod where it is broken, so a label is written again until the API server
has taken it. Only what it has taken counts as written. Of each pod one write is under way at a time, and it takes what
is wanted when it begins: a label that is set and removed at once can't end up set.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from evertrain import aio
from evertrain.clusterd.model import Job, Pod
from evertrain.clusterd.recover.events import PatchPod
from evertrain.clusterd.recover.names import FAULT_TYPE
from evertrain.kube.queue import WorkQueue

WORKERS = 8
FIRST_DELAY, MAX_DELAY = 1.0, 20.0
"""Seconds until a write that has failed is tried again. Each has been tried a few times already."""


class Labels:
    def __init__(self, write: Callable[[Job, PatchPod], Awaitable[str]]) -> None:
        """`write` gives the reason why it could not be done, empty if it was; also if the pod is gone."""
        self._write = write
        self._wanted: Mapping[str, str] = {}
        """By uid of the pod. Missing: none."""
        self._written: dict[str, str] = {}
        self._places: dict[str, tuple[Job, Pod]] = {}
        """Pods whose labels have to be written."""
        self._queue: WorkQueue[str] = WorkQueue(first_delay=FIRST_DELAY, max_delay=MAX_DELAY)

    def found(self, uid: str, label: str) -> None:
        """A ClusterD before us has written it."""
        self._written.setdefault(uid, label)

    @property
    def wanted(self) -> Mapping[str, str]:
        return self._wanted

    def want(self, labels: Mapping[str, str], jobs: Iterable[Job]) -> None:
        """These, and no others, of the pods of all jobs. A pod that no job has is gone."""
        self._wanted = dict(labels)
        differ = {uid for uid in {*labels, *self._written} if labels.get(uid) != self._written.get(uid)}
        differ |= self._places.keys()  # a write that is under way may bring what is no longer wanted
        here = {pod.uid: (job, pod) for job in jobs for pod in job.pods.values() if pod.uid in differ}
        for uid in differ - here.keys():
            self._written.pop(uid, None)
            self._places.pop(uid, None)
        self._places |= here
        for uid in here:
            self._queue.add(uid)

    async def run(self) -> None:
        async with aio.TaskGroup() as tasks:
            for _ in range(WORKERS):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            uid = await self._queue.get()
            try:
                await self._look_at(uid)
            finally:
                self._queue.done(uid)

    async def _look_at(self, uid: str) -> None:
        place, label = self._places.get(uid), self._wanted.get(uid)
        if place is None:
            return
        job, pod = place
        if await self._write(job, PatchPod(pod.name, uid, labels={FAULT_TYPE: label})):
            self._queue.retry(uid)
            return
        self._queue.forget(uid)
        if label is None:
            self._written.pop(uid, None)
        else:
            self._written[uid] = label
        if self._wanted.get(uid) == label:
            self._places.pop(uid, None)
