"""ClusterD's services on a real port, over a hub that lives in memory and does what the test tells it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import grpc

from evertrain import aio
from evertrain.clusterd.model import Device, Job, JobFaults, Pod
from evertrain.clusterd.recover.events import NotifyNics, NotifyStress, Signal
from evertrain.clusterd.services import config, fault, health, job, profiling, pubfault, recover, reflection, replies
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.limits import Limits
from evertrain.clusterd.services.ports import About, Order, Reply, Report
from evertrain.clusterd.services.publisher import Everyone, Line, OneEach
from evertrain.clusterd.services.server import Server
from evertrain.wire import service

JOB = "5a9c61ad-1f1d-4b8e-8f5a-2b0a7c3d9e10"
PATIENCE = 120.0
"""Seconds for what happens at once on a machine that has time."""


def a_job(uid: str = JOB, *, nodes: int = 2, chips: int = 2, status: str = "running") -> Job:
    pods = {
        rank: Pod(
            rank,
            f"pod-{rank}",
            f"train-{rank}",
            f"node-{rank}",
            phase="Running",
            devices=tuple(Device(str(chip)) for chip in range(chips)),
        )
        for rank in range(nodes)
    }
    return Job(uid, "train", "default", replicas=nodes, per_pod=chips, status=status, pods=pods, complete=True)


class Summary(SimpleNamespace):
    def signal(self) -> Mapping[str, str]:
        return {"jobId": self.uid, "jobName": self.name, "operator": self.operator, "HcclJson": self.hccl}


def a_summary(uid: str, *, chips: int = 8, operator: str = "add", hccl: str = "{}") -> Summary:
    return Summary(uid=uid, name=f"name-of-{uid}", chips=chips, operator=operator, hccl=hccl)


class MemoryHub:
    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {JOB: a_job()}
        self.super_pods: dict[str, int] = {"node-0": 0, "node-1": 0}
        self.inited: set[str] = set()
        self.members: set[str] = set()
        self.reports: list[tuple[str, Report]] = []
        self.orders: list[tuple[str, Order]] = []
        self.busy = False
        self.trouble: Exception | None = None
        """Raised by whatever changes something."""
        self.left: asyncio.Queue[str] = asyncio.Queue()
        self.said: OneEach[Signal] = OneEach(left=self.left.put_nowait, limit=1000)
        self.nics: OneEach[NotifyNics] = OneEach()
        self.stress: OneEach[NotifyStress] = OneEach()
        self.answering: dict[tuple[str, str], Everyone[str]] = {}
        self.job_faults: dict[str, JobFaults] = {}
        self.services: dict[str, tuple[str, ...]] = {}
        self.faulty: Everyone[JobFaults] = Everyone(key=lambda faults: faults.job)
        self.heard_of: dict[str, int] = {}
        self.told: dict[str, Any] = {}
        self.summarised: Everyone[Any] = Everyone(key=lambda summary: summary.uid)
        self.tables: dict[str, Everyone[str]] = {}
        self.public: list[Mapping[str, object]] = []
        self.public_wrong = ""
        self.traces: dict[tuple[str, str], Mapping[str, str]] = {}
        self.traced: Everyone[Mapping[str, str]] = Everyone()

    def job(self, job: str) -> Job | None:
        return self.jobs.get(job)

    def registered(self, job: str) -> bool:
        return job in self.members

    def super_pod(self, node: str) -> int | None:
        return self.super_pods.get(node)

    def _try(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    async def init(self, job: str) -> Reply:
        self._try()
        if job not in self.jobs:
            return replies.unresolved(job, "there is no such job")
        self.inited.add(job)
        return replies.inited(job)

    async def register(self, job: str) -> Reply:
        self._try()
        if job not in self.inited:
            return replies.not_inited(job)
        self.members.add(job)
        return replies.registered()

    async def report(self, job: str, report: Report) -> Reply:
        self._try()
        if job not in self.members:
            return replies.not_registered(job)
        self.reports.append((job, report))
        return replies.received(job, "uuid-1", report)

    async def order(self, job: str, order: Order) -> bool:
        if self.busy:
            return False
        self.orders.append((job, order))
        self.answering[job, "nic"] = Everyone()
        return True

    async def signals(self, job: str) -> Line[Signal] | None:
        return self.said.subscribe(job) if job in self.members else None

    async def nic_orders(self, job: str) -> Line[NotifyNics] | None:
        return self.nics.subscribe(job) if job in self.members else None

    async def stress_orders(self, job: str) -> Line[NotifyStress] | None:
        return self.stress.subscribe(job) if job in self.members else None

    def answers(self, job: str, about: About) -> Line[str] | None:
        found = self.answering.get((job, about))
        return None if found is None else found.subscribe()

    def jobs_of(self, name: str, member: str = "") -> Sequence[str]:
        return (name,) if name in self.jobs else self.services.get(name, ())

    def faults(self) -> Mapping[str, JobFaults]:
        return self.job_faults

    def fault_changes(self, jobs: Collection[str] | None = None) -> Line[JobFaults]:
        return self.faulty.subscribe(each for each in self.job_faults.values() if each.devices)

    def find_faults(self, faults: JobFaults) -> None:
        self.job_faults[faults.job] = faults
        self.faulty.publish(faults)

    def heard(self, service: str, more: int) -> None:
        self.heard_of[service] = self.heard_of.get(service, 0) + more

    def summaries(self) -> Mapping[str, Any]:
        return self.told

    def summary_changes(self) -> Line[Any]:
        return self.summarised.subscribe()

    def rank_tables(self, job: str, member: str = "") -> Line[str]:
        return self.tables.setdefault(job, Everyone(key=lambda table: "")).subscribe(["{}"])

    def public_fault_resources(self) -> frozenset[str]:
        return frozenset({"CCAE", "fd-online"})

    async def public_fault(self, message: Mapping[str, object]) -> str:
        self.public.append(message)
        return self.public_wrong

    async def trace(self, namespace: str, name: str) -> Mapping[str, str] | None:
        self._try()
        return self.traces.get((namespace, name))

    async def set_trace(self, namespace: str, name: str, switches: Mapping[str, str]) -> bool:
        self._try()
        if name != "train":
            return False
        self.traces[namespace, name] = switches
        self.traced.publish(switches)
        return True

    def trace_changes(self, job: str) -> Line[Mapping[str, str]]:
        return self.traced.subscribe()


SERVICES = (recover, fault, job, config, pubfault, profiling, health, reflection)


class Client(SimpleNamespace):
    """A stub of each service by its name, over a connection of its own."""


@contextlib.asynccontextmanager
async def client(address: str, credentials: Any = None, **options: int | str) -> AsyncIterator[Client]:
    given = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1), *options.items()]
    given.append(("grpc.enable_http_proxy", 0))
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=given)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=given)
    try:
        stubs = {module.SERVICE.name: service.stub(channel, module.SERVICE) for module in SERVICES}
        yield Client(channel=channel, **stubs)
    finally:
        await channel.close()


class Serving(SimpleNamespace):
    hub: MemoryHub
    server: Server
    address: str


@contextlib.asynccontextmanager
async def serving(
    security: Security | None = None,
    limits: Limits | None = None,
    *,
    keep_alive: float = 3600.0,
    hub: MemoryHub | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[Serving]:
    hub = hub or MemoryHub()
    server = Server(hub, security or Security(insecure=True), limits, keep_alive=keep_alive)
    port = await server.start(f"{host}:0")
    try:
        yield Serving(hub=hub, server=server, address=f"{host}:{port}")
    finally:
        await server.close()


async def soon(awaitable: Any) -> Any:
    async with aio.timeout(PATIENCE):
        return await awaitable


async def failure(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    """How a call fails."""
    try:
        got = await soon(awaitable)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"it did not fail: {got}")
