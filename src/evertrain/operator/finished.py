"""What is left to do for a job that has ended. Pure."""

from __future__ import annotations

from evertrain.acjob import conditions as c
from evertrain.acjob.pods import is_going, is_owned, phase
from evertrain.kube.port import ASCEND_JOB, POD, POD_GROUP, SERVICE, Object
from evertrain.operator.actions import Action, Delete, Emit, Observed, Outcome, WriteStatus


def clean_up(seen: Observed, status: Object) -> Outcome:
    metadata, policy = seen.job["metadata"], (seen.job.get("spec") or {}).get("runPolicy") or {}
    outcome = Outcome()
    if status.get("completionTime") is None:
        status["completionTime"] = c.timestamp(seen.now)
        outcome.actions.append(WriteStatus(status))
    outcome.actions += _pods(seen, status, policy)
    if seen.gang and seen.pod_group is not None and not is_going(seen.pod_group):
        group = seen.pod_group["metadata"]
        outcome.actions.append(Emit("Normal", "JobTerminated", "Job has been terminated. Deleting PodGroup"))
        outcome.actions.append(Delete(POD_GROUP, group["name"], group["namespace"], group["uid"], "the job has ended"))
    seconds = policy.get("ttlSecondsAfterFinished")
    if seconds is not None:
        due = c.seconds_after(status["completionTime"], seconds)
        if seen.now >= due:
            why = f"it ended {seconds} s ago"
            outcome.actions.append(Delete(ASCEND_JOB, metadata["name"], metadata["namespace"], metadata["uid"], why))
        else:
            outcome.wake = due
    return outcome


def _pods(seen: Observed, status: Object, policy: Object) -> list[Action]:
    """Pods that wait are deleted always, those that run or have ended as cleanPodPolicy says; a job that took too long
    must stop, whatever it says."""
    wanted = policy.get("cleanPodPolicy") or "None"
    phases = {"All": ("Pending", "Running", "Succeeded", "Failed", "Unknown"), "Running": ("Pending", "Running")}
    unwanted = phases.get(wanted, ("Pending",))
    if _was_overdue(status, policy):
        unwanted = (*unwanted, "Running")
    actions: list[Action] = []
    for pod in seen.pods:
        metadata = pod["metadata"]
        if not is_owned(pod, seen.job["metadata"]["uid"]) or phase(pod) not in unwanted or is_going(pod):
            continue
        actions.append(Delete(POD, metadata["name"], metadata["namespace"], metadata["uid"], "the job has ended"))
        service = seen.service
        if service is not None and service["metadata"]["name"] == metadata["name"] and not is_going(service):
            found = service["metadata"]
            if wanted in phases and is_owned(service, seen.job["metadata"]["uid"]):
                actions.append(Delete(SERVICE, found["name"], found["namespace"], found["uid"], "the job has ended"))
    return actions


def _was_overdue(status: Object, policy: Object) -> bool:
    seconds, started = policy.get("activeDeadlineSeconds"), status.get("startTime")
    if seconds is None or started is None or not c.is_true(status["conditions"], c.FAILED):
        return False
    return c.parse_time(status["completionTime"]) >= c.seconds_after(started, seconds)
