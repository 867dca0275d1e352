"""What really goes over TaskNet and to ClusterD: recorded as bytes, held against a second reading of the tables.

The other end knows nothing of our code: it takes and gives bytes, which it makes and reads with descriptors that
tests/wire/unit/test_taskd.py builds from the original's tables.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from evertrain.taskd import frames
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.manager.orders import NicReply, Signal, StressReply
from evertrain.taskd.manager.reports import Report
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security
from tests.wire.unit.test_taskd import METHODS, PROFILING, RECOVER, TASKNET, read

NET, CLUSTER, TRACE = read(TASKNET), read(RECOVER), read(PROFILING)
TABLES = {"/TaskNet/": NET, "/Recover/": CLUSTER, "/TrainingDataTrace/": TRACE}
AGENT, MANAGER = Position("Agent", "1"), Position("Mgr", "0")


class Stranger(grpc.GenericRpcHandler):
    """A server of bytes. Answers calls with `answers`, gives what is in `streams`, keeps what it gets."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[str, Any, dict[str, str]]] = asyncio.Queue()
        self.answers: dict[str, Any] = {}
        self.streams: dict[str, asyncio.Queue[Any]] = {}

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        service = next((each for each in METHODS if path.startswith(each)), "")
        kinds = {name: (request, marks, response) for name, request, marks, response in METHODS.get(service, ())}
        if (found := kinds.get(path.removeprefix(service))) is None:
            return None
        request, marks, response = found
        table = TABLES[service]
        metadata = {key: str(value) for key, value in handler_call_details.invocation_metadata}

        async def call(given: bytes, context: Any) -> bytes:
            self.heard.put_nowait((path, table[request].FromString(given), metadata))
            return bytes(self.answers.get(path, table[response]()).SerializeToString())

        async def stream(given: Any, context: Any) -> AsyncIterator[bytes]:
            if marks == ">":
                self.heard.put_nowait((path, table[request].FromString(given), metadata))
            else:
                self.heard.put_nowait((path, None, metadata))
                reading = asyncio.ensure_future(self._read(path, given, table[request], metadata))
                context.add_done_callback(lambda _: reading.cancel())
            await context.send_initial_metadata(())
            while True:
                yield (await self.streams.setdefault(path, asyncio.Queue()).get()).SerializeToString()

        make = {
            "": grpc.unary_unary_rpc_method_handler,
            ">": grpc.unary_stream_rpc_method_handler,
            "<>": grpc.stream_stream_rpc_method_handler,
        }[marks]
        return make(stream if marks else call)

    async def _read(self, path: str, given: Any, cls: Any, metadata: dict[str, str]) -> None:
        with contextlib.suppress(grpc.RpcError):
            async for each in given:
                self.heard.put_nowait((path, cls.FromString(each), metadata))

    def say(self, path: str, message: Any) -> None:
        self.streams.setdefault(path, asyncio.Queue()).put_nowait(message)

    async def expect(self, path: str) -> tuple[Any, dict[str, str]]:
        got, message, metadata = await asyncio.wait_for(self.heard.get(), 90)
        assert got == path, f"{got} {message}"
        return message, metadata


@contextlib.asynccontextmanager
async def stranger() -> AsyncIterator[tuple[Stranger, str]]:
    handler, server = Stranger(), grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield handler, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def where(who: Position) -> Any:
    return NET["Position"](role=who.role, serverRank=who.server, processRank=who.process)


async def test_a_member_that_its_parent_refuses_by_a_code_tries_again() -> None:
    register = "/TaskNet/Register"
    async with stranger() as (parent, address):
        parent.answers[register] = NET["Ack"](code=5003)
        agent = Node(AGENT, upstream=address)
        await agent.start()
        try:
            for _ in range(2):
                await parent.expect(register)  # and nothing else: it has no place to announce a path from
            assert agent.client is not None and not agent.client.joined.is_set()
            del parent.answers[register]
            assert await agent.wait_joined(90)
        finally:
            await agent.close()


async def test_a_member_speaks_to_a_parent_that_it_does_not_know() -> None:
    async with stranger() as (parent, address):
        agent = Node(AGENT, upstream=address)
        await agent.start()
        try:
            registered, _ = await parent.expect("/TaskNet/Register")
            assert registered == NET["RegisterReq"](uuid=registered.uuid, pos=where(AGENT)) and registered.uuid
            path, _ = await parent.expect("/TaskNet/PathDiscovery")
            assert path == NET["PathDiscoveryReq"](uuid=path.uuid, proxyPos=where(AGENT), path=[where(AGENT)])
            _, metadata = await parent.expect("/TaskNet/InitServerDownStream")
            assert {key: metadata[key] for key in ("role", "serverrank", "processrank")} == {
                "role": "Agent", "serverrank": "1", "processrank": "-1",
            }  # fmt: skip
            assert await agent.wait_joined(90)

            text = frames.body("STATUS", 201, "32767", {}).encode()
            assert await agent.send(MANAGER, text, mtype="DEFAULT", uuid="U1") == 0
            sent, _ = await parent.expect("/TaskNet/TransferMessage")
            header = NET["MessageHeader"](uuid="U1", mtype="DEFAULT", sync=True, src=where(AGENT), dst=where(MANAGER))
            assert sent == NET["Message"](header=header, body=text)
            assert text == '{"msg_type":"STATUS","code":201,"message":"32767","extension":{}}'

            for uuid, sync in (("U2", False), ("U3", True)):
                header = NET["MessageHeader"](uuid=uuid, sync=sync, src=where(MANAGER), dst=where(AGENT))
                parent.say("/TaskNet/InitServerDownStream", NET["Message"](header=header, body=uuid))
            ack, _ = await parent.expect("/TaskNet/InitServerDownStream")
            assert ack == NET["Ack"](uuid="U3", code=0, src=where(AGENT)), "one that is not asked for is not given"
            assert [(await agent.received.get()).body for _ in range(2)] == ["U2", "U3"]
        finally:
            await agent.close()


async def test_a_parent_hears_a_member_that_it_does_not_know() -> None:
    manager = Node(MANAGER, listen="127.0.0.1:0")
    await manager.start()
    proxy = Position("Proxy", "1", "1700000000")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{manager.port}") as channel:

            async def call(method: str, message: Any) -> Any:
                answer = await channel.unary_unary(f"/TaskNet/{method}")(message.SerializeToString())
                return NET["Ack"].FromString(answer)

            ok = NET["Ack"](uuid="1", code=0, src=where(MANAGER))
            assert await call("Register", NET["RegisterReq"](uuid="1", pos=where(proxy))) == ok
            path = NET["PathDiscoveryReq"](uuid="1", proxyPos=where(proxy), path=[where(AGENT), where(proxy)])
            assert await call("PathDiscovery", path) == ok
            metadata = (("role", "Proxy"), ("serverrank", "1"), ("processrank", "1700000000"))
            stream = channel.stream_stream("/TaskNet/InitServerDownStream")(metadata=metadata)
            await stream.initial_metadata()
            header = NET["MessageHeader"](uuid="1", mtype="DEFAULT", sync=True, src=where(AGENT), dst=where(MANAGER))
            assert await call("TransferMessage", NET["Message"](header=header, body="{}")) == ok
            assert (await manager.received.get()).body == "{}"

            sending = asyncio.ensure_future(manager.send(AGENT, "order", uuid="U4"))
            order = NET["Message"].FromString(await stream.read())
            header = NET["MessageHeader"](uuid="U4", mtype="default", sync=True, src=where(MANAGER), dst=where(AGENT))
            assert order == NET["Message"](header=header, body="order")
            await stream.write(NET["Ack"](uuid="U4", code=5001, src=where(AGENT)).SerializeToString())
            assert await asyncio.wait_for(sending, 90) == 5001
            stream.cancel()
    finally:
        await manager.close()


async def test_the_manager_speaks_to_a_clusterd_that_it_does_not_know() -> None:
    signals = asyncio.Queue[Any]()
    async with stranger() as (clusterd, address):
        link = ClusterD(
            address, "job-1", security=Security(), signal=signals.put_nowait,
            nics=lambda *switch: signals.put_nowait(switch), stress=lambda *test: signals.put_nowait(test),
            profile=signals.put_nowait,
        )  # fmt: skip
        await link.start()
        try:
            subscribed = {}
            for _ in range(6):
                path, message, _ = await asyncio.wait_for(clusterd.heard.get(), 90)
                subscribed[path] = message
            who = CLUSTER["ClientInfo"](jobId="job-1", role="taskd")
            tracer = TRACE["ProfilingClientInfo"](jobId="job-1", role="taskd")
            assert subscribed == {
                **{
                    f"/Recover/{name}": who
                    for name in (
                        "Init", "Register", "SubscribeProcessManageSignal", "SubscribeNotifySwitch",
                        "SubscribeNotifyExecStressTest",
                    )
                },
                "/TrainingDataTrace/SubscribeDataTraceSwitch": tracer,
            }  # fmt: skip

            async def hears(path: str, message: Any) -> Any:
                clusterd.say(path, message)
                return await asyncio.wait_for(signals.get(), 90)

            fault = CLUSTER["FaultRank"](rankId="9", faultType="0")
            signal = CLUSTER["ProcessManageSignal"](
                uuid="u", jobId="job-1", signalType="changeStrategy", actions=["a", "b"], faultRanks=[fault],
                changeStrategy="recover", timeout=33, nodeRankIds=["1"], extraParams="recover-in-place",
            )  # fmt: skip
            assert await hears("/Recover/SubscribeProcessManageSignal", signal) == Signal(
                "changeStrategy", "u", "job-1", ("a", "b"), {9: 0}, "recover", 33, (1,), "recover-in-place"
            )
            switch = CLUSTER["SwitchRankList"](rankID=["0", "8"], op=[True, False], jobId="job-1")
            assert await hears("/Recover/SubscribeNotifySwitch", switch) == (["0", "8"], [True, False], "job-1")
            test = CLUSTER["StressTestRankParams"](jobId="job-1")
            test.stressParam["3"].ops.extend([0, 1])
            assert await hears("/Recover/SubscribeNotifyExecStressTest", test) == ({3: [0, 1]}, "job-1")
            trace = TRACE["DataStatusRes"](profilingSwitch=TRACE["ProfilingSwitch"](Step="on", FP="off"), code=200)
            got = await hears("/TrainingDataTrace/SubscribeDataTraceSwitch", trace)
            assert {key: value for key, value in got.items() if value} == {"Step": "on", "FP": "off"}

            async def says(path: str) -> Any:
                return (await clusterd.expect(f"/Recover/{path}"))[0]

            status = CLUSTER["Status"](code=406, info="no")
            link.report(Report("process_fault", {9: 0}))
            assert await says("ReportProcessFault") == CLUSTER["ProcessFaultRequest"](jobId="job-1", faultRanks=[fault])
            link.report(Report("stop_complete", {9: 0}, 406, "no"))
            stopped = CLUSTER["StopCompleteRequest"](jobId="job-1", status=status, faultRanks=[fault])
            assert await says("ReportStopComplete") == stopped
            link.report(Report("recover_strategy", {9: 0}, strategies=("retry", "exit")))
            offered = CLUSTER["RecoverStrategyRequest"](jobId="job-1", faultRanks=[fault], strategies=["retry", "exit"])
            assert await says("ReportRecoverStrategy") == offered
            link.report(Report("recover_status", {9: 0}, 406, "no", strategy="retry"))
            result = CLUSTER["RecoverStatusRequest"](
                jobId="job-1", status=status, strategy="retry", isolateRankIds=["9"]
            )
            assert await says("ReportRecoverStatus") == result
            link.reply_nics(NicReply("job-1", True))
            assert await says("ReplySwitchNicResult") == CLUSTER["SwitchResult"](jobId="job-1", result=True)
            link.reply_stress(StressReply("job-1", {"3": {"0": ("2", "find fault rank")}}))
            stressed = CLUSTER["StressTestResult"](jobId="job-1")
            stressed.stressResult["3"].rankResult["0"].MergeFrom(
                CLUSTER["StressTestOpResult"](code="2", result="find fault rank")
            )
            assert await says("ReplyStressTestResult") == stressed
        finally:
            await link.close()
