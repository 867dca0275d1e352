"""Questions about a job's pods and faults that a recovery asks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evertrain.clusterd.model import MEMORY, NETWORK, OTHER, SUB_HEALTHY, Job, JobFaults, RankFault
from evertrain.clusterd.recover import names as n

MENDABLE = (MEMORY, NETWORK)
"""Types of faults that running the step again may mend."""
TYPES = frozenset({MEMORY, OTHER, NETWORK})


def relevant(job: Job | None, faults: JobFaults | None) -> list[RankFault]:
    """The cluster's faults that hit pods which the job has now, and that call for something.

    A node that only does not answer (a fault without a code) is none: its processes may train on, and if they don't,
    the job says so itself.
    """
    if job is None or faults is None:
        return []
    sub_healthy = faults.health == SUB_HEALTHY
    return [
        each
        for each in faults.ranks
        if each.code
        and each.level not in n.UNHANDLED
        and (sub_healthy or each.level != n.SUB_HEALTH_LEVEL)
        and each.pod in job.pods
        and job.pods[each.pod].uid == each.pod_uid
        and each.pod_uid
    ]


def silent(job: Job | None, faults: JobFaults | None) -> dict[int, str]:
    """Pods whose nodes do not answer, and which those are. What has ended there, nobody can start again."""
    if job is None or faults is None:
        return {}
    there = {pod.uid for pod in job.pods.values()}
    return {each.pod: each.node for each in faults.ranks if not each.code and each.pod_uid in there}


def away(job: Job | None, faults: JobFaults | None) -> set[int]:
    """Pods of the job that are not there, don't run or are on a node that does not answer."""
    if job is None:
        return set()
    there = {rank for rank, pod in job.pods.items() if pod.running or pod.phase == "Succeeded"}
    return ({*range(job.replicas), *job.pods} - there) | silent(job, faults).keys()


def key(fault: RankFault) -> str:
    return f"{fault.rank}/{fault.pod_uid}/{fault.type}/{fault.code}"


def expanded(job: Job, pods: Iterable[int]) -> dict[int, str]:
    """All ranks of these pods."""
    return {rank: OTHER for pod in sorted(pods) for rank in job.ranks_of(pod)}


def same_pods(job: Job | None, pods: Mapping[int, str]) -> list[int]:
    """Those that are still the ones they were."""
    if job is None:
        return []
    return [pod for pod, uid in sorted(pods.items()) if pod in job.pods and job.pods[pod].uid == uid]


def rescheduled(job: Job | None, pods: Mapping[int, str]) -> bool:
    """All of them have a successor, and that has its place."""
    if job is None or job.group_phase not in ("", "Running"):
        return False
    return all(_replaced(job, pod, uid) and bool(job.pods[pod].node) for pod, uid in pods.items())


def running(job: Job | None) -> bool:
    """All pods that the job should have run."""
    if job is None or not job.pods or len(job.pods) < job.replicas:
        return False
    return all(pod.running for pod in job.pods.values())


def back(job: Job | None, pods: Mapping[int, str]) -> bool:
    return running(job) and rescheduled(job, pods)


def renewed(job: Job | None, origin: Mapping[int, str]) -> bool:
    """Not one of the pods is left."""
    return job is not None and bool(origin) and all(_replaced(job, pod, uid) for pod, uid in origin.items())


def _replaced(job: Job, pod: int, uid: str) -> bool:
    return pod in job.pods and job.pods[pod].uid != uid


def mendable(types: Iterable[str]) -> bool:
    """All are of one kind, and running the step again may mend it."""
    kinds = set(types)
    return kinds <= set(MENDABLE) and len(kinds) <= 1


def rank_list(ranks: Iterable[int], most: int = 16) -> str:
    """3-5, 8"""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


def ranks(ranks: Iterable[int]) -> str:
    found = set(ranks)
    return f"rank{'' if len(found) == 1 else 's'} {rank_list(found) or '(none)'}"
