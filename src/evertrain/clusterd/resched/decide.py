"""Which pods of a job have to go because of faults, in which order and how. Pure.

One decision looks at the job as it is and doesn't remember: the same job on the same nodes gives the same answer. So
whoever is killed while he carries one out is followed by one who goes on. For that a pod that is the reason for the
others to go is deleted last: as long as it is there, so is the reason.

Who deals with which fault:

    chips, nodes, switches       here, by the label fault-scheduling, unless the job's own recovery leads (process
                                 level): then that one says which pods to replace (`replaced`)
    sub-health                   here, by subHealthyStrategy; a hot switch only when ClusterD has marked the pod
    pods that have failed        the operator, which counts the retries; here it is only written down and told

Pod level becomes job level when the new pod finds no place: the scheduler has said so, and it did not change its mind
for a while. (The original counts rounds of its scheduler.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evertrain.acjob import names
from evertrain.clusterd.recover.names import JOB_LEVEL as JOB_RESCHEDULING
from evertrain.clusterd.recover.names import POD_LEVEL as POD_RESCHEDULING
from evertrain.clusterd.resched.policy import (
    EXTERNAL,
    FORCE,
    FORCE_EXIT,
    GRACE,
    GRACE_EXIT,
    JOB_LEVEL,
    OFF,
    POD_LEVEL,
    PROCESS_LEVEL,
    Policy,
    policy,
)
from evertrain.clusterd.resched.views import GONE, JobView, NodeView, PodView

NODE_UNHEALTHY, CARD_UNHEALTHY, POD_FAILED = "NodeUnhealthy", "CardUnhealthy", "pod-failed"
RELATION_FAULT, SUB_HEALTH_FAULT = "RelationFaultSeparate", "SubHealthFault"
FAULT_TYPE, POD_STATUS = "fault-type", "huawei.com/pod-status"

FORCED_GRACE = 1
"""Seconds that a pod has to end when it is forced to and its node is there: its name and address are free only when
its processes are gone. A node that is not there can't end anything."""


@dataclass(frozen=True, slots=True)
class Settings:
    grace_over_time: float = 900.0
    """Seconds after which a pod that was asked to go is forced to."""
    forced_over_time: float = 15.0
    """The same for one that was forced, on a node that seems to be there."""
    block_patience: float = 6.0
    """Seconds after which a new pod without a place takes those of its logical super-pod with it,"""
    job_patience: float = 12.0
    """and all of its job."""


DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Delete:
    pod: PodView
    grace: int | None
    """Seconds; as the pod says if None."""
    reason: str
    last: bool = False
    """Only after all others are on their way: it is the reason why these go."""


@dataclass(frozen=True, slots=True)
class Mark:
    """For who is outside of the cluster, and deletes pods."""

    pod: PodView
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """These pods are replaced, for that reason each: job-reschedule-reason."""

    tasks: tuple[tuple[PodView, str], ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """Tells in the timeline what the operator does about failed pods."""

    strategy: str
    cause: str
    why: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Tells the launchers of the pods that stay (reset-config-<job>) that others were replaced; or, with `whole`, that
    all are. Once for these pods."""

    pods: tuple[str, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """Tells the launchers that they will have to end in good order (GracefulExit)."""


Action = Delete | Mark | Record | Retry | Restart | Leave


@dataclass(slots=True)
class Decision:
    actions: list[Action] = field(default_factory=list)
    why: str = ""
    """In a sentence; empty if there is nothing to do."""
    wake: float | None = None
    """Look again then, though nothing may have changed."""

    def later(self, when: float) -> None:
        self.wake = when if self.wake is None else min(self.wake, when)


Nodes = Mapping[str, NodeView]


def decide(
    job: JobView,
    nodes: Nodes,
    now: float,
    *,
    settings: Settings = DEFAULTS,
    rescheduled: float | None = None,
    led: bool = True,
) -> Decision:
    """`rescheduled`: when pods of the job were replaced the last time, if ever. `led`: there is somebody to lead its
    recovery, if that is to lead."""
    decision = Decision()
    if job.over:
        return decision
    rules = policy(job)
    if not led:
        rules = replace(rules, led=False, dumps=False)
    faults = {pod.uid: reason for pod in job.pods if (reason := fault_of(job, pod, nodes, rules))}
    if rules.acts:
        failed = tuple((pod, POD_FAILED) for pod in job.pods if _is_retried(pod, rules) and pod.uid not in faults)
        if failed:
            decision.actions += [Record(failed), _retry(job, [pod for pod, _ in failed], rules)]
        if faults:
            _replace(decision, job, faults, nodes, rules)
        elif rules.escalates and rescheduled is not None:
            _escalate(decision, job, nodes, rules, now, settings, rescheduled)
    elif rules.scheduling == EXTERNAL and not rules.platform:
        failed_too = {pod.uid: POD_FAILED for pod in job.pods if _is_retried(pod, rules)}
        decision.actions += _marks(job, failed_too | faults)
    elif _absent(job) and not rules.platform:
        # Nobody said that faults be dealt with, but a hot switch was begun, and it needs its end.
        ordered = {uid: reason for uid, reason in faults.items() if _is_ordered(_pod(job, uid))}
        if ordered:
            _replace(decision, job, ordered, nodes, rules)
    _force_those_who_linger(decision, job, nodes, rules, now, settings)
    return decision


def replaced(job: JobView, uids: Collection[str], reason: str, nodes: Nodes, *, whole_job: bool = False) -> Decision:
    """What the job's own recovery has decided: these pods are replaced, if they are still there. With `whole_job` they
    are all that train: with them go those that don't, but none that was made since."""
    decision = Decision()
    rules = policy(job)
    named = [pod for pod in job.pods if pod.uid in uids]
    if job.over or (uids and not named):
        return decision
    reasons = {pod.uid: reason for pod in named}
    if rules.platform or (rules.scheduling == OFF and not _absent(job)):
        decision.why = f"{reason}, but fault-scheduling or a platform outside of the cluster forbids to delete pods"
    elif rules.scheduling == EXTERNAL:
        decision.actions += _marks(job, reasons)
        decision.why = f"{reason}: marked for others to delete"
    else:
        newest = max((pod.version for pod in named), default=None)
        gone = named
        if whole_job:
            gone = [*job.backups, *(pod for pod in job.pods if newest is None or pod.version <= newest)]
        _delete(decision, gone, reasons, reason, nodes, rules.scheduling == FORCE)
    return decision


def fault_of(job: JobView, pod: PodView, nodes: Nodes, rules: Policy) -> str:
    """Why the pod has to go; empty if it may stay."""
    if pod.deleting or not pod.node or pod.phase == "Succeeded":
        return ""
    if _is_ordered(pod) and rules.sub_health == names.HOT_SWITCH:
        return SUB_HEALTH_FAULT
    node = nodes.get(pod.node, GONE)
    reason = ""
    if node.lost:
        reason = NODE_UNHEALTHY
    elif pod.chips & node.health.unhealthy:
        reason = CARD_UNHEALTHY
    elif pod.labels.get(FAULT_TYPE) == "Separate":
        reason = RELATION_FAULT
    if reason:
        return "" if rules.led else reason
    if rules.sub_health in (GRACE_EXIT, FORCE_EXIT) and _is_sub_healthy(pod, node):
        return "" if rules.dumps and rules.sub_health == GRACE_EXIT else SUB_HEALTH_FAULT
    return ""


def _is_sub_healthy(pod: PodView, node: NodeView) -> bool:
    by_node = node.health.switch == "SubHealthy" or node.health.status == "SubHealthy"
    return by_node or bool(pod.chips & node.health.sub_healthy) or pod.labels.get(FAULT_TYPE) == "SubHealth"


def _is_ordered(pod: PodView) -> bool:
    return pod.annotations.get(names.SCHEDULER_ORDER) == "delete"


def _is_retried(pod: PodView, rules: Policy) -> bool:
    return rules.retries and pod.phase == "Failed" and not pod.deleting


def _absent(job: JobView) -> bool:
    return names.FAULT_SCHEDULING not in job.labels


def _pod(job: JobView, uid: str) -> PodView:
    return next(pod for pod in job.pods if pod.uid == uid)


def _everyone(job: JobView) -> list[PodView]:
    return [*job.backups, *job.pods]


def _replace(decision: Decision, job: JobView, faults: Mapping[str, str], nodes: Nodes, rules: Policy) -> None:
    faulty = [pod for pod in job.pods if pod.uid in faults]
    gone = _scope(job, faulty, rules)
    whole = len(gone) == len(_everyone(job))
    sub_health = all(reason == SUB_HEALTH_FAULT for reason in faults.values())
    if sub_health:
        force = rules.sub_health != GRACE_EXIT
        if not force and rules.level != PROCESS_LEVEL:
            decision.actions.append(Leave())
    else:
        force = rules.scheduling == FORCE
    text = f"{faults[faulty[0].uid]} of {_named(faulty)}"
    _delete(decision, gone, faults, text, nodes, force)
    if rules.level == POD_LEVEL and job.labels.get(names.POD_RESCHEDULING) == "on":
        decision.actions.append(Restart(tuple(sorted(faults)), whole))


def _named(pods: Sequence[PodView]) -> str:
    more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    return f"pod {pods[0].name} on node {pods[0].node}{more}"


def _retry(job: JobView, failed: Sequence[PodView], rules: Policy) -> Retry:
    alone = rules.level != JOB_LEVEL and all(pod.rank != 0 for pod in failed)
    cause = f"{POD_FAILED} of {_named(failed)}"
    times = job.labels[names.FAULT_RETRY_TIMES].strip()
    why = f"{cause}: the operator starts {'it' if alone else 'all pods'} again ({names.FAULT_RETRY_TIMES}: {times})"
    return Retry(POD_RESCHEDULING if alone else JOB_RESCHEDULING, cause, why)


def _scope(job: JobView, faulty: Sequence[PodView], rules: Policy) -> list[PodView]:
    """The pods that go because of these."""
    stood_in_for = {backup.annotations.get(names.BACKUP_SOURCE) for backup in job.backups if not backup.deleting}
    alone: list[PodView] = []
    for pod in faulty:
        if _is_ordered(pod) and pod.name in stood_in_for:
            alone.append(pod)
        elif _is_ordered(pod) and pod.rank == 0:
            return _everyone(job)  # so it is said that all have to start again
        elif rules.level == PROCESS_LEVEL or (rules.level == POD_LEVEL and not (pod.leads and pod.rank == 0)):
            alone.append(pod)
        else:
            return _everyone(job)
    return alone


def _delete(
    decision: Decision,
    pods: Sequence[PodView],
    reasons: Mapping[str, str],
    text: str,
    nodes: Nodes,
    force: bool,
) -> None:
    tasks = [(pod, reasons[pod.uid]) for pod in pods if pod.uid in reasons]
    others = [pod for pod in pods if pod.uid not in reasons and not pod.deleting]
    gone = [Delete(pod, _grace(pod, nodes, force), text) for pod in others]
    gone += [Delete(pod, _grace(pod, nodes, force), reason, True) for pod, reason in tasks if not pod.deleting]
    if not gone:
        return
    count = len(gone)
    decision.why = f"{text}: {'1 pod is' if count == 1 else f'{count} pods are'} replaced"
    named = tasks or [(pod, text) for pod in others]
    decision.actions += [Record(tuple(named)), *gone]


def _grace(pod: PodView, nodes: Nodes, force: bool) -> int | None:
    if not force:
        return None
    return FORCED_GRACE if nodes.get(pod.node, GONE).ready else 0


def _marks(job: JobView, faults: Mapping[str, str]) -> Iterator[Mark]:
    for pod in job.pods:
        status = f"Unhealthy-{faults.get(pod.uid)}"
        if pod.uid in faults and pod.annotations.get(POD_STATUS) != status:
            yield Mark(pod, {POD_STATUS: status})


def _escalate(
    decision: Decision,
    job: JobView,
    nodes: Nodes,
    rules: Policy,
    now: float,
    settings: Settings,
    rescheduled: float,
) -> None:
    """Pods that were made for others that were replaced, and that the scheduler has no place for."""
    if any(pod.deleting for pod in job.pods):
        return  # the place that it frees may be the one that is missing
    oldest = min((pod.version for pod in job.pods), default=0)
    # Times of Kubernetes are full seconds.
    stuck = [
        pod
        for pod in job.pods
        if pod.unschedulable and not pod.node and pod.version > oldest and pod.created >= int(rescheduled)
    ]
    if not stuck:
        return
    stuck_for = now - min(pod.created for pod in stuck)
    text = f"pod {stuck[0].name} has had no place for {stuck_for:.0f} s"
    left = [pod for pod in job.pods if pod not in stuck]
    if stuck_for >= settings.job_patience:
        _delete(decision, [*job.backups, *left], {}, text, nodes, rules.scheduling == FORCE)
        decision.actions.append(Restart(tuple(sorted(pod.uid for pod in left)), True))
        return
    decision.later(now - stuck_for + settings.job_patience)
    blocks = {block for pod in stuck if (block := _block(job, pod)) is not None}
    if not blocks:
        return
    if stuck_for < settings.block_patience:
        decision.later(now - stuck_for + settings.block_patience)
        return
    together = [pod for pod in left if pod.version == oldest and _block(job, pod) in blocks]
    if together:
        _delete(decision, together, {}, text, nodes, rules.scheduling == FORCE)
        decision.actions.append(Restart(tuple(sorted(pod.uid for pod in together)), False))


def _block(job: JobView, pod: PodView) -> int | None:
    """The logical super-pod of a pod; None if the job has none."""
    text = job.annotations.get(names.SP_BLOCK, "").strip()
    size = int(text) if text.isascii() and text.isdecimal() else 0
    per_pod = max((len(each.chips) for each in job.pods), default=0)
    return pod.rank * per_pod // size if size > 0 and per_pod > 0 and pod.rank >= 0 else None


def _force_those_who_linger(
    decision: Decision, job: JobView, nodes: Nodes, rules: Policy, now: float, settings: Settings
) -> None:
    if not rules.acts:
        return
    for pod in (*job.backups, *job.pods):
        if not pod.deleting:
            continue
        there = nodes.get(pod.node, GONE).ready or not pod.node
        if rules.scheduling == GRACE and rules.sub_health != FORCE_EXIT:
            due = pod.asked + settings.grace_over_time
            if not there:
                due = min(due, pod.asked + pod.grace)  # nobody is left who could say that it has gone
        elif there:
            due = pod.asked + pod.grace + settings.forced_over_time
        else:
            due = now
        if now >= due:
            decision.actions.append(Delete(pod, 0, "it did not go in time"))
        else:
            decision.later(due)
