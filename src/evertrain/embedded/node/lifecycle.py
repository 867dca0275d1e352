"""What a node does next with a pod. Pure.

`PodRun` is what the node knows about the containers of a pod; `next_steps` maps it and the time to what is to be done
now, and says when to look again if nothing happens. The shell does it and writes down what came of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DELETED, DEADLINE, SHUTDOWN = "Deleted", "DeadlineExceeded", "NodeShutdown"
NEVER, ON_FAILURE, ALWAYS = "Never", "OnFailure", "Always"
RESET_BACKOFF_AFTER = 600.0
MAX_BACKOFF = 300.0


@dataclass(frozen=True)
class Waiting:
    reason: str = "ContainerCreating"
    message: str = ""


@dataclass(frozen=True)
class Running:
    since: float
    pid: int = 0


@dataclass(frozen=True)
class Terminated:
    code: int
    since: float
    until: float
    signal: int = 0
    reason: str = ""
    message: str = ""


State = Waiting | Running | Terminated


@dataclass
class ContainerRun:
    spec: Mapping[str, Any]
    init: bool = False
    state: State = field(default_factory=Waiting)
    last: Terminated | None = None
    attempts: int = 0
    """How often it was started."""
    not_before: float = 0.0
    backoff: float = 0.0
    failures: int = 0
    """Starts in a row that were refused for a reason that may go away, such as a missing ConfigMap."""
    ready: bool = False
    stop_asked: float | None = None
    """Since when it has been asked to end."""
    killed: bool = False
    starting: bool = False
    unhealthy: str = ""
    """Why its liveness probe wants it restarted."""

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def stays(self) -> bool:
        """An init container that runs beside the containers (a sidecar)."""
        return self.init and self.spec.get("restartPolicy") == ALWAYS

    @property
    def alive(self) -> bool:
        return self.starting or isinstance(self.state, Running)


@dataclass(frozen=True)
class Ending:
    reason: str
    message: str
    since: float
    grace: float


@dataclass
class PodRun:
    containers: list[ContainerRun]
    restart_policy: str
    start_time: float
    deadline: float | None = None
    """activeDeadlineSeconds."""
    base_backoff: float = 10.0
    ending: Ending | None = None
    lost: str = ""
    """The node went down under it: the message for its status."""

    @property
    def alive(self) -> bool:
        return any(container.alive for container in self.containers)

    def one(self, name: str) -> ContainerRun:
        return next(container for container in self.containers if container.name == name)


@dataclass(frozen=True)
class Start:
    container: str


@dataclass(frozen=True)
class Stop:
    """Ask it to end."""

    container: str


@dataclass(frozen=True)
class Kill:
    container: str


@dataclass(frozen=True)
class Finish:
    """Nothing runs any more and nothing will."""


Step = Start | Stop | Kill | Finish


@dataclass(frozen=True)
class Plan:
    steps: list[Step]
    wake: float | None = None


def next_steps(run: PodRun, grace: float, now: float) -> Plan:
    """`grace` is the pod's terminationGracePeriodSeconds, for containers that are ended while the pod lives."""
    note_deadline(run, grace, now)
    if run.ending is not None:
        return _wind_down(run, run.ending, now)
    steps: list[Step] = []
    wakes = [run.start_time + run.deadline] if run.deadline is not None else []
    if not settled(run):
        for container in _due(run):
            if container.alive:
                if container.unhealthy and not container.starting:
                    steps += _end(container, container.stop_asked or now, grace, now, wakes)
            elif now >= container.not_before:
                steps.append(Start(container.name))
            else:
                wakes.append(container.not_before)
    if settled(run):
        over = [container for container in run.containers if container.alive]
        for container in over:  # sidecars, which end with the others
            steps += _end(container, container.stop_asked or now, grace, now, wakes)
        if not over:
            return Plan([Finish()])
    later = [wake for wake in wakes if wake > now]
    return Plan(steps, min(later) if later else None)


def note_deadline(run: PodRun, grace: float, now: float) -> None:
    """It counts from the pod's start on, also while the pod waits for its volumes."""
    if run.ending is None and run.deadline is not None and now >= run.start_time + run.deadline and not settled(run):
        message = "Pod was active on the node longer than the specified deadline"
        run.ending = Ending(DEADLINE, message, now, grace)


def _wind_down(run: PodRun, ending: Ending, now: float) -> Plan:
    steps: list[Step] = []
    wakes: list[float] = []
    for container in run.containers:
        if container.alive:
            steps += _end(container, ending.since, ending.grace, now, wakes)
    if not run.alive:
        steps.append(Finish())
    return Plan(steps, min(wakes) if wakes else None)


def _end(container: ContainerRun, since: float, grace: float, now: float, wakes: list[float]) -> Iterator[Step]:
    if now >= since + grace:
        if not container.killed:
            yield Kill(container.name)
        return
    if container.stop_asked is None:
        yield Stop(container.name)
    wakes.append(since + grace)


def _due(run: PodRun) -> Iterator[ContainerRun]:
    """Those that should run now: init containers one after the other, then all containers."""
    for container in run.containers:
        if container.stays:
            yield container
            if not isinstance(container.state, Running):
                return
        elif container.init:
            if isinstance(container.state, Terminated) and container.state.code == 0:
                continue
            yield container
            return
    for container in run.containers:
        if not container.init and (not isinstance(container.state, Terminated) or restarts(run, container)):
            yield container


def policy(run: PodRun, container: ContainerRun) -> str:
    if container.stays:
        return ALWAYS
    if container.init and run.restart_policy == ALWAYS:
        return ON_FAILURE
    return run.restart_policy


def restarts(run: PodRun, container: ContainerRun) -> bool:
    """Will a container that has ended be started again?"""
    state = container.state
    if not isinstance(state, Terminated) or run.ending is not None:
        return False
    rule = policy(run, container)
    return rule == ALWAYS or (rule == ON_FAILURE and state.code != 0)


def settled(run: PodRun) -> bool:
    """Has the pod come to its end by itself?"""
    if run.ending is not None:
        return not run.alive
    if any(_failed_init(run, container) for container in run.containers):
        return True
    return all(
        isinstance(container.state, Terminated) and not restarts(run, container)
        for container in run.containers
        if not container.init
    )


def _failed_init(run: PodRun, container: ContainerRun) -> bool:
    if not container.init or container.stays or not isinstance(container.state, Terminated):
        return False
    return container.state.code != 0 and not restarts(run, container)


def phase(run: PodRun) -> str:
    """As the kubelet does; a pod that is ended by the node is not restarted, so it counts as one that never is."""
    for container in run.containers:
        if not container.init or container.stays:
            continue
        if isinstance(container.state, Terminated):
            if container.state.code != 0 and not restarts(run, container):
                return "Failed"
            if container.state.code == 0:
                continue
        return _ended_early(run) or "Pending"
    plain = [container for container in run.containers if not container.init]
    if any(isinstance(container.state, Waiting) and container.last is None for container in plain):
        return _ended_early(run) or "Pending"
    if any(isinstance(container.state, Running) for container in plain):
        return "Running"
    if any(restarts(run, container) or isinstance(container.state, Waiting) for container in plain):
        return _ended_early(run) or "Running"
    if run.ending is not None and run.ending.reason == DEADLINE:
        return "Failed"
    codes = [container.state.code for container in plain if isinstance(container.state, Terminated)]
    return "Failed" if any(codes) else "Succeeded"


def _ended_early(run: PodRun) -> str:
    """A pod that was ended before all of it had run has failed."""
    return "Failed" if run.ending is not None and not run.alive else ""


def note_exit(run: PodRun, container: ContainerRun, ended: Terminated) -> None:
    """Writes down that a container ended, and when it may be started again."""
    container.state = ended
    container.ready = False
    container.starting = False
    container.stop_asked = None
    container.killed = False
    container.unhealthy = ""
    if not restarts(run, container):
        return
    if ended.until - ended.since >= RESET_BACKOFF_AFTER:
        container.backoff = 0.0
    container.not_before = ended.until + container.backoff
    container.backoff = min(MAX_BACKOFF, container.backoff * 2 or run.base_backoff)


def note_backoff(run: PodRun, container: ContainerRun, pod: str, now: float) -> None:
    """A container that waits for its next start says so."""
    state = container.state
    if isinstance(state, Terminated) and restarts(run, container) and now < container.not_before:
        seconds = container.not_before - state.until
        container.last = state
        container.state = Waiting(
            "CrashLoopBackOff", f"back-off {_duration(seconds)} restarting failed container={container.name} pod={pod}"
        )


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60}s"
