"""What to do for one job, from what is. Pure.

Nothing here remembers anything: the same state gives the same actions, whoever asks and however often. What must
outlive the operator is in the status, and the status is written before anything else is done; a kill between two
actions leaves a state from which the next look goes on.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from evertrain.acjob import conditions as c
from evertrain.acjob import names, podgroup, ranktable
from evertrain.acjob.job import Job
from evertrain.acjob.pods import (
    Surroundings,
    backup_pod,
    is_owned,
    new_pod,
    standby_pod,
    template_warnings,
    token_secret,
)
from evertrain.acjob.service import address, leader_service
from evertrain.acjob.status import replica_statuses, status_of
from evertrain.acjob.validation import validate
from evertrain.kube.port import CONFIG_MAP, POD, POD_GROUP, SECRET, SERVICE, Object
from evertrain.operator.actions import (
    Action,
    Create,
    Delete,
    Emit,
    Observed,
    Outcome,
    Patch,
    WriteRankFile,
    WriteStatus,
)
from evertrain.operator.finished import clean_up
from evertrain.operator.restarts import is_left_to_others, judge
from evertrain.operator.slots import Slots

ELASTIC = "elastic-training"
PATIENCE = 5
"""Seconds. A scheduler that runs looks at a new group sooner; that it may not run is said only after them."""


def reconcile(seen: Observed) -> Outcome:
    item = seen.job
    if item["metadata"].get("deletionTimestamp"):
        return Outcome()  # what the job owns goes with it
    status = status_of(item)
    if c.is_finished(status["conditions"]):
        return clean_up(seen, status)
    invalid = validate(item, queue_error=seen.queue_error if seen.gang else "")
    if invalid is not None:
        _set(status, seen, c.FAILED, c.JOB_VALID_FAILED, str(invalid))
        status["completionTime"] = c.timestamp(seen.now)
        return Outcome([WriteStatus(status), Emit("Warning", invalid.reason, invalid.message)])
    return _Look(seen, status).outcome()


def with_problem(item: Object, seen: Observed, reason: str, message: str) -> Object | None:
    """The status after something could not be created; None if that is not to be shown."""
    status = status_of(item)
    if not _may_show_created(status, seen):
        return None
    before = status["conditions"]
    _set(status, seen, c.CREATED, reason, message)
    return None if status["conditions"] == before else status


def _set(status: Object, seen: Observed, kind: str, reason: str, message: str) -> None:
    status["conditions"] = c.with_condition(status["conditions"], kind, reason, message, seen.now)


def _may_show_created(status: Object, seen: Observed) -> bool:
    """The last condition is the state that users see: a job that runs doesn't fall back because one pod is awaited."""
    begun = c.is_true(status["conditions"], c.RUNNING) or c.is_true(status["conditions"], c.RESTARTING)
    uid = seen.job["metadata"].get("uid") or ""
    return not begun or not any(is_owned(pod, uid) for pod in seen.pods)


class _Look:
    """One look at a valid, unfinished job."""

    def __init__(self, seen: Observed, status: Object) -> None:
        self.seen = seen
        self.status = status
        self.job = Job(seen.job)
        self.slots = Slots(self.job, seen.pods)
        self.actions: list[Action] = []
        self.wake: datetime | None = None

    def outcome(self) -> Outcome:
        job, seen, status = self.job, self.seen, self.status
        before = status_of(seen.job)
        if not status["conditions"]:
            _set(status, seen, c.CREATED, c.JOB_CREATED, f"Job {job.name} is create.")
            self.actions += [Emit("Warning", *warning) for warning in template_warnings(job, seen.gang)]
        verdict = judge(job, self.slots, status, seen.retry_config, seen.pod_group, seen.now)
        rounds = verdict.rounds
        self.wake = verdict.wake
        if rounds.written() != (before.get("restarts") or {"count": 0, "retries": 0, "floor": 0}):
            status["restarts"] = rounds.written()
        self.actions += [Emit("Warning", "ExitedWithCode", text) for text in verdict.exits]
        if verdict.failed:
            self._finish(c.FAILED, c.JOB_FAILED, verdict.failed)
        elif self._overdue():
            text = f"Job {job.name} has failed because it was active longer than specified deadline"
            self._finish(c.FAILED, c.JOB_FAILED, text)
        else:
            if verdict.restarting:
                _set(status, seen, c.RESTARTING, c.JOB_RESTARTING, verdict.restarting)
            self.slots.dismiss(rounds)
            self._delete_pods()
            self.actions += self.slots.backups().actions()
            self.actions += self.slots.standbys().actions()
            self._make_objects(rounds.count)
            self._derive()
            self._rank_tables()
        return self._outcome(before)

    def _outcome(self, before: Object) -> Outcome:
        """Status first, then the rest; each condition that is new is also an event."""
        first: list[Action] = []
        if self.status != before:
            if self.status.get("lastReconcileTime") is None and "startTime" not in self.status:
                self.status["lastReconcileTime"] = c.timestamp(self.seen.now)
            first.append(WriteStatus(self.status))
        for condition in self.status["conditions"]:
            old = c.find(before["conditions"], condition["type"]) or {}
            if condition["status"] == "True" and any(condition[key] != old.get(key) for key in ("reason", "message")):
                bad = condition["type"] == c.FAILED or condition["reason"].endswith("Failed")
                self.actions.append(Emit("Warning" if bad else "Normal", condition["reason"], condition["message"]))
        return Outcome(first + self.actions, self.wake)

    def _finish(self, kind: str, reason: str, message: str) -> None:
        _set(self.status, self.seen, kind, reason, message)
        self.status["completionTime"] = c.timestamp(self.seen.now)
        self.status["replicaStatuses"] = replica_statuses(self.job, self.slots.counted())
        if kind == c.SUCCEEDED:
            for counts in self.status["replicaStatuses"].values():
                counts["succeeded"] = counts.get("succeeded", 0) + counts.pop("active", 0)
                if not counts["succeeded"]:
                    del counts["succeeded"]

    def _overdue(self) -> bool:
        seconds, started = self.job.run_policy.get("activeDeadlineSeconds"), self.status.get("startTime")
        if seconds is None or started is None:
            return False
        deadline = c.seconds_after(started, seconds)
        self.wake = deadline if self.wake is None else min(self.wake, deadline)
        return self.seen.now >= deadline

    def _delete_pods(self) -> None:
        # Not 0: the name and the address of a pod are free only when its processes are gone.
        grace = 1 if self.job.labels.get(names.FAULT_SCHEDULING) == "force" else None
        for pod, why in self.slots.unwanted(replaced=not is_left_to_others(self.job, self.seen.pod_group)):
            metadata = pod["metadata"]
            self.actions.append(Delete(POD, metadata["name"], metadata["namespace"], metadata["uid"], why, grace))

    def _make_objects(self, version: int) -> None:
        """PodGroup, then service, then pods: each needs the one before."""
        job, seen = self.job, self.seen
        if seen.gang and not self._gate_is_open():
            return
        self.status.setdefault("startTime", c.timestamp(seen.now))
        leader = ("", "")
        if job.leader is not None:
            service = seen.service
            if service is None or not is_owned(service, job.uid):
                # Another's service stands in the way only until it turns out to stay: the API server will say so.
                item = leader_service(job)
                self.actions.append(Create(SERVICE, item, c.SYNC_SERVICE_FAILED, "{error}"))
                return
            leader = address(service)
            if not all(leader):
                text = f"job<{job.key}> chief service Ip<{leader[0]}> or port<{leader[1]}> is empty"
                self._show_created(c.SYNC_SERVICE_FAILED, text)
                return
        token, tls = bool(seen.token), bool(seen.certificates)
        around = Surroundings(leader, seen.clusterd or names.CLUSTERD_DOMAIN, version, seen.gang, token, tls)
        if (token or tls) and self.slots.missing():
            failure = "the Secret with what the job shows to ClusterD can't be created: {error}"
            secret = token_secret(job, seen.token, seen.certificates)
            self.actions.append(Create(SECRET, secret, c.POD_CREATE_FAILED, failure))
        for kind, index in self.slots.missing():
            failure = f"failed to create pods of type<{kind}>: {{error}}"
            self.actions.append(Create(POD, new_pod(job, kind, index, around), c.POD_CREATE_FAILED, failure))
        for kind, index, source in self.slots.backups().wanted():
            failure = f"failed to create pods of type<{kind}>: {{error}}"
            backup = backup_pod(job, kind, index, source, around)
            self.actions.append(Create(POD, backup, c.POD_CREATE_FAILED, failure))
        for name in self.slots.standbys().wanted():
            failure = "failed to create a pod that stands by: {error}"
            self.actions.append(Create(POD, standby_pod(job, name, around), c.POD_CREATE_FAILED, failure))

    def _gate_is_open(self) -> bool:
        job, group = self.job, self.seen.pod_group
        if not self.seen.has_groups:
            self._show_closed(podgroup.NO_GROUPS)
            again = self.seen.now + timedelta(seconds=PATIENCE)  # nobody tells us when Volcano comes
            self.wake = again if self.wake is None else min(self.wake, again)
            return False
        if group is None:
            failure = "unable to create PodGroup: {error}"
            self.actions.append(Create(POD_GROUP, podgroup.pod_group(job), c.SYNC_POD_GROUP_FAILED, failure))
            return False
        patch = podgroup.resized(job, group)
        if patch:
            self.actions.append(Patch(POD_GROUP, job.pod_group_name, job.namespace, patch))
        closed = podgroup.gate(group)
        if closed is not None:
            self._show_closed(closed)
        return closed is None

    def _show_closed(self, closed: podgroup.Closed) -> None:
        if not self._is_early_for(closed):
            self._show_created(closed.reason, closed.message)

    def _is_early_for(self, closed: podgroup.Closed) -> bool:
        created = c.find(self.status["conditions"], c.CREATED)
        if closed.reason != c.POD_GROUP_NOT_INITIALIZED or created is None or created["reason"] != c.JOB_CREATED:
            return False
        due = c.seconds_after(created["lastUpdateTime"], PATIENCE)
        if self.seen.now >= due:
            return False
        self.wake = due if self.wake is None else min(self.wake, due)
        return True

    def _show_created(self, reason: str, message: str) -> None:
        if _may_show_created(self.status, self.seen):
            _set(self.status, self.seen, c.CREATED, reason, message)

    def _derive(self) -> None:
        """The condition that the pods add up to."""
        job, slots = self.job, self.slots
        if "startTime" in self.status or slots.pods:
            self.status["replicaStatuses"] = replica_statuses(job, slots.counted())
        active, succeeded, failed = (slots.in_phase(phase) for phase in ("Running", "Succeeded", "Failed"))
        if failed or any(slots.unwanted()):
            return
        elastic = ELASTIC in job.strategies
        if active:
            needed = 1 if elastic else max(1, min(job.min_available, job.total))
            if active + succeeded >= needed:
                text = f"Job {job.key} is running."
                _set(self.status, self.seen, c.RUNNING, c.JOB_RUNNING, text)
            return
        # A job that ran may end without pods for which there was no place in the end; one that begins waits for them.
        ran = c.is_true(self.status["conditions"], c.RUNNING)
        if succeeded and slots.has_ended(leftovers=ran and (elastic or job.spec["successPolicy"] == "")):
            self._finish(c.SUCCEEDED, c.JOB_SUCCEEDED, f"Job {job.key} successfully completed.")

    def _rank_tables(self) -> None:
        config, file = self.seen.rank_config, self.seen.rank_file
        now = self.seen.now.timestamp()
        if config is not None:
            data = config.get("data") or {}
            table, version = str(data.get("hccl.json") or ""), str(data.get("version") or "")
            wanted = self._table(table)
            if wanted is not None:
                metadata = config["metadata"]
                patch = {
                    "metadata": {"resourceVersion": metadata["resourceVersion"]},
                    "data": {"hccl.json": wanted, "version": ranktable.next_version(table, version, now)},
                }
                self.actions.append(Patch(CONFIG_MAP, metadata["name"], metadata["namespace"], patch))
        if file is not None:
            wanted = self._table(file[0])
            if wanted is not None:
                self.actions.append(WriteRankFile(wanted, ranktable.next_version(*file, now)))

    def _table(self, current: str) -> str | None:
        try:
            return ranktable.next_table(self.job, self.slots.pods, current)
        except (ValueError, TypeError, AttributeError):
            return None  # what others wrote on the pods is not usable yet; the next change is the next chance
