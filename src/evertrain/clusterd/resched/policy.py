"""What a job's labels and annotations want done about its faults. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from evertrain.acjob import names
from evertrain.clusterd.resched.views import JobView

GRACE, FORCE, EXTERNAL, OFF = "grace", "force", "external", "off"
IGNORE, GRACE_EXIT, FORCE_EXIT = "ignore", "graceExit", "forceExit"
JOB_LEVEL, POD_LEVEL, PROCESS_LEVEL = "job", "pod", "process"


@dataclass(frozen=True, slots=True)
class Policy:
    scheduling: str = OFF
    """GRACE, FORCE, EXTERNAL or OFF: whether and how pods are deleted."""
    platform: bool = False
    """A platform outside of the cluster deals with faults: nothing is done here, and nothing said."""
    level: str = JOB_LEVEL
    """Which pods are replaced together with one that has a fault: all, or none."""
    escalates: bool = False
    """A pod that is replaced alone and finds no place takes all others with it in the end."""
    led: bool = False
    """The job's recovery leads, and says which pods are to be replaced when."""
    sub_health: str = IGNORE
    """IGNORE, GRACE_EXIT, FORCE_EXIT or hotSwitch."""
    dumps: bool = False
    """All that its recovery can do is to save a checkpoint: which it does when pods are to leave in good order."""
    retries: bool = False
    """Failed pods are started again."""

    @property
    def acts(self) -> bool:
        return self.scheduling in (GRACE, FORCE) and not self.platform


def policy(job: JobView) -> Policy:
    labels, annotations = job.labels, job.annotations
    enabled = labels.get(names.PROCESS_RECOVER_ENABLE)
    # The operator writes the label to the PodGroup; where there is none it is written nowhere.
    by_process = enabled == "on" or (
        not job.grouped and not enabled and bool(annotations.get(names.RECOVER_STRATEGY, ""))
    )
    by_pod = labels.get(names.POD_RESCHEDULING) == "on"
    only_pods = annotations.get(names.RECOVER_POLICY_PATH) == "pod"
    strategies = [name for name in annotations.get(names.RECOVER_STRATEGY, "").replace(" ", "").split(",") if name]
    if by_process:
        level = PROCESS_LEVEL
    elif by_pod or only_pods:
        level = POD_LEVEL
    else:
        level = JOB_LEVEL
    sub_health = labels.get(names.SUB_HEALTHY_STRATEGY, IGNORE)
    times = labels.get(names.FAULT_RETRY_TIMES, "").strip()
    return Policy(
        scheduling=_scheduling(labels.get(names.FAULT_SCHEDULING, "")),
        platform=names.PLATFORM_STRATEGY in annotations,
        level=level,
        escalates=level == POD_LEVEL and not only_pods,
        led=by_process and bool(strategies),
        sub_health=sub_health if sub_health in (GRACE_EXIT, FORCE_EXIT, names.HOT_SWITCH) else IGNORE,
        dumps=by_process and strategies == ["dump"],
        retries=times.isascii() and times.isdecimal() and int(times) > 0,
    )


def _scheduling(label: str) -> str:
    if label in (GRACE, FORCE):
        return label
    return EXTERNAL if label in ("external-grace", "external-force") else OFF
