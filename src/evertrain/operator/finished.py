"""What is left to do for a job that has ended. Pure."""

from __future__ import annotations

from evertrain.acjob import conditions as c
from evertrain.acjob.pods import is_extra, is_going, is_owned, phase
from evertrain.kube.port import ASCEND_JOB, POD, POD_GROUP, SERVICE, Kind, Object
from evertrain.kube.times import parse_time
from evertrain.operator.actions import Action, Delete, Emit, Observed, Outcome, WriteStatus


def clean_up(seen: Observed, status: Object) -> Outcome:
    metadata, policy = seen.job["metadata"], (seen.job.get("spec") or {}).get("runPolicy") or {}
    outcome = Outcome()
    if status.get("completionTime") is None:
        status["completionTime"] = c.timestamp(seen.now)
        outcome.actions.append(WriteStatus(status))
    outcome.actions += _pods(seen, status, policy)
    if seen.gang and seen.pod_group is not None and not is_going(seen.pod_group):
        outcome.actions.append(Emit("Normal", "JobTerminated", "Job has been terminated. Deleting PodGroup"))
        outcome.actions.append(_delete(POD_GROUP, seen.pod_group))
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
    """Pods that wait, for a node or for another's place, are deleted always, those that run or have ended as
    cleanPodPolicy says; a job that took too long must stop, whatever it says."""
    wanted = policy.get("cleanPodPolicy") or "None"
    phases = {"All": ("Pending", "Running", "Succeeded", "Failed", "Unknown"), "Running": ("Pending", "Running")}
    unwanted = phases.get(wanted, ("Pending",))
    if _was_overdue(status, policy):
        unwanted = (*unwanted, "Running")
    uid = seen.job["metadata"]["uid"]
    ours = [pod for pod in seen.pods if is_owned(pod, uid)]
    actions: list[Action] = [
        _delete(POD, pod) for pod in ours if (phase(pod) in unwanted or is_extra(pod)) and not is_going(pod)
    ]
    service = seen.service
    if wanted in phases and service is not None and is_owned(service, uid) and not is_going(service):
        # It goes with its pod, or after it: whoever deleted the pod may have been killed then.
        staying = {pod["metadata"]["name"] for pod in ours if phase(pod) not in unwanted}
        if service["metadata"]["name"] not in staying:
            actions.append(_delete(SERVICE, service))
    return actions


def _delete(kind: Kind, item: Object) -> Delete:
    metadata = item["metadata"]
    return Delete(kind, metadata["name"], metadata["namespace"], metadata["uid"], "the job has ended")


def _was_overdue(status: Object, policy: Object) -> bool:
    seconds, started = policy.get("activeDeadlineSeconds"), status.get("startTime")
    if seconds is None or started is None or not c.is_true(status["conditions"], c.FAILED):
        return False
    return parse_time(status["completionTime"]) >= c.seconds_after(started, seconds)
