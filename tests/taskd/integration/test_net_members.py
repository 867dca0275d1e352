"""Members that come, go and come back: what the one above them makes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from evertrain.taskd.net import client, server
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.server import SERVICE, as_message
from evertrain.wire import service
from evertrain.wire.tasknet_pb2 import Ack, PathDiscoveryReq, RegisterReq

AGENT = Position("Agent", "5")


def proxy(number: int = 5) -> Position:
    return Position("Proxy", str(number), "77")


def metadata(who: Position) -> tuple[tuple[str, str], ...]:
    return (("role", who.role), ("serverrank", who.server), ("processrank", who.process))


@contextlib.asynccontextmanager
async def manager() -> AsyncIterator[tuple[Node, Any]]:
    node = Node(Position("Mgr", "0"), listen="127.0.0.1:0")
    await node.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{node.port}") as channel:
            yield node, service.stub(channel, SERVICE)
    finally:
        await node.close()


async def join(stub: Any, who: Position) -> Any:
    await stub.Register(RegisterReq(uuid="u", pos=as_message(who)))
    await stub.PathDiscovery(PathDiscoveryReq(uuid="u", proxyPos=as_message(who), path=[as_message(AGENT)]))
    stream = stub.InitServerDownStream(metadata=metadata(who))
    await stream.initial_metadata()
    return stream


async def test_who_has_registered_is_reached_although_its_stream_is_still_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy proxy opens it late, and what the member says by a call is there before."""
    async with manager() as (node, stub):
        await stub.Register(RegisterReq(uuid="u", pos=as_message(proxy())))
        path = PathDiscoveryReq(uuid="u", proxyPos=as_message(proxy()), path=[as_message(AGENT)])
        await stub.PathDiscovery(path)
        for uuid in ("first", "after it has come again"):
            sending = asyncio.ensure_future(node.send(AGENT, "x", uuid=uuid))
            await asyncio.sleep(0)
            stream = stub.InitServerDownStream(metadata=metadata(proxy()))
            assert (await asyncio.wait_for(stream.read(), 90)).header.uuid == uuid
            await stream.write(Ack(uuid=uuid, code=0))
            assert await asyncio.wait_for(sending, 90) == 0
            await stub.Register(RegisterReq(uuid="u", pos=as_message(proxy())))
        monkeypatch.setattr(server, "ACK_WAIT", 0.05)
        assert await node.send(AGENT, "x") == 6002
        monkeypatch.setattr(server, "ACK_WAIT", 1000.0)
        assert await asyncio.wait_for(node.send(AGENT, "x"), 90) == 6002, "it is not waited for twice"


async def test_the_end_of_an_old_stream_does_not_end_the_new_one() -> None:
    async with manager() as (node, stub):
        old = await join(stub, proxy())
        new = stub.InitServerDownStream(metadata=metadata(proxy()))
        await new.initial_metadata()
        assert await asyncio.wait_for(old.read(), 90) is grpc.aio.EOF
        old.cancel()
        sending = asyncio.ensure_future(node.send(AGENT, "x", uuid="mine"))
        assert (await asyncio.wait_for(new.read(), 90)).header.uuid == "mine"
        await new.write(Ack(uuid="mine", code=0))
        assert await asyncio.wait_for(sending, 90) == 0
        new.cancel()


async def test_who_waits_for_an_ack_hears_at_once_that_the_stream_broke() -> None:
    async with manager() as (node, stub):
        stream = await join(stub, proxy())
        sending = asyncio.ensure_future(node.send(AGENT, "x"))
        await stream.read()
        begun = asyncio.get_running_loop().time()
        stream.cancel()
        assert await sending == 6000
        assert asyncio.get_running_loop().time() - begun < server.ACK_WAIT
        assert not node.server._members[proxy()].acks  # type: ignore[union-attr]


async def test_there_is_room_for_so_many_members_and_those_that_left_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.MAX_MEMBERS == 5000 and server.ACK_WAIT == 3
    monkeypatch.setattr(server, "MAX_MEMBERS", 2)
    async with manager() as (node, stub):
        streams = [await join(stub, proxy(number)) for number in (1, 2)]
        with pytest.raises(grpc.aio.AioRpcError, match="exceed max registry num"):
            await stub.Register(RegisterReq(uuid="u", pos=as_message(proxy(3))))
        streams[0].cancel()
        while proxy(1) in node.server.members:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        streams.append(await join(stub, proxy(3)))
        assert node.server is not None and sorted(node.server.members) == [proxy(2), proxy(3)]
        for stream in streams:
            stream.cancel()


async def test_attempts_to_come_back_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            raise asyncio.CancelledError

    async def refused(self: client.Client) -> None:
        raise OSError("nobody there")

    monkeypatch.setattr(client.Client, "_stay_joined", refused)
    monkeypatch.setattr(client.asyncio, "sleep", sleep)  # type: ignore[attr-defined]
    node = Node(AGENT, upstream="127.0.0.1:1")
    assert node.client is not None
    with pytest.raises(asyncio.CancelledError):
        await node.client._keep_joined()
    assert all(low / 2 <= pause <= low for pause, low in zip(pauses, (0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1), strict=True))


async def test_a_parent_that_does_not_answer_is_joined_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALL_LIMIT", 0.3)
    async with manager() as (node, _):
        agent = Node(Position("Proxy", "5", "1"), listen="127.0.0.1:0", upstream=f"127.0.0.1:{node.port}")
        await agent.start()
        try:
            assert await agent.wait_joined(90) and node.server is not None and agent.client is not None
            arrived = node.server._arrived
            node.server._arrived = lambda message: asyncio.Event().wait()  # type: ignore[assignment,return-value]
            assert await agent.send(Position("Mgr", "0"), "x") == 6000
            while agent.client.joined.is_set():
                await asyncio.sleep(0.01)
            node.server._arrived = arrived
            assert await agent.wait_joined(90)
            assert await agent.send(Position("Mgr", "0"), "x") == 0
        finally:
            await agent.close()
