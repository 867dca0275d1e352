"""The conditions of a job: at most one of each type, the one that was written last is the state of the job. Pure.

Failed is final. Running and Restarting exclude each other. When the job ends, Running stays in the list as False.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from evertrain.kube.port import Object
from evertrain.kube.times import parse_time

CREATED, RUNNING, RESTARTING, SUCCEEDED, FAILED = "Created", "Running", "Restarting", "Succeeded", "Failed"

JOB_CREATED = "JobCreated"
JOB_RUNNING = "JobRunning"
JOB_RESTARTING = "jobRestarting"
JOB_SUCCEEDED = "JobSucceeded"
JOB_FAILED = "JobFailed"
JOB_VALID_FAILED = "JobValidFailed"
SYNC_POD_GROUP_FAILED = "SyncPodGroupFailed"
POD_GROUP_NOT_INITIALIZED = "PodGroupNotInitialized"
POD_GROUP_PENDING = "PodGroupPending"
SYNC_SERVICE_FAILED = "SyncServiceFailed"
POD_CREATE_FAILED = "PodCreateFailed"

AGES = 10**10
"""Seconds: some 300 years."""


def timestamp(now: datetime) -> str:
    return now.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_after(text: str, seconds: int) -> datetime:
    """Who writes a number of seconds that no calendar has means: never."""
    return parse_time(text) + timedelta(seconds=max(-AGES, min(AGES, seconds)))


def find(conditions: Sequence[Object], kind: str) -> Object | None:
    return next((condition for condition in conditions if condition.get("type") == kind), None)


def is_true(conditions: Sequence[Object], kind: str) -> bool:
    condition = find(conditions, kind)
    return condition is not None and condition.get("status") == "True"


def is_finished(conditions: Sequence[Object]) -> bool:
    return is_true(conditions, SUCCEEDED) or is_true(conditions, FAILED)


def with_condition(conditions: Sequence[Object], kind: str, reason: str, message: str, now: datetime) -> list[Object]:
    """The list after a condition became true."""
    if is_finished(conditions):
        return list(conditions)
    at = timestamp(now)
    before = find(conditions, kind)
    lasting = before is not None and before.get("status") == "True"
    if before is not None and lasting and before.get("reason") == reason:
        # A message alone is no news, except how many restarts are left.
        said = kind != RESTARTING or before.get("message") == message
        if said:
            return list(conditions)
    new: Object = {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastUpdateTime": at,
        "lastTransitionTime": before.get("lastTransitionTime", at) if before is not None and lasting else at,
    }
    dropped = {kind, *{RESTARTING: (RUNNING,), RUNNING: (RESTARTING,)}.get(kind, ())}
    kept = [dict(condition) for condition in conditions if condition.get("type") not in dropped]
    if kind in (SUCCEEDED, FAILED):
        for condition in kept:
            if condition.get("type") == RUNNING and condition.get("status") == "True":
                condition.update(status="False", lastUpdateTime=at, lastTransitionTime=at)
    return [*kept, new]
