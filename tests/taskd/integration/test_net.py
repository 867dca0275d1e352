"""Trees of real gRPC servers and clients on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from evertrain import aio
from evertrain.taskd.net import client, server
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security
from evertrain.taskd.net.server import SERVICE, as_message
from evertrain.wire import service
from evertrain.wire.tasknet_pb2 import Ack, Message, MessageHeader, PathDiscoveryReq, RegisterReq
from tests.taskd.relay import Relay

MANAGER = Position("Mgr", "0")
LOOPBACK = "127.0.0.1:0"


@contextlib.asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    try:
        for node in nodes:
            await node.start()
            if node.client is not None:
                await asyncio.wait_for(node.client.joined.wait(), 90)
        yield
    finally:
        for node in reversed(nodes):
            await node.close()


class Tree:
    """A manager, and proxies with an agent and two workers each."""

    def __init__(self, nodes: int = 2, security: Security | None = None) -> None:
        self.manager = Node(MANAGER, listen=LOOPBACK, security=security)
        self.nodes, self.security = nodes, security
        self.proxies: list[Node] = []
        self.agents: list[Node] = []
        self.workers: list[Node] = []

    async def __aenter__(self) -> Tree:
        await self.manager.start()
        for number in range(self.nodes):
            await self.add(number)
        return self

    async def add(self, server: int, started: int = 1000) -> None:
        above = f"127.0.0.1:{self.manager.port}"
        position = Position("Proxy", str(server), str(started))
        proxy = Node(position, listen=LOOPBACK, upstream=above, security=self.security)
        await self._start(proxy, self.proxies)
        above = f"127.0.0.1:{proxy.port}"
        await self._start(Node(Position("Agent", str(server)), upstream=above, security=self.security), self.agents)
        for rank in (2 * server, 2 * server + 1):
            worker = Node(Position("Worker", str(server), str(rank)), upstream=above, security=self.security)
            await self._start(worker, self.workers)

    async def replace_manager(self, security: Security | None = None) -> None:
        """Another one at the same address; the proxies have joined it."""
        port = self.manager.port
        await self.manager.close()
        async with aio.timeout(90):
            for proxy in self.proxies:
                while proxy.client.joined.is_set():  # type: ignore[union-attr]
                    await asyncio.sleep(0.01)  # else its old place with the first manager would count
        self.manager = Node(MANAGER, listen=f"127.0.0.1:{port}", security=security)
        await self.manager.start()
        for proxy in self.proxies:
            await asyncio.wait_for(proxy.client.joined.wait(), 90)  # type: ignore[union-attr]

    async def _start(self, node: Node, row: list[Node]) -> None:
        row.append(node)
        await node.start()
        assert node.client is not None
        await asyncio.wait_for(node.client.joined.wait(), 90)

    async def __aexit__(self, *exc: object) -> None:
        for node in (*self.workers, *self.agents, *self.proxies, self.manager):
            await node.close()


async def body(node: Node) -> str:
    return (await asyncio.wait_for(node.received.get(), 90)).body


async def test_a_message_goes_up_and_the_answer_comes_down() -> None:
    async with Tree() as tree:
        assert await tree.agents[1].send(MANAGER, "I am here") == 0
        got = await asyncio.wait_for(tree.manager.received.get(), 90)
        assert (got.body, got.header.src.role, got.header.src.serverRank) == ("I am here", "Agent", "1")
        assert await tree.manager.send(Position("Agent", "1"), "start") == 0
        assert await body(tree.agents[1]) == "start"
        assert await tree.manager.send(Position("Worker", "1", "3"), "switch") == 0
        assert await body(tree.workers[3]) == "switch"


async def test_a_worker_reaches_the_agent_of_its_node() -> None:
    async with Tree(1) as tree:
        assert await tree.workers[1].send(Position("Agent", "0"), "help") == 0
        assert await body(tree.agents[0]) == "help"


async def test_a_broadcast_reaches_each_worker_once() -> None:
    async with Tree() as tree:
        assert await tree.manager.send(Position("Worker", "All", "All"), "profile") == 0
        assert [await body(worker) for worker in tree.workers] == ["profile"] * 4
        assert await tree.manager.send(Position("Worker", "0,1", "0,3"), "two of you") == 0
        assert [await body(tree.workers[rank]) for rank in (0, 3)] == ["two of you"] * 2
        assert await tree.manager.send(Position("Agent", "All"), "agents") == 0
        assert [await body(agent) for agent in tree.agents] == ["agents"] * 2
        assert all(worker.received.empty() for worker in tree.workers), "nothing came twice"


async def test_nobody_there() -> None:
    async with Tree(1) as tree:
        assert await tree.manager.send(Position("Agent", "7"), "x") == 5002
        assert await tree.manager.send(Position("Ghost", "7"), "x") == 4003
        assert await tree.workers[0].send(Position("Worker", "5", "50"), "x") != 0


async def test_who_does_not_read_is_told_apart_from_who_got_it() -> None:
    async with Tree(1) as tree:
        codes = [await tree.manager.send(Position("Agent", "0"), str(number)) for number in range(9)]
        assert codes == [0] * 8 + [5001]


async def test_a_slow_member_holds_nobody_else_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's acks never come; the other one's do, over the same proxy."""
    async with Tree(1) as tree:
        silent = tree.workers[0].client
        assert silent is not None
        silent._received = lambda message: asyncio.Event().wait()  # type: ignore[assignment,return-value]
        monkeypatch.setattr(server, "ACK_WAIT", 1000.0)
        held = asyncio.ensure_future(tree.manager.send(Position("Worker", "0", "0"), "x"))
        assert await asyncio.wait_for(tree.manager.send(Position("Worker", "0", "1"), "y"), 90) == 0
        assert not held.done()
        held.cancel()
        monkeypatch.setattr(server, "ACK_WAIT", 0.5)
        assert await tree.manager.send(Position("Worker", "0", "0"), "z") == 6001


async def test_a_new_pod_takes_the_place_of_the_old_one() -> None:
    async with Tree() as tree:
        old = tree.agents[1]
        await tree.add(1, started=2000)
        assert await tree.manager.send(Position("Agent", "1"), "for the new one") == 0
        assert await body(tree.agents[2]) == "for the new one"
        assert old.received.empty()
        await tree.proxies[1].close()
        assert await tree.manager.send(Position("Agent", "1"), "still") == 0
        assert await body(tree.agents[2]) == "still"


async def rejoin(proxy: Node) -> None:
    """Its connection breaks and comes back."""
    assert proxy.client is not None
    proxy.client._broken.set()
    while proxy.client.joined.is_set():
        await asyncio.sleep(0)
    await asyncio.wait_for(proxy.client.joined.wait(), 90)


async def test_a_pod_that_was_replaced_does_not_get_its_place_back_by_coming_back() -> None:
    async with Tree() as tree:
        await tree.add(1, started=2000)
        await rejoin(tree.proxies[1])
        assert await tree.manager.send(Position("Agent", "1"), "for the new one") == 0
        assert await body(tree.agents[2]) == "for the new one"
        assert await tree.manager.send(Position("Worker", "All", "All"), "everybody") == 0
        assert [await body(worker) for worker in (*tree.workers[:2], *tree.workers[4:])] == ["everybody"] * 4
        assert tree.workers[2].received.empty()


async def test_a_pod_keeps_its_place_if_the_one_that_was_to_take_it_over_goes_away() -> None:
    async with Tree() as tree:
        await tree.add(1, started=2000)
        await tree.proxies[2].close()
        while tree.proxies[2].own in tree.manager.server.members:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        assert await tree.manager.send(Position("Agent", "1"), "you again") == 0
        assert await body(tree.agents[1]) == "you again"


async def test_a_new_manager_learns_the_tree_again() -> None:
    async with Tree(1) as tree:
        await tree.replace_manager()
        assert await tree.manager.send(Position("Worker", "0", "1"), "again") == 0
        assert await body(tree.workers[1]) == "again"
        assert await tree.agents[0].send(MANAGER, "up again") == 0


async def test_a_leaf_that_comes_before_the_manager_gets_through() -> None:
    manager = Node(MANAGER, listen=LOOPBACK)
    await manager.start()
    port = manager.port
    await manager.close()
    proxy = Node(Position("Proxy", "0", "1"), listen=LOOPBACK, upstream=f"127.0.0.1:{port}")
    await proxy.start()
    agent = Node(Position("Agent", "0"), upstream=f"127.0.0.1:{proxy.port}")
    await agent.start()
    manager = Node(MANAGER, listen=f"127.0.0.1:{port}")
    try:
        await manager.start()
        assert agent.client is not None
        await asyncio.wait_for(agent.client.joined.wait(), 90)
        assert await agent.send(MANAGER, "early") == 0
    finally:
        for node in (agent, proxy, manager):
            await node.close()


async def test_only_who_knows_the_token_of_the_job_is_heard() -> None:
    async with Tree(1, Security(token="secret")) as tree:
        assert await tree.agents[0].send(MANAGER, "x") == 0
        for metadata in ((), (("x-job-token", "guess"),)):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{tree.manager.port}") as channel:
                stub = service.stub(channel, SERVICE)
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.Register(RegisterReq(uuid="1", pos=as_message(PROXY)), metadata=metadata)
                assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


# The wire itself, with a client that knows only the messages.


@contextlib.asynccontextmanager
async def bare(tree: Tree) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{tree.manager.port}") as channel:
        yield service.stub(channel, SERVICE)


PROXY = Position("Proxy", "5", "77")
METADATA = (("role", "Proxy"), ("serverrank", "5"), ("processrank", "77"))


async def test_a_stream_needs_a_registration() -> None:
    async with Tree(0) as tree, bare(tree) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="un registry error"):
            await stub.InitServerDownStream(metadata=METADATA).read()


async def test_a_path_needs_a_registration_and_names_that_can_be_meant() -> None:
    async with Tree(0) as tree, bare(tree) as stub:
        path = PathDiscoveryReq(uuid="u", proxyPos=as_message(PROXY), path=[as_message(Position("Agent", "5"))])
        with pytest.raises(grpc.aio.AioRpcError, match="un registry error"):
            await stub.PathDiscovery(path)
        for strange in (PROXY._replace(server="x"), PROXY._replace(process="1" * 5000), Position("Worker", "1")):
            with pytest.raises(grpc.aio.AioRpcError, match="needs a number"):
                await stub.Register(RegisterReq(uuid="u", pos=as_message(strange)))
        await stub.Register(RegisterReq(uuid="u", pos=as_message(PROXY)))
        assert (await stub.PathDiscovery(path)).code == 0
        path.path.append(as_message(MANAGER))
        with pytest.raises(grpc.aio.AioRpcError, match="no path"):
            await stub.PathDiscovery(path)


async def test_what_a_member_does_not_read_does_not_fill_the_memory() -> None:
    async with Tree(0) as tree, bare(tree) as stub:
        await stub.Register(RegisterReq(uuid="u", pos=as_message(PROXY)))
        await stub.PathDiscovery(
            PathDiscoveryReq(uuid="u", proxyPos=as_message(PROXY), path=[as_message(Position("Agent", "5"))])
        )
        stream = stub.InitServerDownStream(metadata=METADATA)
        await stream.initial_metadata()
        codes = [await tree.manager.send(Position("Agent", "All"), "x" * 100_000) for _ in range(1500)]
        assert codes[:1000] == [0] * 1000 and codes[-1] == 5001
        stream.cancel()


async def test_the_second_registration_of_a_position_ends_the_first_ones_stream() -> None:
    async with Tree(0) as tree, bare(tree) as stub:
        request = RegisterReq(uuid="u1", pos=as_message(PROXY))
        ack = await stub.Register(request)
        assert (ack.uuid, ack.code, ack.src.role) == ("u1", 0, "Mgr")
        first = stub.InitServerDownStream(metadata=METADATA)
        await first.initial_metadata()
        await stub.Register(request)
        assert await asyncio.wait_for(first.read(), 90) is grpc.aio.EOF


async def test_an_ack_counts_only_for_its_message() -> None:
    async with Tree(0) as tree, bare(tree) as stub:
        await stub.Register(RegisterReq(uuid="u1", pos=as_message(PROXY)))
        stream = stub.InitServerDownStream(metadata=METADATA)
        await stream.initial_metadata()
        tree.manager._routes.learn([Position("Agent", "5")], PROXY)
        sending = asyncio.ensure_future(tree.manager.send(Position("Agent", "5"), "x", uuid="mine"))
        message = await stream.read()
        assert (message.header.uuid, message.header.sync, message.header.dst.processRank) == ("mine", True, "-1")
        await stream.write(Ack(uuid="another", code=0))
        await stream.write(Ack(uuid="mine", code=5001))
        assert await asyncio.wait_for(sending, 90) == 5001
        stream.cancel()


async def test_what_can_not_be_delivered_is_an_error_of_the_call() -> None:
    async with Tree(0) as tree, bare(tree) as stub:
        header = MessageHeader(uuid="u", src=as_message(PROXY), dst=as_message(Position("Worker", "1", "8")))
        for message, text in (
            (Message(header=header, body="x"), "no route"),
            (Message(body="x"), "4001"),
            (Message(header=MessageHeader(uuid="u")), "4002"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=text) as error:
                await stub.TransferMessage(message)
            assert error.value.code() == grpc.StatusCode.UNKNOWN


async def test_a_member_that_leaves_has_no_work_left_of_which_nobody_would_hear() -> None:
    async with Tree(1) as tree:
        before = asyncio.all_tasks()
        member = Node(Position("Worker", "0", "9"), upstream=f"127.0.0.1:{tree.proxies[0].port}")
        async with running(member):
            ours = [task for task in asyncio.all_tasks() - before if "_StreamResponseMixin.read" in repr(task)]
            assert len(ours) == 1, "it reads what its parent says"
        assert ours[0].done()


async def test_a_second_manager_on_the_same_port_is_told_so() -> None:
    async with Tree(0) as tree:
        second = Node(MANAGER, listen=f"127.0.0.1:{tree.manager.port}")
        with pytest.raises(OSError, match="is another manager or proxy running there"):
            await second.start()


async def test_a_message_under_way_when_the_connection_is_given_up_is_lost_and_its_sender_is_not() -> None:
    """gRPC ends the calls of a channel that is closed as if their tasks had been cancelled."""
    async with Tree(1) as tree:
        assert tree.manager.server is not None and tree.proxies[0].client is not None
        reached, never = asyncio.Event(), asyncio.Event()

        async def hang(message: Message) -> Ack:
            reached.set()
            await never.wait()
            return Ack()

        tree.manager.server._arrived = hang
        sending = asyncio.ensure_future(tree.proxies[0].send(MANAGER, "x"))
        await asyncio.wait_for(reached.wait(), 90)
        tree.proxies[0].client._broken.set()
        assert await asyncio.wait_for(sending, 90) == 6000
        never.set()


class Held:
    """A manager that keeps back the answer to what has arrived."""

    def __init__(self, manager: Node) -> None:
        assert manager.server is not None
        self.reached, self.answers = asyncio.Event(), asyncio.Event()
        self._arrived, manager.server._arrived = manager.server._arrived, self._hold

    async def _hold(self, message: Message) -> Ack:
        self.reached.set()
        await self.answers.wait()
        return await self._arrived(message)


async def test_a_manager_that_ends_confirms_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LAST_ANSWERS", 90.0)
    async with Tree(1) as tree:
        held = Held(tree.manager)
        sending = asyncio.ensure_future(tree.agents[0].send(MANAGER, "the training has ended"))
        await asyncio.wait_for(held.reached.wait(), 90)
        closing = asyncio.ensure_future(tree.manager.close())
        await asyncio.wait({closing, sending}, timeout=0.5)
        held.answers.set()
        assert await sending == 0
        await closing
        assert tree.manager.received.qsize() == 1


async def test_a_manager_that_ends_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LAST_ANSWERS", 0.1)
    monkeypatch.setattr(client, "LAST_ANSWERS", 0.1)
    async with Tree(1) as tree:
        held = Held(tree.manager)
        sending = asyncio.ensure_future(tree.agents[0].send(MANAGER, "x"))
        await asyncio.wait_for(held.reached.wait(), 90)
        await asyncio.wait_for(tree.manager.close(), 90)
        assert await asyncio.wait_for(sending, 90) != 0
        held.answers.set()


async def test_the_answer_to_a_call_counts_also_after_the_end_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LAST_ANSWERS", 90.0)
    async with Tree(1) as tree:
        assert tree.manager.server is not None
        held, proxy = Held(tree.manager), tree.proxies[0]
        sending = asyncio.ensure_future(tree.agents[0].send(MANAGER, "x"))
        await asyncio.wait_for(held.reached.wait(), 90)
        tree.manager.server._members[proxy.own].end()
        async with aio.timeout(90):
            while proxy.client.joined.is_set():  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        held.answers.set()
        assert await asyncio.wait_for(sending, 90) == 0


@contextlib.asynccontextmanager
async def over_a_relay() -> AsyncIterator[tuple[Node, Relay, Node]]:
    """A manager, and a proxy that has joined it by a line that can be cut."""
    manager = Node(MANAGER, listen=LOOPBACK)
    await manager.start()
    relay = Relay(manager.port)
    await relay.start()
    try:
        proxy = Node(Position("Proxy", "0", "1"), listen=LOOPBACK, upstream=f"127.0.0.1:{relay.port}")
        async with running(proxy):
            yield manager, relay, proxy
    finally:
        await relay.stop()
        await manager.close()


async def test_a_proxy_notices_by_what_its_members_say_that_the_way_up_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALL_LIMIT", 2.0)
    async with over_a_relay() as (manager, relay, proxy):
        agent = Node(Position("Agent", "0"), upstream=f"127.0.0.1:{proxy.port}")
        async with running(agent):
            assert proxy.client is not None
            relay.cut()
            monkeypatch.setattr(proxy.client, "send", late(proxy.client.send))
            async with aio.timeout(90):
                while proxy.client.joined.is_set():
                    assert await agent.send(MANAGER, "lost")
                    await asyncio.sleep(0.01)
            relay.mend()
            async with aio.timeout(90):
                while await agent.send(MANAGER, "heard"):
                    await asyncio.sleep(0.01)
            assert (await manager.received.get()).body == "heard"


async def test_a_proxy_whose_members_say_nothing_notices_a_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    monkeypatch.setattr(client, "_OPTIONS", [(name, shorter.get(name, value)) for name, value in client._OPTIONS])
    more_pings = ("grpc.http2.min_ping_interval_without_data_ms", 500)
    monkeypatch.setattr(server, "OPTIONS", [each for each in server.OPTIONS if each[0] != more_pings[0]] + [more_pings])
    async with over_a_relay() as (_, relay, proxy):
        assert proxy.client is not None
        relay.cut()
        async with aio.timeout(90):
            while proxy.client.joined.is_set():
                await asyncio.sleep(0.01)
        relay.mend()
        assert await proxy.wait_joined(90)


def late(send: Callable[[Message], Awaitable[Ack]]) -> Callable[[Message], Awaitable[Ack]]:
    """A proxy gets a message after its member has sent it."""

    async def sent(message: Message) -> Ack:
        await asyncio.sleep(0.1)
        return await send(message)

    return sent


@pytest.mark.parametrize(("held", "pauses"), [(0.0, [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]), (6.0, [0.05] * 7)])
async def test_who_is_sent_away_at_once_comes_back_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, held: float, pauses: list[float]
) -> None:
    """As when two processes have the same rank: each sends the other away."""
    paused: list[float] = []
    enough, sleep = asyncio.Event(), asyncio.sleep

    async def pause(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) >= len(pauses):
            enough.set()
        await sleep(0)

    async def join() -> None:
        member._since = asyncio.get_running_loop().time() - held

    caplog.set_level(logging.INFO, "evertrain.taskd.net.client")
    monkeypatch.setattr(asyncio, "sleep", pause)
    monkeypatch.setattr(client.random, "uniform", lambda low, high: high)
    member = client.Client(Position("Agent", "0"), "127.0.0.1:1", nobody, list, Security())
    monkeypatch.setattr(member, "_stay_joined", join)
    member.start()
    await asyncio.wait_for(enough.wait(), 90)
    await member.close()
    assert paused[: len(pauses)] == pauses
    told = [each for each in caplog.messages if "rebuild net" in each]
    assert len(told) >= len(pauses) if held else told == [
        "rebuild net, role=Agent, srvRank=0: the parent at 127.0.0.1:1 ended the stream"
    ]


async def nobody(message: Message) -> Ack:
    return Ack()
