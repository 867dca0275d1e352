"""A job as the fault centre needs it: where its ranks are, and which faults it can live with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evertrain.acjob import names
from evertrain.clusterd.faults.custom import Filter, read_filter
from evertrain.clusterd.model import Job, Pod

SERVER_APP = "mindie-ms-server"
RETRY, IN_PLACE, IGNORE = "retry", "recover-in-place", "ignore"
OTHER_STRATEGIES = ("graceExit", "forceExit", "hotSwitch")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chip is in a job."""

    job: str
    pod: int
    pod_uid: str
    rank: int
    device: str


@dataclass(frozen=True, slots=True)
class JobView:
    uid: str
    table: Job | None
    """As it was when all its pods had their places last; None: never yet."""
    retries: bool
    """It can run a step again."""
    restarts_in_place: bool
    ignores_sub_health: bool
    filter: Filter
    serves: str
    """The MindIE service that it is a server of; empty if it is none."""
    created_ms: int
    pods: Mapping[str, tuple[Pod, ...]]
    """By node, those of `table`."""
    places: Mapping[str, Mapping[str, Place]]
    """By node and number of the chip, those of `table`."""
    used: Mapping[str, frozenset[str]]
    """By node, the chips that its pods have now; empty where they have none."""

    @property
    def nodes(self) -> set[str]:
        return {*self.pods, *self.used}

    @property
    def uids(self) -> frozenset[str]:
        """Of the pods in `table`."""
        return frozenset(pod.uid for pods in self.pods.values() for pod in pods)


def renewed_ranks(before: JobView, after: JobView) -> list[int]:
    """Ranks whose pod is another one now."""
    if before.table is None or after.table is None:
        return []
    was = {pod.rank: pod.uid for pod in before.table.pods.values()}
    renewed = [rank for rank, pod in after.table.pods.items() if was.get(rank, pod.uid) != pod.uid]
    return [rank for pod in renewed for rank in after.table.ranks_of(pod)]


def look_at(job: Job, before: JobView | None, kept: Job | None = None) -> JobView:
    """`kept`: as it was when all its pods had their places, from before a restart."""
    table = job if job.complete else before.table if before is not None else kept
    if table is None and job.status in ("running", "failed"):
        table = job  # it ran before anybody looked
    if job.status == "complete":
        table = None
    strategies = job.annotations.get(names.RECOVER_STRATEGY, "").replace(" ", "").split(",")
    on = job.labels.get(names.PROCESS_RECOVER_ENABLE) == "on"
    pods: dict[str, list[Pod]] = {}
    places: dict[str, dict[str, Place]] = {}
    for pod in table.pods.values() if table is not None else ():
        if not pod.node or table is None:
            continue
        pods.setdefault(pod.node, []).append(pod)
        ranks = table.ranks_of(pod.rank)
        for index, device in enumerate(pod.devices):
            rank = ranks[min(index, len(ranks) - 1)]
            places.setdefault(pod.node, {})[device.id] = Place(job.uid, pod.rank, pod.uid, rank, device.id)
    used: dict[str, set[str]] = {}
    for pod in (*job.pods.values(), *job.backups.values()):
        if pod.node and pod.phase not in ("Succeeded", "Failed"):
            used.setdefault(pod.node, set()).update(device.id for device in pod.devices)
    return JobView(
        uid=job.uid,
        table=table,
        retries=on and RETRY in strategies,
        restarts_in_place=on and IN_PLACE in strategies,
        ignores_sub_health=job.labels.get(names.SUB_HEALTHY_STRATEGY) not in OTHER_STRATEGIES,
        filter=read_filter(job.annotations),
        serves=job.labels.get(names.JOB_ID, "") if job.labels.get(names.APP) == SERVER_APP else "",
        created_ms=job.created * 1000,
        pods={node: tuple(each) for node, each in pods.items()},
        places=places,
        used={node: frozenset(each) for node, each in used.items()},
    )
