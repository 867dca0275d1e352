"""What failed and lost pods mean for a job: a restart, or its end. Pure.

Who restarts failed pods depends on the cluster. Where Volcano with the Ascend plugin schedules, it deletes pods and
counts in a ConfigMap of its own; the operator only shows that. Where there is no such ConfigMap, the operator does it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from evertrain.acjob import conditions as c
from evertrain.acjob import names
from evertrain.acjob.job import Job
from evertrain.acjob.pods import NO_EXIT_CODE, ended_at, exit_code
from evertrain.acjob.status import Rounds
from evertrain.kube.port import Object
from evertrain.operator.slots import Slots

LEAD = timedelta(seconds=60)
"""So long a pod that failed is left to ClusterD, if that knows of its fault: it may have told the pod to end, and be
about to delete it, or be restarted in between."""
RETRYABLE_FROM = 128
"""Exit codes from here on (signals, and the stand-in for none) are worth another try under the policy ExitCode."""


@dataclass
class Verdict:
    rounds: Rounds
    failed: str = ""
    """The message with which the job fails."""
    restarting: str = ""
    """The message with which it restarts."""
    exits: list[str] = field(default_factory=list)
    wake: datetime | None = None
    """Judge again then."""


def judge(
    job: Job, slots: Slots, status: Object, retry_config: Object | None, group: Object | None, now: datetime
) -> Verdict:
    rounds = Rounds.read(status, slots.versions())
    here = {pod["metadata"]["uid"] for pod in slots.pods}
    rounds.doomed = tuple(uid for uid in rounds.doomed if uid in here)
    verdict = Verdict(rounds)
    failed = []
    for kind, pod in slots.failed(rounds):
        due = _due_from_clusterd(job, pod, group)
        if due is None or now >= due:
            failed.append((kind, pod))
        else:
            verdict.wake = due if verdict.wake is None else min(due, verdict.wake)
    if failed:
        _judge_failed(job, failed, verdict, status, retry_config, group)
    if not verdict.failed and slots.lost(rounds.created):
        rounds.begin()
    if not verdict.failed and 0 < job.backoff_limit < rounds.count:
        verdict.failed = f"Job {job.name} has failed because it has reached the specified backoff limit"
    if not verdict.failed and slots.all_there(rounds):
        rounds.created = {kind: job.replicas(kind) for kind in job.types}
    return verdict


def _judge_failed(
    job: Job,
    failed: list[tuple[str, Object]],
    verdict: Verdict,
    status: Object,
    retry_config: Object | None,
    group: Object | None,
) -> None:
    rounds = verdict.rounds
    codes = [exit_code(pod) for _, pod in failed]
    exits = [
        f"Pod: {job.namespace}.{pod['metadata']['name']} exited with code {code}"
        for (_, pod), code in zip(failed, codes, strict=True)
        if code != NO_EXIT_CODE
    ]
    if all(job.restart_policy(kind) == "ExitCode" for kind, _ in failed) and min(codes) >= RETRYABLE_FROM:
        kinds = sorted({kind for kind, _ in failed})
        rounds.begin()
        rounds.doomed += tuple(pod["metadata"]["uid"] for _, pod in failed)
        verdict.restarting = f"Job {job.name} is restarting because {', '.join(kinds)} replica(s) failed."
        verdict.exits = exits
        return
    if retry_config is not None and job.retry_times > 0:
        if not c.is_true(status["conditions"], c.RESTARTING):
            _ask_volcano(job, verdict, retry_config)
            verdict.exits = exits
        return
    verdict.exits = exits
    if job.retry_times <= 0 or job.labels.get(names.FAULT_SCHEDULING) == "off":
        verdict.failed = f"Job {job.key} has failed because has pod failed."
        return
    remaining = job.retry_times - rounds.retries
    if remaining < 1:
        verdict.failed = f"Job {job.key} has failed because pod failed and remain retry times is 0."
        return
    verdict.restarting = _retrying(job, remaining)
    rounds.begin()
    rounds.retries += 1
    if _replaced_alone(job, [pod for _, pod in failed], group):
        rounds.doomed += tuple(pod["metadata"]["uid"] for _, pod in failed)
    else:
        rounds.floor = rounds.count


def is_left_to_others(job: Job, group: Object | None) -> bool:
    """Somebody outside of the cluster deletes the pods of this job that are no good."""
    annotations = ((group or {"metadata": {}})["metadata"]).get("annotations") or {}
    return job.labels.get(names.FAULT_SCHEDULING, "").startswith("external-") or names.PLATFORM_STRATEGY in annotations


def _due_from_clusterd(job: Job, pod: Object, group: Object | None) -> datetime | None:
    """Until when ClusterD may replace the failed pod; None if it won't."""
    led = bool(job.strategies) and not _is_paused(group) and job.retry_times <= 0
    ended = ended_at(pod)
    if not led or ended is None or names.FAULT_TYPE not in (pod["metadata"].get("labels") or {}):
        return None
    return ended + LEAD


def _is_paused(group: Object | None) -> bool:
    labels = ((group or {"metadata": {}})["metadata"]).get("labels") or {}
    return labels.get(names.PROCESS_RECOVER_ENABLE) in ("pause", "off")


def _replaced_alone(job: Job, failed: list[Object], group: Object | None) -> bool:
    """Only these pods start again, not all of the job."""
    paused = _is_paused(group)
    if job.takes_in_new_processes and not paused:
        return True
    alone = job.replaces_single_pods or (bool(job.strategies) and not paused)
    return alone and not any(_has_rank_zero(pod) for pod in failed)


def _has_rank_zero(pod: Object) -> bool:
    return (pod["metadata"].get("annotations") or {}).get(names.RANK_INDEX) == "0"


def _retrying(job: Job, remaining: int) -> str:
    return f"Job {job.key} is unconditional retry job and remain retry times is <{remaining}>."


def _ask_volcano(job: Job, verdict: Verdict, config: Object) -> None:
    try:
        entries = json.loads((config.get("data") or {}).get(names.RETRY_KEY) or "")
        times = int(entries[f"{job.namespace}/{job.pod_group_name}"]["Times"])
    except (ValueError, KeyError, TypeError, RecursionError):
        verdict.failed = f"Job {job.key} has failed because has pod failed."
        return
    if times < 1:
        verdict.failed = f"Job {job.key} has failed because pod failed and remain retry times is 0."
    else:
        verdict.restarting = _retrying(job, times)
