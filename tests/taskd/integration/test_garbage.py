"""Frames that are broken, wrong or out of place: whoever gets them goes on, and forgets them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from evertrain import aio
from evertrain.taskd import frames
from evertrain.taskd.manager.shell import Config, Manager
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.server import as_message
from evertrain.wire.tasknet_pb2 import Ack, Message, MessageHeader, PathDiscoveryReq, RegisterReq
from evertrain.wire.tasknet_pb2 import Position as WirePosition

FRAMES = 600
AGENT, MANAGER = Position("Agent", "7"), Position("Mgr", "0")
ROLES = ("Mgr", "Proxy", "Agent", "Worker", "", "Boss")
RANKS = ("0", "1", "-1", "All", "0,1", "", "²", "9" * 5000, "x", "4294967296", "999999999")
TEXTS = (
    "", "0", "-1", "32767", "²", "9" * 5000, "[]", '["1"]', '{"fault_ranks":[1],"restart_times":3}', "\0", "null",
    '{"fault_ranks":[],"restart_times":99999999999999999999}', '{"rankResult":{"0":{"code":"0"}}}', "switchOK",
)  # fmt: skip
CODES = (0, 101, 201, 202, 204, 205, 206, 208, 209, 213, 711, 1411, 1422, -5, 2**40)


class Garbage:
    """The same for the same seed. 203 is left out, it says that a job is over, and 210, which is waited for."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def position(self) -> WirePosition:
        pick = self.random.choice
        return WirePosition(role=pick(ROLES), serverRank=pick(RANKS), processRank=pick(RANKS))

    def body(self) -> str:
        pick = self.random.choice
        kind = pick(("REGISTER", "STATUS", "ACTION", "KEEP_ALIVE", "x"))
        extension = pick((None, {}, {"switchNicUUID": pick(TEXTS)}, {"stressTestUUID": pick(TEXTS)}))
        text = frames.body(kind, pick(CODES), pick(TEXTS), extension).encode()
        return text if self.random.random() < 0.7 else self._broken(text.encode()).decode(errors="ignore")

    def message(self, dst: Position) -> bytes:
        pick = self.random.choice
        header = MessageHeader(uuid=pick(("", str(self.random.random()), "u" * 3000)), src=self.position())
        header.sync = self.random.random() < 0.5
        header.dst.CopyFrom(as_message(dst) if self.random.random() < 0.5 else self.position())
        return self._maybe_broken(Message(header=header, body=self.body()))

    def call(self, via: Position) -> tuple[str, bytes]:
        match self.random.randrange(5):
            case 0:
                return "Register", self._maybe_broken(RegisterReq(uuid="u", pos=self.position()))
            case 1:
                path = [self.position() for _ in range(self.random.randrange(4))]
                request = PathDiscoveryReq(uuid="u", proxyPos=as_message(via), path=path)
                return "PathDiscovery", self._maybe_broken(request)
        return "TransferMessage", self.message(MANAGER)

    def _maybe_broken(self, message: Any) -> bytes:
        content: bytes = message.SerializeToString()
        return self._broken(content) if self.random.random() < 0.3 else content

    def _broken(self, content: bytes) -> bytes:
        made = bytearray(content)
        for _ in range(self.random.randint(1, 5)):
            at = self.random.randrange(len(made) + 1)
            match self.random.randrange(4):
                case 0:
                    made[at : at + 1] = self.random.randbytes(1)
                case 1:
                    del made[at : at + self.random.randint(1, 8)]
                case 2:
                    made[at:at] = self.random.randbytes(4)
                case _:
                    del made[at:]
        return bytes(made)


async def until(node: Node, code: int) -> frames.Body:
    while True:
        with contextlib.suppress(frames.BadFrame):
            body = frames.decode((await asyncio.wait_for(node.received.get(), 90)).body)
            if body.code == code:
                return body


async def test_the_manager_outlives_garbage(tmp_path: Path) -> None:
    config = Config("job-1", 2, 2, enabled=False, listen="127.0.0.1:0", reset_file=tmp_path / "no", trace_file=tmp_path)
    manager, garbage = Manager(config), Garbage(1)
    task = asyncio.ensure_future(manager.run())
    await asyncio.wait_for(manager.listening.wait(), 90)
    address = f"127.0.0.1:{manager.port}"
    proxy = Node(Position("Proxy", "7", "1"), listen="127.0.0.1:0", upstream=address)
    await proxy.start()
    agent = Node(AGENT, upstream=f"127.0.0.1:{proxy.port}")
    await agent.start()
    calls = [garbage.call(proxy.own) for _ in range(FRAMES)]
    room = asyncio.Semaphore(32)

    async def call(channel: Any, method: str, content: bytes) -> bool:
        async with room:
            try:
                await channel.unary_unary(f"/TaskNet/{method}")(content, timeout=30)
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNKNOWN, error.code()
                return False
            return True

    try:
        assert await proxy.wait_joined(90) and await agent.wait_joined(90)
        async with grpc.aio.insecure_channel(address) as channel:
            taken = await asyncio.gather(*(call(channel, *each) for each in calls))
        assert any(taken) and not all(taken)
        assert len(manager._node._routes._below) < 100 and len(manager._mind.pods.agents) < 10
        assert await agent.wait_joined(90)
        body = frames.body("STATUS", 201, "5", {}).encode()
        while await agent.send(MANAGER, body) != 0:
            assert await proxy.wait_joined(90)
        assert (await until(agent, 210)).msg_type == "ACTION"
        assert not task.done()
    finally:
        await agent.close()
        await proxy.close()
        manager.stop("the test is over")
        await asyncio.wait_for(task, 90)


class Parent(grpc.GenericRpcHandler):
    """Takes everybody in and talks nonsense, then one sensible word."""

    def __init__(self, garbage: Garbage) -> None:
        self._words = [garbage.message(AGENT) for _ in range(FRAMES)]
        header = MessageHeader(uuid="good", sync=True, src=as_message(MANAGER), dst=as_message(AGENT))
        self._good = Message(header=header, body=frames.body("ACTION", 210, "good").encode()).SerializeToString()
        self.confirmed = asyncio.Event()

    def service(self, details: Any) -> Any:
        if details.method == "/TaskNet/InitServerDownStream":
            return grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: Any) -> bytes:
        return b"" if request else b"\xff"

    async def _stream(self, acks: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        reader = asyncio.ensure_future(self._read(acks))
        try:
            while self._words:
                yield self._words.pop()
            while True:  # until it is confirmed, as a manager does
                yield self._good
                with contextlib.suppress(TimeoutError):
                    async with aio.timeout(0.5):
                        await self.confirmed.wait()
                    await asyncio.Event().wait()
        finally:
            reader.cancel()

    async def _read(self, acks: AsyncIterator[bytes]) -> None:
        async for content in acks:
            ack = Ack.FromString(content)
            if (ack.uuid, ack.code) == ("good", 0):
                self.confirmed.set()


@pytest.mark.matrix
async def test_a_proxy_and_an_agent_outlive_garbage() -> None:
    parent = Parent(Garbage(2))
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((parent,))
    port = server.add_insecure_port("127.0.0.1:0")
    proxy = Node(Position("Proxy", "7", "1"), listen="127.0.0.1:0", upstream=f"127.0.0.1:{port}")
    await proxy.start()
    agent = Node(AGENT, upstream=f"127.0.0.1:{proxy.port}")
    await agent.start()
    try:
        await server.start()
        while (await until(agent, 210)).message != "good":
            pass
        await asyncio.wait_for(parent.confirmed.wait(), 90)
        for node in (proxy, agent):
            assert node.client is not None
            while node.client._handling:
                await asyncio.wait_for(asyncio.wait(node.client._handling), 90)
    finally:
        await agent.close()
        await proxy.close()
        await server.stop(None)
