"""The status of a job, counted from its pods. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from evertrain.acjob.job import Job
from evertrain.acjob.pods import phase
from evertrain.kube.port import Object

COUNTED = {"Running": "active", "Succeeded": "succeeded", "Failed": "failed"}


def status_of(item: Object) -> Object:
    """A copy of the job's status in which the required fields exist."""
    status: Object = copy.deepcopy(item.get("status") or {})
    status["conditions"] = status.get("conditions") or []
    status["replicaStatuses"] = status.get("replicaStatuses") or {}
    return status


def replica_statuses(job: Job, pods: Iterable[tuple[str, Object]]) -> Object:
    """How many pods of each replica type run, have succeeded and have failed. What is zero isn't written."""
    counts: dict[str, dict[str, int]] = {kind: {} for kind in job.types}
    for kind, pod in pods:
        counted = COUNTED.get(phase(pod))
        if counted is not None:
            counts[kind][counted] = counts[kind].get(counted, 0) + 1
    return counts


@dataclass
class Rounds:
    """What the operator must remember of the restarts of a job, also across its own death. It is kept in the status and
    written before anything is done about it, so nothing is counted twice or forgotten."""

    count: int = 0
    """Rounds of restarts, whoever caused them. New pods carry it in their label `version`."""
    retries: int = 0
    """Rounds that the operator began because pods had failed."""
    floor: int = 0
    """Pods of earlier rounds than this one have to go."""
    doomed: tuple[str, ...] = ()
    """The uids of single pods that have to go."""
    created: dict[str, int] | None = None
    """How many pods of each type there were when all of them existed. One of those that is missing now was lost."""

    @classmethod
    def read(cls, status: Object, versions: Iterable[int]) -> Rounds:
        """`versions` are the labels of the pods that exist: another operator may have counted before us."""
        kept = status.get("restarts") or {}
        return cls(
            count=max([int(kept.get("count", 0)), *versions]),
            retries=int(kept.get("retries", 0)),
            floor=int(kept.get("floor", 0)),
            doomed=tuple(kept.get("doomed") or ()),
            created=dict(kept["created"]) if kept.get("created") else None,
        )

    def written(self) -> Object:
        fields: Object = {"count": self.count, "retries": self.retries, "floor": self.floor}
        if self.doomed:
            fields["doomed"] = sorted(self.doomed)
        if self.created:
            fields["created"] = self.created
        return fields

    def begin(self) -> None:
        """A new round: pods are missing or will be, and that is no loss until all are there again."""
        self.count += 1
        self.created = None
