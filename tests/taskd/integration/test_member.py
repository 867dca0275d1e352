"""An agent in a thread-bound process, its proxy and a manager: what is sent arrives once, whatever breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from evertrain.taskd import frames
from evertrain.taskd.member import Member
from evertrain.taskd.net.background import Background
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.proxy import Proxy

AGENT = Position("Agent", "1")


@pytest.fixture
def background() -> Iterator[Background]:
    loop = Background("test")
    with contextlib.closing(loop):
        yield loop


@contextlib.contextmanager
def job(background: Background) -> Iterator[tuple[Node, Proxy, Member]]:
    manager = Node(Position("Mgr", "0"), listen="127.0.0.1:0")
    background.run(manager.start())
    proxy = Proxy("1", "127.0.0.1:0", f"127.0.0.1:{manager.port}", background=background)
    agent = Member(AGENT, f"127.0.0.1:{proxy.start()}", background=background)
    agent.start()
    try:
        assert agent.wait_joined(90)
        yield manager, proxy, agent
    finally:
        agent.close()
        proxy.close()
        background.run(manager.close())


def test_there_and_back(background: Background) -> None:
    with job(background) as (manager, _, agent):
        assert agent.send("STATUS", 201, "32767", {})
        message = background.run(manager.received.get(), 90)
        assert message.header.mtype == "DEFAULT" and message.header.dst.role == "Mgr"
        assert frames.decode(message.body) == frames.body("STATUS", 201, "32767", {})
        answer = frames.body("ACTION", 210, "32767")
        assert background.run(manager.send(AGENT, answer.encode(), uuid="u")) == 0
        assert agent.received.get(timeout=90) == answer


def test_what_comes_twice_or_is_garbage_is_not_handed_on(background: Background) -> None:
    with job(background) as (manager, _, agent):
        first, last = frames.body("ACTION", 213, '["1"]'), frames.body("ACTION", 203)
        for uuid, text in (("a", first.encode()), ("a", first.encode()), ("b", "garbage"), ("c", last.encode())):
            assert background.run(manager.send(AGENT, text, uuid=uuid)) == 0
        assert [agent.received.get(timeout=90) for _ in range(2)] == [first, last]
        assert agent.received.empty()


def test_a_message_waits_for_a_manager_that_is_just_coming_back(background: Background) -> None:
    with job(background) as (manager, _, agent):
        background.run(manager.close())
        sending = background.submit(agent.deliver(frames.body("STATUS", 202, "{}")))
        manager = Node(Position("Mgr", "0"), listen=f"127.0.0.1:{manager.port}")
        background.run(manager.start())
        assert sending.result(10)
        assert frames.decode(background.run(manager.received.get(), 90).body).code == 202
        background.run(manager.close())


def test_without_a_manager_the_sender_is_told(background: Background) -> None:
    with job(background) as (manager, _, agent):
        background.run(manager.close())
        assert not agent.send("STATUS", 202, "{}")
