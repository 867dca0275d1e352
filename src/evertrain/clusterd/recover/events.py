"""What a job's recovery hears (events) and what it wants done (effects). Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evertrain.clusterd.model import Job, JobFaults

# Events. Job and faults are states, not changes: the machine compares with what it knew.


@dataclass(frozen=True, slots=True)
class JobSeen:
    """The job is so now. None: it is gone."""

    job: Job | None


@dataclass(frozen=True, slots=True)
class FaultsSeen:
    faults: JobFaults


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A client listens to signals from now on. It may be new, and know nothing of what went before."""


@dataclass(frozen=True, slots=True)
class Unsubscribed:
    pass


@dataclass(frozen=True, slots=True)
class Lost:
    """A recovery was going on, and nobody knows how far it was."""

    why: str


@dataclass(frozen=True, slots=True)
class ProcessFault:
    faults: Mapping[int, str]
    """Type by rank."""


@dataclass(frozen=True, slots=True)
class StopComplete:
    code: int
    faults: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Strategies:
    """What the training can do."""

    strategies: tuple[str, ...]
    faults: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """How a strategy went."""

    code: int
    strategy: str
    isolate: tuple[int, ...] = ()
    info: str = ""


@dataclass(frozen=True, slots=True)
class SwitchNics:
    """An order of link failover: to which link each rank goes (True: the standby)."""

    ops: Mapping[int, bool]


@dataclass(frozen=True, slots=True)
class NicsSwitched:
    ok: bool


@dataclass(frozen=True, slots=True)
class StressTest:
    ops: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StressTested:
    results: Mapping[int, Mapping[str, tuple[str, str]]]
    """By rank and operation: code and text."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An effect that the machine asked to hear of could not be carried out."""

    effect: Effect
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The machine's deadline has come."""


Event = (
    JobSeen | FaultsSeen | Subscribed | Unsubscribed | ProcessFault | StopComplete | Strategies | Status
    | SwitchNics | NicsSwitched | StressTest | StressTested | Failed | Lost | Tick
)  # fmt: skip


# Effects, carried out in order, after the state that belongs to them is kept.


@dataclass(frozen=True, slots=True)
class Signal:
    """To the subscriber of SubscribeProcessManageSignal."""

    type: str
    uuid: str
    actions: tuple[str, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)
    strategy: str = ""
    timeout: int = 0
    nodes: tuple[int, ...] = ()
    extra: str = ""


@dataclass(frozen=True, slots=True)
class NotifyNics:
    """To subscribers of SubscribeNotifySwitch."""

    ops: Mapping[int, bool]


@dataclass(frozen=True, slots=True)
class NotifyStress:
    """To subscribers of SubscribeNotifyExecStressTest."""

    ops: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Answer:
    """To who ordered a link failover ("nic") or a stress test ("stress"): SubscribeSwitchNicSignal and its like."""

    about: str
    text: str


@dataclass(frozen=True, slots=True)
class WriteReset:
    """reset-config-<job>: clear, notifyFaultFlushing, fault or restartAllProcess."""

    operation: str
    ranks: tuple[int, ...] = ()
    restart_fault_process: bool = False
    recovery: str = field(default="", compare=False)
    """Of which it is part: each starts all processes again once, however often it is said."""


@dataclass(frozen=True, slots=True)
class PatchGroup:
    """Labels and annotations of the PodGroup, of the AscendJob where there is none. None removes one."""

    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PatchPod:
    """Of the pod with this name, if its uid is still this one."""

    name: str
    uid: str
    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplacePods:
    """The rescheduler shall replace these pods of the job, if they are still these."""

    uids: tuple[str, ...]
    reason: str
    whole_job: bool = False


@dataclass(frozen=True, slots=True)
class IsolateNode:
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """For the timeline. `kind`: opened, fault, decision, phase, fallback, closed."""

    kind: str
    text: str
    details: Mapping[str, object] = field(default_factory=dict)


Effect = (
    Signal | NotifyNics | NotifyStress | Answer | WriteReset | PatchGroup | PatchPod | ReplacePods | IsolateNode | Note
)  # fmt: skip
