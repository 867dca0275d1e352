"""What really goes over TaskNet and to ClusterD: recorded as bytes, held against a second reading of the tables.

The other end knows nothing of our code: it takes and gives bytes, which it makes with descriptors that
tests/wire/unit/test_taskd.py builds from the original's tables. It reads them only for what nobody can know before, the
name of a message; then the bytes have to be those of the message that is expected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from evertrain.taskd.manager import clusterd as link
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.manager.orders import NicReply, Signal, StressReply
from evertrain.taskd.manager.reports import Report
from evertrain.taskd.member import Member
from evertrain.taskd.net.background import Background
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security
from tests.wire.unit.test_taskd import METHODS, PROFILING, RECOVER, TASKNET, read

NET, CLUSTER, TRACE = read(TASKNET), read(RECOVER), read(PROFILING)
TABLES = {"/TaskNet/": NET, "/Recover/": CLUSTER, "/TrainingDataTrace/": TRACE}
AGENT, WORKER, MANAGER = Position("Agent", "1"), Position("Worker", "1", "9"), Position("Mgr", "0")
PROXY = Position("Proxy", "1", "1700000000")
HEALTH = "/Recover/HealthCheck"


@dataclass
class Heard:
    path: str
    given: bytes
    read: Any
    metadata: dict[str, str]

    def assert_is(self, expected: Any) -> None:
        """Not only in what it says, but in every byte."""
        assert self.given == in_bytes(expected), f"{self.path}: {self.read} instead of {expected}"


def in_bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


class Stranger(grpc.GenericRpcHandler):
    """A server of bytes. Answers calls with `answers`, gives what is in `streams`, keeps what it gets."""

    def __init__(self) -> None:
        self.heard, self.checks = asyncio.Queue[Heard](), asyncio.Queue[Heard]()
        """The others, and questions whether it is there, which come at any time."""
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
            heard = self.checks if path == HEALTH else self.heard
            heard.put_nowait(Heard(path, given, table[request].FromString(given), metadata))
            return in_bytes(self.answers.get(path, table[response]()))

        async def stream(given: Any, context: Any) -> AsyncIterator[bytes]:
            if marks == ">":
                self.heard.put_nowait(Heard(path, given, table[request].FromString(given), metadata))
            else:
                self.heard.put_nowait(Heard(path, b"", None, metadata))
                reading = asyncio.ensure_future(self._read(path, given, table[request], metadata))
                context.add_done_callback(lambda _: reading.cancel())
            await context.send_initial_metadata(())
            while True:
                yield in_bytes(await self.streams.setdefault(path, asyncio.Queue()).get())

        make = {
            "": grpc.unary_unary_rpc_method_handler,
            ">": grpc.unary_stream_rpc_method_handler,
            "<>": grpc.stream_stream_rpc_method_handler,
        }[marks]
        return make(stream if marks else call)

    async def _read(self, path: str, given: Any, cls: Any, metadata: dict[str, str]) -> None:
        with contextlib.suppress(grpc.RpcError):
            async for each in given:
                self.heard.put_nowait(Heard(path, each, cls.FromString(each), metadata))

    def say(self, path: str, message: Any) -> None:
        self.streams.setdefault(path, asyncio.Queue()).put_nowait(message)

    async def expect(self, path: str) -> Heard:
        heard = await asyncio.wait_for(self.heard.get(), 90)
        assert heard.path == path, heard
        return heard


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


def message(src: Position, dst: Position, body: str, *, uuid: str, mtype: str, sync: bool = True) -> Any:
    header = NET["MessageHeader"](uuid=uuid, mtype=mtype, sync=sync, src=where(src), dst=where(dst))
    return NET["Message"](header=header, body=body)


async def joins(parent: Stranger, who: Position, *, leaf: bool) -> None:
    """It registers, tells who it is, and listens. A proxy has no path of its own to tell."""
    registered = await parent.expect("/TaskNet/Register")
    assert registered.read.uuid
    registered.assert_is(NET["RegisterReq"](uuid=registered.read.uuid, pos=where(who)))
    if leaf:
        path = await parent.expect("/TaskNet/PathDiscovery")
        assert path.read.uuid
        path.assert_is(NET["PathDiscoveryReq"](uuid=path.read.uuid, proxyPos=where(who), path=[where(who)]))
    metadata = (await parent.expect("/TaskNet/InitServerDownStream")).metadata
    told = {key: metadata[key] for key in ("role", "serverrank", "processrank")}
    assert told == {"role": who.role, "serverrank": who.server, "processrank": who.process}


@pytest.mark.parametrize(
    ("own", "mtype", "given", "text"),
    [
        (AGENT, "DEFAULT", ("STATUS", 201, "32767", {}),
         '{"msg_type":"STATUS","code":201,"message":"32767","extension":{}}'),
        (WORKER, "default", ("REGISTER", 101),
         '{"msg_type":"REGISTER","code":101,"message":"","extension":null}'),
    ],
    ids=["agent", "worker"],
)  # fmt: skip
async def test_a_member_speaks_to_a_parent_that_it_does_not_know(
    own: Position, mtype: str, given: tuple[Any, ...], text: str
) -> None:
    async with stranger() as (parent, address):
        background = Background()
        member = Member(own, address, background=background)
        try:
            await asyncio.to_thread(member.start)
            await joins(parent, own, leaf=True)
            assert await asyncio.to_thread(member.wait_joined, 90)
            assert await asyncio.to_thread(member.send, *given)
            sent = await parent.expect("/TaskNet/TransferMessage")
            assert sent.read.header.uuid
            sent.assert_is(message(own, MANAGER, text, uuid=sent.read.header.uuid, mtype=mtype))

            order = '{"msg_type":"ACTION","code":210,"message":"%d","extension":null}'
            for uuid, sync in (("U2", False), ("U3", True)):
                said = message(MANAGER, own, order % sync, uuid=uuid, mtype="default", sync=sync)
                parent.say("/TaskNet/InitServerDownStream", said)
            ack = await parent.expect("/TaskNet/InitServerDownStream")
            ack.assert_is(NET["Ack"](uuid="U3", code=0, src=where(own)))  # one that is not asked for is not given
            got = [await asyncio.to_thread(member.received.get, True, 90) for _ in range(2)]
            assert [body.message for body in got] == ["0", "1"]
        finally:
            await asyncio.to_thread(member.close)
            await asyncio.to_thread(background.close)


async def test_a_proxy_passes_on_what_it_gets_as_it_is() -> None:
    """Up and down, between an agent and a manager that both know nothing of our code."""
    async with stranger() as (parent, address):
        proxy = Node(PROXY, listen="127.0.0.1:0", upstream=address)
        await proxy.start()
        try:
            await joins(parent, PROXY, leaf=False)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:

                async def call(method: str, request: Any) -> Any:
                    answer = await channel.unary_unary(f"/TaskNet/{method}")(in_bytes(request))
                    return NET["Ack"].FromString(answer)

                assert (await call("Register", NET["RegisterReq"](uuid="1", pos=where(AGENT)))).code == 0
                path = NET["PathDiscoveryReq"](uuid="2", proxyPos=where(AGENT), path=[where(AGENT)])
                assert (await call("PathDiscovery", path)).code == 0
                discovered = await parent.expect("/TaskNet/PathDiscovery")
                discovered.assert_is(
                    NET["PathDiscoveryReq"](uuid="2", proxyPos=where(PROXY), path=[where(AGENT), where(PROXY)])
                )
                metadata = (("role", "Agent"), ("serverrank", "1"), ("processrank", "-1"))
                stream = channel.stream_stream("/TaskNet/InitServerDownStream")(metadata=metadata)
                await stream.initial_metadata()

                up = message(AGENT, MANAGER, "up", uuid="3", mtype="DEFAULT")
                taken = NET["Ack"](uuid="3", code=0, src=where(MANAGER))
                parent.answers["/TaskNet/TransferMessage"] = taken
                assert await call("TransferMessage", up) == taken, "the answer is the manager's"
                (await parent.expect("/TaskNet/TransferMessage")).assert_is(up)

                down = message(MANAGER, AGENT, "down", uuid="4", mtype="default")
                parent.say("/TaskNet/InitServerDownStream", down)
                assert await stream.read() == in_bytes(down)
                got = NET["Ack"](uuid="4", code=0, src=where(AGENT))
                await stream.write(in_bytes(got))
                (await parent.expect("/TaskNet/InitServerDownStream")).assert_is(got)
                stream.cancel()
        finally:
            await proxy.close()


async def test_a_parent_hears_a_member_that_it_does_not_know() -> None:
    manager = Node(MANAGER, listen="127.0.0.1:0")
    await manager.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{manager.port}") as channel:

            async def call(method: str, request: Any) -> Any:
                return await channel.unary_unary(f"/TaskNet/{method}")(in_bytes(request))

            ok = in_bytes(NET["Ack"](uuid="1", code=0, src=where(MANAGER)))
            assert await call("Register", NET["RegisterReq"](uuid="1", pos=where(PROXY))) == ok
            path = NET["PathDiscoveryReq"](uuid="1", proxyPos=where(PROXY), path=[where(AGENT), where(PROXY)])
            assert await call("PathDiscovery", path) == ok
            metadata = (("role", "Proxy"), ("serverrank", "1"), ("processrank", "1700000000"))
            stream = channel.stream_stream("/TaskNet/InitServerDownStream")(metadata=metadata)
            await stream.initial_metadata()
            assert await call("TransferMessage", message(AGENT, MANAGER, "{}", uuid="1", mtype="DEFAULT")) == ok
            assert (await manager.received.get()).body == "{}"

            sending = asyncio.ensure_future(manager.send(AGENT, "order", uuid="U4"))
            assert await stream.read() == in_bytes(message(MANAGER, AGENT, "order", uuid="U4", mtype="default"))
            await stream.write(in_bytes(NET["Ack"](uuid="U4", code=5001, src=where(AGENT))))
            assert await asyncio.wait_for(sending, 90) == 5001
            stream.cancel()
    finally:
        await manager.close()


async def test_the_manager_speaks_to_a_clusterd_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_HEALTH", 0.2)
    signals = asyncio.Queue[Any]()
    async with stranger() as (clusterd, address):
        manager = ClusterD(
            address, "job-1", security=Security(), signal=signals.put_nowait,
            nics=lambda *switch: signals.put_nowait(switch), stress=lambda *test: signals.put_nowait(test),
            profile=signals.put_nowait,
        )  # fmt: skip
        await manager.start()
        try:
            subscribed = {}
            for _ in range(6):
                heard = await asyncio.wait_for(clusterd.heard.get(), 90)
                subscribed[heard.path] = heard.given
            who = CLUSTER["ClientInfo"](jobId="job-1", role="taskd")
            tracer = TRACE["ProfilingClientInfo"](jobId="job-1", role="taskd")
            (await asyncio.wait_for(clusterd.checks.get(), 90)).assert_is(who)
            assert subscribed == {
                **{
                    f"/Recover/{name}": in_bytes(who)
                    for name in (
                        "Init", "Register", "SubscribeProcessManageSignal", "SubscribeNotifySwitch",
                        "SubscribeNotifyExecStressTest",
                    )
                },
                "/TrainingDataTrace/SubscribeDataTraceSwitch": in_bytes(tracer),
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

            async def says(path: str, expected: Any) -> None:
                (await clusterd.expect(f"/Recover/{path}")).assert_is(expected)

            status = CLUSTER["Status"](code=406, info="no")
            manager.report(Report("process_fault", {9: 0}))
            await says("ReportProcessFault", CLUSTER["ProcessFaultRequest"](jobId="job-1", faultRanks=[fault]))
            manager.report(Report("stop_complete", {9: 0}, 406, "no"))
            stopped = CLUSTER["StopCompleteRequest"](jobId="job-1", status=status, faultRanks=[fault])
            await says("ReportStopComplete", stopped)
            manager.report(Report("recover_strategy", {9: 0}, strategies=("retry", "exit")))
            offered = CLUSTER["RecoverStrategyRequest"](jobId="job-1", faultRanks=[fault], strategies=["retry", "exit"])
            await says("ReportRecoverStrategy", offered)
            manager.report(Report("recover_status", {9: 0}, 406, "no", strategy="retry"))
            result = CLUSTER["RecoverStatusRequest"](
                jobId="job-1", status=status, strategy="retry", isolateRankIds=["9"]
            )
            await says("ReportRecoverStatus", result)
            manager.reply_nics(NicReply("job-1", True))
            await says("ReplySwitchNicResult", CLUSTER["SwitchResult"](jobId="job-1", result=True))
            manager.reply_stress(StressReply("job-1", {"3": {"0": ("2", "find fault rank")}}))
            stressed = CLUSTER["StressTestResult"](jobId="job-1")
            stressed.stressResult["3"].rankResult["0"].MergeFrom(
                CLUSTER["StressTestOpResult"](code="2", result="find fault rank")
            )
            await says("ReplyStressTestResult", stressed)
        finally:
            await manager.close()
