"""What a job wants done about its faults, as its labels and annotations say now. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from evertrain.clusterd.model import Job
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import timing

FRAMEWORKS = frozenset({"pytorch", "mindspore"})
"""That can exchange a node while they train."""


@dataclass(frozen=True, slots=True)
class Config:
    strategies: tuple[str, ...] = (n.EXIT,)
    """Finest first; always with `exit`."""
    enabled: bool = False
    """Faults of the cluster start a recovery of processes. Also while the label is on pause: that is our own doing."""
    paused: bool = False
    platform: bool = False
    """Somebody outside decides, by annotations."""
    sub_health: str = n.IGNORE
    framework: str = ""
    reschedules: bool = False
    """Pods or the whole job may be replaced."""
    reschedule_wait: float = timing.RESCHEDULE
    elastic_probe: float = timing.ELASTIC_PROBE

    def has(self, strategy: str) -> bool:
        return strategy in self.strategies

    @property
    def hot_switch(self) -> bool:
        return self.sub_health == n.HOT_SWITCHES

    @property
    def grace_exit(self) -> bool:
        return self.sub_health == n.GRACE_EXIT

    @property
    def in_charge(self) -> bool:
        """Whether a client may register at all (otherwise 403)."""
        return self.enabled or self.hot_switch


def of(job: Job) -> Config:
    label = job.labels.get(n.ENABLE, "").strip()
    extra = []
    if job.labels.get(n.FAULT_SCHEDULING, "").strip() in ("grace", "force"):
        extra.append(n.JOB_LEVEL)
    if job.labels.get(n.POD_RESCHEDULING, "").strip() == "on":
        extra.append(n.POD_LEVEL)
    wanted = {each.strip() for each in job.annotations.get(n.STRATEGY, "").split(",")}
    return Config(
        strategies=(*(each for each in n.LADDER if each in wanted or each == n.EXIT), *extra),
        enabled=label in (n.ON, n.PAUSE),
        paused=label == n.PAUSE,
        platform=n.PLATFORM_STRATEGY in job.annotations,
        sub_health=job.labels.get(n.SUB_HEALTHY, "").strip() or n.IGNORE,
        framework=(job.labels.get(n.FRAMEWORK, "") or job.framework).strip().lower(),
        reschedules=bool(extra),
        reschedule_wait=_reschedule_wait(job.annotations.get(n.RESCHEDULE_WAIT, "")),
        elastic_probe=_elastic_probe(job),
    )


def _reschedule_wait(text: str) -> float:
    seconds = _number(text)
    within = seconds is not None and timing.RESCHEDULE_LEAST <= seconds <= timing.RESCHEDULE_MOST
    return seconds if seconds is not None and within else timing.RESCHEDULE


def _elastic_probe(job: Job) -> float:
    """As long as the job's own patience allows."""
    first = job.pods.get(0)
    seconds = _number(first.env.get(n.ELASTIC_WAIT, "")) if first is not None else None
    if seconds is None or not timing.ELASTIC_WAIT_LEAST <= seconds <= timing.ELASTIC_WAIT_MOST:
        return timing.ELASTIC_PROBE
    return seconds - timing.ELASTIC_LESS


def _number(text: str) -> float | None:
    text = text.strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
