"""Simulated jobs for `bench.clusterd`: clients that answer every signal at once, as TaskD does for a healthy job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.jobs import Stuck
from evertrain.clusterd.model import MEMORY
from evertrain.clusterd.services.recover import SERVICE
from evertrain.kube.cache import Cache
from evertrain.kube.port import POD, Kube, Object
from evertrain.wire import recover_pb2 as wire
from evertrain.wire import service

CHANNELS = 250
"""The server takes 512 connections from one address, each of them with 64 streams."""
ANSWER_SECONDS = 60.0
REPORT, CHIP, PODS = "report", "chip", "pods"
"""How a fault becomes known: the training says so, or its node; or it says so of two pods, which are replaced then."""
EXPECTED = {"retry", "recover"}


@dataclass(eq=False)
class Fault:
    kind: str
    sent: float
    replaced: Callable[[], Awaitable[None]] | None = None
    """Until the pods that have to go are others."""
    stopped: float = 0.0
    """When the order to stop came."""
    decided: float = 0.0
    """When the strategy came."""
    finished: float = 0.0
    """When the result was reported."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """The result was reported, and ClusterD has acknowledged it."""
    strategy: str = ""


class Job:
    """One at a time: a fault, what ClusterD wants about it, and the answers."""

    def __init__(self, uid: str, number: int, stub: Any) -> None:
        self.uid, self.number = uid, number
        self._stub = stub
        self._who = wire.ClientInfo(jobId=uid, role="taskd")
        self.fault: Fault | None = None
        self.surplus: list[str] = []
        """What was ordered though nothing had failed, and other things that should not be."""
        self._reading: asyncio.Task[None] | None = None
        self.stopped = asyncio.Event()

    async def join(self) -> None:
        for method in ("Init", "Register"):
            await self._say(method, self._who)
        stream = self._stub.SubscribeProcessManageSignal(self._who)
        await stream.initial_metadata()
        self._reading = asyncio.create_task(self._read(stream), name=f"job {self.number}")

    async def leave(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def expect(self, kind: str) -> Fault:
        self.stopped.clear()
        self.fault = Fault(kind, time.monotonic())
        return self.fault

    async def report(self, ranks: Mapping[int, str]) -> None:
        """By rank: the type."""
        faults = [wire.FaultRank(rankId=str(rank), faultType=kind) for rank, kind in ranks.items()]
        await self._say("ReportProcessFault", wire.ProcessFaultRequest(jobId=self.uid, faultRanks=faults))

    async def _read(self, stream: Any) -> None:
        try:
            async for signal in stream:
                await self._answer(signal)
            self.surplus.append("the stream has ended")
        except (grpc.aio.AioRpcError, Stuck) as error:
            self.surplus.append(str(error))

    async def _answer(self, signal: wire.ProcessManageSignal) -> None:
        fault, kind = self.fault, signal.signalType
        if kind in ("keep-alive", "preExitProcess"):
            return
        if fault is None or fault.done.is_set():
            self.surplus.append(f"{kind} {signal.changeStrategy} without a fault".replace("  ", " "))
        if kind == "stopTrain":
            if fault is not None and not fault.stopped:
                fault.stopped = time.monotonic()
            self.stopped.set()
            await self._say("ReportStopComplete", wire.StopCompleteRequest(jobId=self.uid, status=wire.Status()))
        elif kind == "globalFault":
            again = all(each.faultType == MEMORY for each in signal.faultRanks)
            offers = [*(["retry"] if again else []), "recover", "dump", "exit"]
            await self._say("ReportRecoverStrategy", wire.RecoverStrategyRequest(jobId=self.uid, strategies=offers))
        elif kind == "changeStrategy":
            if signal.changeStrategy not in EXPECTED:
                self.surplus.append(f"strategy {signal.changeStrategy}")
            if fault is not None:
                fault.decided, fault.strategy = time.monotonic(), signal.changeStrategy
                if fault.replaced is not None:
                    await fault.replaced()
            message = wire.RecoverStatusRequest(jobId=self.uid, status=wire.Status(), strategy=signal.changeStrategy)
            await self._say("ReportRecoverStatus", message)
            if fault is not None:
                fault.finished = time.monotonic()
                fault.done.set()
        else:
            self.surplus.append(f"signal {kind}")

    async def _say(self, method: str, message: Any) -> None:
        status = await getattr(self._stub, method)(message, timeout=ANSWER_SECONDS, wait_for_ready=True)
        if status.code:
            raise Stuck(f"{method} of job {self.number}: {status.code} {status.info}")


class Pods:
    """Of all jobs, as the API server has them."""

    def __init__(self, kube: Kube) -> None:
        self.cache = Cache(kube, POD, "default")
        self._running: dict[str, dict[int, str]] = {}
        """Uids by job and rank of the pod."""
        self._changed: dict[str, asyncio.Event] = {}
        self.cache.listen(self._seen)

    def _seen(self, before: Object | None, after: Object | None) -> None:
        if after is None or (after.get("status") or {}).get("phase") != "Running":
            return
        metadata = after["metadata"]
        job = str(metadata["ownerReferences"][0]["uid"])
        self._running.setdefault(job, {})[int(metadata["annotations"]["hccl/rankIndex"])] = str(metadata["uid"])
        self._changed.setdefault(job, asyncio.Event()).set()

    def replaced(self, job: str, *pods: int) -> Callable[[], Awaitable[None]]:
        """Until these are others than now."""
        before = dict(self._running[job])

        async def done() -> None:
            while any(self._running[job][pod] == before[pod] for pod in pods):
                self._changed[job].clear()
                await self._changed[job].wait()

        return done


class Crowd:
    """All jobs, over several connections."""

    def __init__(self, address: str, uids: list[str]) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        count = min(CHANNELS, len(uids))
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(count)]
        stubs = [service.stub(channel, SERVICE) for channel in self._channels]
        self.jobs = [Job(uid, number, stubs[number % count]) for number, uid in enumerate(uids)]

    async def join(self) -> None:
        numbers = iter(self.jobs)

        async def some() -> None:
            for job in numbers:
                await job.join()

        await asyncio.gather(*(some() for _ in range(50)))

    @property
    def surplus(self) -> list[str]:
        return [f"job {job.number}: {each}" for job in self.jobs for each in job.surplus]

    async def close(self) -> None:
        for job in self.jobs:
            await job.leave()
        for channel in self._channels:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.close(None)
