from __future__ import annotations

import pytest

from evertrain.taskd.codes import AckCode
from evertrain.taskd.net import routing
from evertrain.taskd.net.routing import Down, Here, Position, Refusal, Routes, Up, checked

MANAGER = Position("Mgr", "0")
PROXY = Position("Proxy", "1", "1700000000")
AGENT = Position("Agent", "1")
WORKERS = [Position("Worker", "1", str(rank)) for rank in (8, 9)]


def manager() -> Routes:
    routes = Routes(MANAGER)
    for leaf in (AGENT, *WORKERS):
        routes.learn([leaf, PROXY], PROXY)
    return routes


def proxy() -> Routes:
    routes = Routes(PROXY)
    for leaf in (AGENT, *WORKERS):
        routes.learn([leaf], leaf)
    return routes


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        (Position("Agent", "1", "7"), Position("Agent", "1", "-1")),
        (Position("Agent", "1,2", ""), Position("Agent", "1,2", "-1")),
        (Position("Agent", "1,All", ""), Position("Agent", "All", "-1")),
        (Position("Worker", "1", "All"), Position("Worker", "1", "All")),
    ],
)
def test_a_destination_is_brought_into_its_normal_form(given: Position, normal: Position) -> None:
    assert checked(given) == normal


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (Position("Boss", "1", "-1"), 4003),
        (Position("Agent", "", "-1"), 4004),
        (Position("Agent", "-1", "-1"), 4004),
        (Position("Agent", "one", "-1"), 4004),
        (Position("Agent", "²", "-1"), 4004),
        (Position("Worker", "1", "-1"), 4005),
        (Position("Worker", "1", "8,x"), 4005),
    ],
)
def test_what_is_no_destination_is_refused(given: Position, code: int) -> None:
    refusal = checked(given)
    assert isinstance(refusal, Refusal) and refusal.code == code


def test_up_from_a_leaf_through_the_proxy_to_the_manager() -> None:
    assert Routes(AGENT).way(MANAGER) == Up()
    assert proxy().way(MANAGER) == Up()
    assert manager().way(MANAGER) == Here()


def test_down_from_the_manager_through_the_proxy_to_a_leaf() -> None:
    assert manager().way(WORKERS[1]) == Down((PROXY,))
    assert proxy().way(WORKERS[1], from_above=True) == Down((WORKERS[1],))
    assert Routes(WORKERS[1]).way(WORKERS[1], from_above=True) == Here()


def test_an_agent_and_a_worker_of_the_same_node_are_not_the_same() -> None:
    assert Routes(AGENT).way(WORKERS[0]) == Up()
    assert proxy().way(WORKERS[0]) == Down((WORKERS[0],))


def test_everybody_is_told_once_however_many_are_behind_a_proxy() -> None:
    everybody = Position("Worker", "All", "All")
    assert manager().way(everybody) == Down((PROXY,), broadcast=True)
    assert proxy().way(everybody, from_above=True) == Down(tuple(WORKERS), broadcast=True)


def test_a_list_names_several() -> None:
    assert proxy().way(Position("Worker", "0,1", "7,9")) == Down((WORKERS[1],), broadcast=True)


@pytest.mark.parametrize("dst", [Position("Agent", "2"), Position("Worker", "1", "7"), Position("Worker", "3", "All")])
def test_nobody_of_that_name(dst: Position) -> None:
    refusal = manager().way(dst)
    assert isinstance(refusal, Refusal) and refusal.code == AckCode.NO_ROUTE and "no route" in refusal.reason


def test_what_comes_from_above_does_not_go_up_again() -> None:
    refusal = proxy().way(Position("Proxy", "2"), from_above=True)
    assert isinstance(refusal, Refusal) and refusal.code == AckCode.NO_ROUTE


NEWER = PROXY._replace(process="1700000099")


def test_who_takes_a_position_over_takes_its_messages_over() -> None:
    routes = manager()
    routes.learn([AGENT, NEWER], NEWER)
    assert routes.way(AGENT) == Down((NEWER,))
    assert routes.way(WORKERS[0]) == Down((PROXY,)), "its worker has not come yet"
    routes.learn([WORKERS[0], NEWER], NEWER)
    assert routes.way(Position("Worker", "1", "All")) == Down((NEWER, PROXY), broadcast=True)


def test_the_one_before_gets_a_position_back_only_when_its_successor_is_gone() -> None:
    connected = {PROXY, NEWER}
    routes = Routes(MANAGER, connected.__contains__)
    for hop in (PROXY, NEWER, PROXY):
        routes.learn([AGENT, hop], hop)
    assert routes.way(AGENT) == Down((NEWER,)), "a network that comes back brings the old pod back, but not its place"
    connected.discard(NEWER)
    assert routes.way(AGENT) == Down((PROXY,)), "a pod that was to take over has given up"
    connected.discard(PROXY)
    assert routes.way(AGENT) == Down((NEWER,))


@pytest.mark.parametrize(
    "strange",
    [MANAGER, Position("Boss", "1"), Position("Agent", "x"), Position("Worker", "1"), Position("Agent", "9" * 5000),
     Position("Proxy", "1", "7" * 5000)],
)  # fmt: skip
def test_what_is_no_path_teaches_nothing(strange: Position) -> None:
    routes = manager()
    refusal = routes.learn([Position("Agent", "7"), strange, NEWER], NEWER)
    assert isinstance(refusal, Refusal) and refusal.code == AckCode.CLIENT_ERROR
    assert isinstance(routes.way(Position("Agent", "7")), Refusal)


def test_the_memory_of_ways_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_ROUTES", 4)
    connected = {PROXY}
    routes = Routes(MANAGER, connected.__contains__)
    gone = Position("Proxy", "2", "7")
    for leaf in (Position("Agent", "2"), Position("Agent", "3"), Position("Agent", "4")):
        assert routes.learn([leaf], gone) is None
    assert routes.learn([AGENT, PROXY], PROXY) is None, "those that nobody leads to any more made room"
    assert isinstance(routes.way(Position("Agent", "2")), Refusal)
    refusal = routes.learn(WORKERS + [Position("Worker", "1", "7")], PROXY)
    assert isinstance(refusal, Refusal) and refusal.code == AckCode.TOO_MANY_REGISTERED
    for number in range(100):
        routes.learn([AGENT], Position("Proxy", "1", str(number)))
    assert len(routes._below[AGENT]) == 4
