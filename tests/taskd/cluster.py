"""A scripted ClusterD that speaks the real wire: it says what a test wants and keeps what it hears."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from evertrain.taskd.manager.clusterd import RECOVER, TRACE
from evertrain.taskd.net.security import Certificates
from evertrain.wire import service
from evertrain.wire.profiling_pb2 import DataStatusRes, ProfilingSwitch
from evertrain.wire.recover_pb2 import (
    ClientInfo,
    FaultRank,
    ProcessManageSignal,
    Status,
    StressOpList,
    StressTestRankParams,
    SwitchRankList,
)
from tests.ports import free_port


class Bytes(bytes):
    """Sent as they are, in the place of a message."""


class Feed:
    """What one stream says. Whoever subscribes last gets it, and whoever did before is sent away."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._event = asyncio.Event()
        self._turn = 0

    def put_nowait(self, item: Any) -> None:
        self._items.append(item)
        self._event.set()

    async def items(self) -> AsyncIterator[Any]:
        self._turn += 1
        own = self._turn
        self._event.set()
        while True:
            await self._event.wait()
            if own != self._turn:
                return
            self._event.clear()
            while self._items and own == self._turn:
                yield self._items.popleft()


class ScriptedClusterD:
    def __init__(self, tell: Callable[[str], None] = lambda line: None) -> None:
        """`tell` gets a line for everything that is said or heard."""
        self._tell = tell
        self.heard: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        """(method, request) of everything but subscriptions and health checks."""
        self.spoken_of: set[int] = set()
        """Ranks that it has named as faulty."""
        self.init_code = 0
        self.answers: dict[str, list[Status]] = {}
        self.late = 0.0
        """Seconds that every answer takes, those of health checks too."""
        self.greets = True
        """It confirms a subscription at once. One in Go does so with its first signal."""
        self.health_checks = 0
        self._signals = Feed()
        self._nics = Feed()
        self._stress = Feed()
        self._traces = Feed()
        self.subscribed = asyncio.Event()
        self._server: Any = None
        self.port = free_port()  # it may come back: nobody else shall have it meanwhile

    async def start(self, certificates: Certificates | None = None) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_handlers(RECOVER, self), _handlers(TRACE, self)))
        address = f"127.0.0.1:{self.port}"
        if certificates is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, certificates.server())
        await self._server.start()

    async def stop(self) -> None:
        self.subscribed.clear()
        server, self._server = self._server, None  # whoever keeps us must not keep its descriptors
        if server is not None:
            await server.stop(None)

    async def expect(self, method: str, limit: float = 90) -> Any:
        got, request = await asyncio.wait_for(self.heard.get(), limit)
        assert got == method, f"{got} {request}"
        return request

    # What it says.

    def say(
        self,
        kind: str,
        *actions: str,
        uuid: str = "u",
        job: str = "job-1",
        faults: Mapping[int, int] | None = None,
        **fields: Any,
    ) -> None:
        self.spoken_of.update(faults or ())
        ranks = [FaultRank(rankId=str(rank), faultType=str(kind)) for rank, kind in (faults or {}).items()]
        message = ProcessManageSignal(
            uuid=uuid, jobId=job, signalType=kind, actions=actions, faultRanks=ranks, **fields
        )
        self._signals.put_nowait(message)

    def say_raw(self, message: ProcessManageSignal | Bytes) -> None:
        self._signals.put_nowait(message)

    def garbage(self, data: bytes) -> None:
        """Undecodable, on all streams."""
        for stream in (self._signals, self._nics, self._stress, self._traces):
            stream.put_nowait(Bytes(data))

    def switch(self, ranks: list[str], ops: list[bool], job: str = "job-1") -> None:
        self._nics.put_nowait(SwitchRankList(rankID=ranks, op=ops, jobId=job))

    def stress(self, ops: dict[str, list[int]], job: str = "job-1") -> None:
        params = {rank: StressOpList(ops=each) for rank, each in ops.items()}
        self._stress.put_nowait(StressTestRankParams(stressParam=params, jobId=job))

    def trace(self, **switch: str) -> None:
        self._traces.put_nowait(DataStatusRes(profilingSwitch=ProfilingSwitch(**switch), code=200))

    # What is called.

    def _hear(self, method: str, request: Any) -> None:
        self.heard.put_nowait((method, request))
        status, strategy = getattr(request, "status", None), getattr(request, "strategy", "")
        words = [method, strategy, str(status.code) if status is not None else ""]
        self._tell("ClusterD hears " + " ".join(filter(None, words)))

    async def Init(self, request: ClientInfo, context: Any) -> Status:
        self._hear("Init", request)
        await asyncio.sleep(self.late)
        return Status(code=self.init_code, info="init")

    async def HealthCheck(self, request: ClientInfo, context: Any) -> Status:
        self.health_checks += 1
        await asyncio.sleep(self.late)
        return Status(code=0)

    async def SubscribeProcessManageSignal(self, request: ClientInfo, context: Any) -> Any:
        if self.greets:
            await context.send_initial_metadata(())
        self.subscribed.set()
        self._tell("ClusterD hears SubscribeProcessManageSignal")
        async for item in self._signals.items():
            if isinstance(item, ProcessManageSignal):
                words = [item.signalType, item.changeStrategy, *item.actions]
                self._tell("ClusterD says " + " ".join(filter(None, words)))
            yield item

    async def SubscribeNotifySwitch(self, request: ClientInfo, context: Any) -> Any:
        self._tell("ClusterD hears SubscribeNotifySwitch")
        async for item in self._nics.items():
            yield item

    async def SubscribeNotifyExecStressTest(self, request: ClientInfo, context: Any) -> Any:
        self._tell("ClusterD hears SubscribeNotifyExecStressTest")
        async for item in self._stress.items():
            yield item

    async def SubscribeDataTraceSwitch(self, request: Any, context: Any) -> Any:
        self._tell("ClusterD hears SubscribeDataTraceSwitch")
        async for item in self._traces.items():
            yield item

    def __getattr__(self, name: str) -> Any:
        if name not in {method.name for method in RECOVER.methods}:
            raise AttributeError(name)

        async def answer(request: Any, context: Any) -> Status:
            self._hear(name, request)
            await asyncio.sleep(self.late)
            return self.answers[name].pop(0) if self.answers.get(name) else Status(code=0, info="ok")

        return answer


def _handlers(descriptor: Any, servicer: ScriptedClusterD) -> Any:
    """As they should be, but for `Bytes`, which go out as they are."""

    class Handlers(grpc.GenericRpcHandler):
        _real = service.handlers(descriptor, servicer)

        def service(self, details: Any) -> Any:
            handler = self._real.service(details)
            if handler is None or not handler.response_streaming:
                return handler
            serialize = handler.response_serializer
            return handler._replace(response_serializer=lambda m: bytes(m) if isinstance(m, Bytes) else serialize(m))

    return Handlers()
