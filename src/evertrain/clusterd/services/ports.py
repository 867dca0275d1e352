"""What the servicers need of the hub.

Whatever keeps the hub from doing what it is asked for now, though it may do it later (it is not the leader, its state
can't be kept since the API server is away), is `Unavailable`: the caller gets gRPC's UNAVAILABLE, and asks again. A
report is acknowledged when what it led to is kept, not before.

Subscriptions come from the hub at once and hold what is to be said until it is read. They end (the iteration stops)
when the job is gone, and, where a job has one listener only, when a newer one has come. Who has one closes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from evertrain.clusterd.model import Job, JobFaults
from evertrain.clusterd.recover.events import (
    NicsSwitched,
    NotifyNics,
    NotifyStress,
    ProcessFault,
    Signal,
    Status,
    StopComplete,
    Strategies,
    StressTest,
    StressTested,
    SwitchNics,
)

T_co = TypeVar("T_co", covariant=True)

Report = ProcessFault | StopComplete | Strategies | Status | NicsSwitched | StressTested
"""What a job's manager says."""
Order = SwitchNics | StressTest
"""What a platform wants of a job."""
About = Literal["nic", "stress"]


class Unavailable(Exception):
    """Not now; its text says why. The caller shall ask again."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Code and text of an answer; `replies` has those of the reference."""

    code: int
    info: str


class Subscription(Protocol[T_co]):
    """`services.publisher` has what hub and servicers need to make one."""

    def __aiter__(self) -> Subscription[T_co]: ...

    async def __anext__(self) -> T_co:
        """The next one. May be cancelled without a loss."""

    def close(self) -> None:
        """Nobody reads any more; who is just reading comes to the end. Any number of times, at any time."""


class RecoverPort(Protocol):
    def job(self, job: str) -> Job | None:
        """As the cluster has it now. None: there is no such job."""

    def registered(self, job: str) -> bool: ...

    def super_pod(self, node: str) -> int | None:
        """Of a node, by its device-info; negative: in none. None: there is no device-info of the node."""

    async def init(self, job: str) -> Reply:
        """0, 403 or 502."""

    async def register(self, job: str) -> Reply:
        """0, 402, 408, 500 or 502."""

    async def report(self, job: str, report: Report) -> Reply:
        """0, 400 if the job is not registered. One that can't apply is 0 too, and has no effect."""

    async def order(self, job: str, order: Order) -> bool:
        """False, and nothing done, if the job is in a recovery or another order is under way. The job is registered."""

    async def signals(self, job: str) -> Subscription[Signal] | None:
        """None: the job is not registered. One listener for each job: the newest, those before end.

        From here on the machine knows of the listener (`Subscribed`), and until it closes the subscription
        (`Unsubscribed`, unless a newer listener is there already).
        """

    async def nic_orders(self, job: str) -> Subscription[NotifyNics] | None:
        """None: the job is not registered. One listener; an order that nobody has heard yet waits for one."""

    async def stress_orders(self, job: str) -> Subscription[NotifyStress] | None:
        """As `nic_orders`."""

    def answers(self, job: str, about: About) -> Subscription[str] | None:
        """How an order goes. None: no such order is under way. Any number of listeners; each hears all."""


class FaultPort(Protocol):
    def jobs_of(self, name: str, member: str = "") -> Sequence[str]:
        """The uids of the jobs that are meant by it: the one with this uid, or those with the label `jobID`; with one
        of these, those in its namespace."""

    def faults(self) -> Mapping[str, JobFaults]:
        """Of all jobs, by uid, as they are now. One that is healthy may be missing."""

    def fault_changes(self, jobs: Collection[str] | None = None) -> Subscription[JobFaults]:
        """Of these jobs, or of all: first those that have faults now, then each that changes, also to healthy or gone.

        The newest state of each job, if a listener is slow. Any number of listeners.
        """

    def heard(self, service: str, more: int) -> None:
        """By how many more the faults of what has this name, which is no job's uid, are heard of (1 or -1)."""


class Summary(Protocol):
    """A job as others are told of it (`jobs.summary`)."""

    @property
    def chips(self) -> int: ...

    def signal(self) -> Mapping[str, str]:
        """The fields of a JobSummarySignal, but for its uuid."""


class JobPort(Protocol):
    def summaries(self) -> Mapping[str, Summary]:
        """All jobs by uid, as they are now."""

    def summary_changes(self) -> Subscription[Summary]:
        """Each that changes from now on, the newest state of a job only, if a listener is slow. Any number."""


class ConfigPort(Protocol):
    def jobs_of(self, name: str, member: str = "") -> Sequence[str]:
        """As in FaultPort."""

    def rank_tables(self, job: str, member: str = "") -> Subscription[str]:
        """The global rank table (JSON) of a MindIE service, at once if there is one, and whenever it changes. With a
        job of it: of the service of that name in its namespace."""


class PublicFaultPort(Protocol):
    def public_fault_resources(self) -> frozenset[str]:
        """Who may report public faults."""

    async def public_fault(self, message: Mapping[str, object]) -> str:
        """As the JSON of the ConfigMap says it, same keys. Empty if it is taken, else what is wrong with it."""


class TracePort(Protocol):
    async def trace(self, namespace: str, name: str) -> Mapping[str, str] | None:
        """Which timings a job writes (`on` or `off` by ProfilingSwitch's names). None: it has no such ConfigMap."""

    async def set_trace(self, namespace: str, name: str, switches: Mapping[str, str]) -> bool:
        """False: there is no such job."""

    def trace_changes(self, job: str) -> Subscription[Mapping[str, str]]:
        """What is set, at once if something is, and each change. A job that is not known may come to be."""


class Hub(RecoverPort, FaultPort, JobPort, ConfigPort, PublicFaultPort, TracePort, Protocol):
    """All of it."""
