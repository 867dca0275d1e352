"""Standby pods: workers that have started and wait for a place in the job. Pure.

A new pod needs seconds until its processes train: a node, a container, an interpreter, torch, once for the launcher and
once for the processes. A job that asks for it (annotation `standby-pods`) has pods that have all of this behind them.
One takes the place of the next worker that is deleted, by getting its labels and its rank; the job then has another
one made ready. All of it can be told from the pods alone. The old pod need not be gone: on a node that has lost its
power it may stay for minutes, and its name is not needed.

They come last: they are made when every place of the job is filled by a pod that runs, and go when one of those finds
no node, or when the first pod is replaced, with which all may start again. One that has ended stays as it is, so that
its log can be read; it is not tried again and again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from evertrain.acjob.job import Job
from evertrain.acjob.pods import is_going, is_standby, phase, placed
from evertrain.kube.port import POD, Object
from evertrain.operator.actions import Action, Delete, Patch
from evertrain.operator.hotswitch import Place


class Standbys:
    def __init__(
        self,
        job: Job,
        pods: Sequence[Object],
        taken: Mapping[Place, Object],
        claimed: Collection[Place],
        dismissed: Collection[str],
    ) -> None:
        """All pods of the job, those that have its places, the places that a hot switch gives to others, and the uids
        of pods that a restart replaces anyway."""
        self._job = job
        self._names = {pod["metadata"]["name"] for pod in pods}
        self._useless: list[tuple[Object, str]] = []
        self._heirs: dict[Place, Object] = {}
        waiting: list[Object] = []
        for pod in sorted((pod for pod in pods if is_standby(pod) and not is_going(pod)), key=_preference):
            if pod["metadata"]["uid"] in dismissed:
                self._useless.append((pod, "all pods start again"))
            else:
                waiting.append(pod)
        free = [where for where in job.indices() if where not in taken or is_going(taken[where])]
        if any(job.rank(*where) == 0 for where in free):
            self._useless += [(pod, "the first pod is replaced") for pod in waiting]
            waiting = []
        able = [pod for pod in waiting if phase(pod) == "Running"]
        for where, pod in zip((where for where in free if where not in claimed), able, strict=False):
            self._heirs[where] = pod
            waiting.remove(pod)
        if any(_finds_no_node(pod) for pod in taken.values()):
            self._useless += [(pod, "a pod of the job needs its node") for pod in waiting]
            waiting = []
        self._useless += [(pod, "fewer pods are to stand by") for pod in waiting[job.standby_pods :]]
        whole = not free and all(phase(pod) == "Running" for pod in taken.values())
        self._missing = max(0, job.standby_pods - len(waiting)) if whole else 0

    @property
    def heirs(self) -> Collection[Place]:
        """Places that one that stands by is about to have."""
        return self._heirs.keys()

    def wanted(self) -> Iterator[str]:
        """Names of those that are to be made: free ones, and the same ones until they are there."""
        numbers = (f"{self._job.name}-standby-{number}" for number in range(len(self._names) + self._missing))
        free = [name for name in numbers if name not in self._names]
        yield from free[: self._missing]

    def actions(self) -> Iterator[Action]:
        for pod, why in self._useless:
            metadata = pod["metadata"]
            yield Delete(POD, metadata["name"], metadata["namespace"], metadata["uid"], why, 0)
        for where, pod in self._heirs.items():
            metadata = pod["metadata"]
            yield Patch(POD, metadata["name"], metadata["namespace"], placed(self._job, pod, *where))


def _preference(pod: Object) -> tuple[str, str]:
    return pod["metadata"].get("creationTimestamp") or "", pod["metadata"]["name"]


def _finds_no_node(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    waits = phase(pod) == "Pending" and not (pod.get("spec") or {}).get("nodeName")
    return waits and any(
        each.get("type") == "PodScheduled" and each.get("reason") == "Unschedulable" for each in conditions
    )
