"""ClusterD's hub on an embedded API server, jobs that only claim to run, and a client as TaskD is one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from evertrain import aio
from evertrain.acjob.job import Job as AscendJob
from evertrain.acjob.podgroup import pod_group
from evertrain.acjob.pods import Surroundings, new_pod
from evertrain.clusterd.faulting import Faults
from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.hub import Hub
from evertrain.clusterd.observe import Observer
from evertrain.clusterd.recover.machine import Recovery
from evertrain.clusterd.services import recover
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.server import Server
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NODE, POD, POD_GROUP, AlreadyExists, Kube, NotFound, Object
from evertrain.wire import recover_pb2 as wire
from evertrain.wire import service
from tests.operator.acjobs import ascend_job, chips_annotation
from tests.operator.cluster import Cluster

PATIENCE = 120.0


async def make_job(cluster: Cluster, name: str = "train", *, strategies: str = "retry,recover,dump", chips: int = 2,
                   gang: bool = True, reset: bool = True, **labels: str) -> Object:  # fmt: skip
    """A job with a leader and a worker that run; as its operator and scheduler would have made it."""
    kube = cluster.kube
    annotations = {"recover-strategy": strategies} if strategies else {}
    item = await kube.create(ASCEND_JOB, ascend_job(name, chips=chips, labels=labels, annotations=annotations))
    if reset:
        data = {"reset.json": json.dumps({"RankList": [], "RetryTime": 3}), "restartType": "podReschedule"}
        metadata = {"name": f"reset-config-{name}", "namespace": "default", "labels": {"reset": "true"}}
        await kube.create(CONFIG_MAP, {"metadata": metadata, "data": data})
    job = AscendJob(item)
    if gang:
        await kube.create(POD_GROUP, pod_group(job))
        await kube.patch(POD_GROUP, job.pod_group_name, "default", {"status": {"phase": "Running"}}, status=True)
    for number, kind in enumerate(("Master", "Worker")):
        await make_node(cluster, number)
        await make_pod(cluster, item, kind)
    return item


async def make_node(cluster: Cluster, number: int) -> None:
    with contextlib.suppress(AlreadyExists):
        await cluster.kube.create(NODE, {"metadata": {"name": f"node-{number}"}})
        status = {
            "conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": f"192.168.0.{number}"}],
        }
        await cluster.kube.patch(NODE, f"node-{number}", None, {"status": status}, status=True)


async def make_pod(cluster: Cluster, job: Object, kind: str, *, phase: str = "Running") -> Object:
    pod = new_pod(AscendJob(job), kind, 0, Surroundings(("10.0.0.1", "2222"), "10.0.0.2", 0, True))
    number = 0 if kind == "Master" else 1
    chips = AscendJob(job).chips[1]
    if chips:
        pod["metadata"]["annotations"] |= chips_annotation(pod["metadata"]["name"], f"192.168.0.{number}", chips)
        pod["metadata"]["annotations"]["huawei.com/AscendReal"] = "Ascend910-0"
    pod["spec"]["nodeName"] = f"node-{number}"
    made = await cluster.kube.create(POD, pod)
    status = {"phase": phase, "podIP": f"10.1.0.{number}", "hostIP": f"192.168.0.{number}"}
    return await cluster.kube.patch(POD, made["metadata"]["name"], "default", {"status": status}, status=True)


class Centre(FaultCentre):
    """Remembers what processes have reported."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, dict[int, str]]] = []

    def process_report(self, job: str, faults: Any, now_ms: int) -> None:
        self.heard.append((job, dict(faults)))
        super().process_report(job, faults, now_ms)


class Notes:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def note(self, job: Any, note: Any, now: float) -> None:
        self.kinds.append(note.kind)


class Replacements:
    def __init__(self) -> None:
        self.wanted: asyncio.Queue[Any] = asyncio.Queue()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def replace(self, job: Any, effect: Any) -> None:
        self.wanted.put_nowait(effect)


@dataclass
class Running:
    hub: Hub
    port: int
    centre: Centre
    notes: Notes
    replacements: Replacements


@contextlib.asynccontextmanager
async def hub_of(cluster: Cluster, port: int = 0) -> AsyncIterator[Running]:
    kube = cluster.client()
    observer, centre, notes, replacements = Observer(kube), Centre(), Notes(), Replacements()
    hub = Hub(
        kube,
        machine=Recovery,
        rescheduler=replacements,
        timeline=notes,
        observer=observer,
        faults=Faults(kube, centre, observer),
    )
    server = Server(hub, Security(insecure=True))
    running = asyncio.ensure_future(hub.run())
    try:
        async with aio.timeout(PATIENCE):
            await hub.ready.wait()
            port = await server.start(f"127.0.0.1:{port}")
        yield Running(hub, port, centre, notes, replacements)
    finally:
        await server.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await kube.close()


@dataclass
class Client:
    """What TaskD's manager does, one step at a time."""

    job: str
    port: int
    signals: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Client:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=[("grpc.enable_http_proxy", 0)])
        self.stub = service.stub(self._channel, recover.SERVICE)
        self.who = wire.ClientInfo(jobId=self.job, role="taskd")
        self._reading: asyncio.Future[None] | None = None
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close()

    async def call(self, method: str, message: Any = None) -> Any:
        return await getattr(self.stub, method)(message or self.who, timeout=PATIENCE, wait_for_ready=True)

    async def begin(self) -> Client:
        for method in ("Init", "Register"):
            status = await self.call(method)
            assert status.code == 0, f"{method}: {status}"
        await self.listen()
        return self

    async def listen(self) -> None:
        stream = self.stub.SubscribeProcessManageSignal(self.who)
        await stream.initial_metadata()
        self._reading = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: Any) -> None:
        try:
            async for signal in stream:
                if signal.signalType != "keep-alive":
                    self.signals.put_nowait(signal)
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.ended.set()

    async def hears(self, kind: str) -> Any:
        signal = await asyncio.wait_for(self.signals.get(), PATIENCE)
        assert signal.signalType == kind, f"{signal} instead of {kind}"
        return signal

    async def reports_fault(self, **faults: str) -> None:
        ranks = [wire.FaultRank(rankId=rank.removeprefix("r"), faultType=kind) for rank, kind in faults.items()]
        await self.says("ReportProcessFault", wire.ProcessFaultRequest(jobId=self.job, faultRanks=ranks))

    async def reports_stop(self, code: int = 0) -> None:
        await self.says("ReportStopComplete", wire.StopCompleteRequest(jobId=self.job, status=wire.Status(code=code)))

    async def offers(self, *strategies: str) -> None:
        await self.says(
            "ReportRecoverStrategy", wire.RecoverStrategyRequest(jobId=self.job, strategies=list(strategies))
        )

    async def reports_result(self, strategy: str, code: int = 0) -> None:
        message = wire.RecoverStatusRequest(jobId=self.job, strategy=strategy, status=wire.Status(code=code))
        await self.says("ReportRecoverStatus", message)

    async def says(self, method: str, message: Any) -> None:
        status = await self.call(method, message)
        assert status.code == 0, f"{method}: {status}"


async def find(kube: Kube, name: str, namespace: str = "default") -> Object | None:
    try:
        return await kube.get(CONFIG_MAP, name, namespace)
    except NotFound:
        return None


async def eventually(kube: Kube, name: str, condition: Any, namespace: str = "default") -> Object | None:
    """Until a ConfigMap (None: none) is so."""
    item = None
    try:
        async with aio.timeout(PATIENCE):
            while not condition(item := await find(kube, name, namespace)):
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{name} is still {item}") from None
    return item


def is_over(item: Object | None) -> bool:
    """Nothing is kept, or only what is to be remembered for a while."""
    kept = {} if item is None else json.loads(item["data"]["state.json"])
    return not kept or ("state" not in kept["state"] and not kept["effects"])
