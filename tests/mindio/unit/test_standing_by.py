"""When a controller that stands by takes over, and when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from evertrain import aio
from evertrain.mindio import protocol as p
from evertrain.mindio.controller.standby import Standby
from evertrain.mindio.timing import Timing


class Link:
    def __init__(self, hello: p.Hello) -> None:
        self.hello = hello

    def close(self, why: str = "") -> None: ...


class Scene:
    """Four ranks on two nodes, whose controller does not answer; time stands still unless the test moves it."""

    def __init__(self, *, node_loss: str = "wait", peer_is_dead: bool = True, aside: list[int] | None = None) -> None:
        self.now = 100.0
        self.taken: list[str] = []
        self.standby = Standby(
            "127.0.0.1:2", "127.0.0.1:1", "t", timing=Timing.derive(1.0), world_size=4, nnodes=2, node_loss=node_loss,
            tls=None, client_tls=None, on_take_over=self.taken.append, clock=lambda: self.now,
        )  # fmt: skip
        self.standby.memo = p.Memo(epoch=0, started=True, aside=aside or [])
        self.standby._lost_at, self.standby._peer_is_dead = self.now, peer_is_dead
        self.links: list[Link] = []

    def come(self, *hellos: p.Hello) -> None:
        for hello in hellos:
            assert self.standby.refusal(hello) is None
            self.links.append(Link(hello))
            self.standby.introduced(self.links[-1], hello)

    def leave(self) -> None:
        while self.links:
            self.standby.lost(self.links.pop())

    def look(self, after: float = 0.0) -> bool:
        self.now += after
        self.standby._consider()
        return bool(self.taken)


def rank(number: int) -> p.Hello:
    return p.Hello(version=p.VERSION, token="t", role="rank", rank=number, place="inside", generation=1)


def agent(node: int) -> p.Hello:
    ranks = [2 * node, 2 * node + 1]
    living = {number: 0 for number in ranks}
    return p.Hello(
        version=p.VERSION, token="t", role="agent", node=node, world_size=4, ranks=ranks, incarnations=living
    )


def scene(play: Callable[[], None]) -> None:
    async def on_stage() -> None:
        play()

    aio.run(on_stage())


def test_when_all_are_there_nobody_waits() -> None:
    def play() -> None:
        here = Scene()
        here.come(agent(0), agent(1), *map(rank, range(4)))
        assert here.look()

    scene(play)


@pytest.mark.parametrize(
    ("node_loss", "peer_is_dead", "enough"),
    [("wait", False, True), ("shrink", True, True), ("shrink", False, False)],
)
def test_half_of_the_ranks(node_loss: str, peer_is_dead: bool, enough: bool) -> None:
    """With `shrink` the other half may train on with the old controller, unless that is known to be dead."""

    def play() -> None:
        here = Scene(node_loss=node_loss, peer_is_dead=peer_is_dead)
        here.come(agent(1), rank(2), rank(3))
        assert not here.look(), "the others may be on their way"
        assert here.look(after=60.0) == enough

    scene(play)


def test_less_than_half_is_never_enough() -> None:
    def play() -> None:
        here = Scene()
        here.come(rank(3))
        assert not here.look(after=60.0)

    scene(play)


def test_ranks_that_the_job_went_on_without_do_not_count() -> None:
    def play() -> None:
        here = Scene(node_loss="shrink", peer_is_dead=False, aside=[2, 3])
        here.come(agent(1), rank(2), rank(3))
        assert not here.look(after=60.0)
        here.come(agent(0), rank(0), rank(1))
        assert here.look()

    scene(play)


def test_a_rank_that_lives_and_does_not_come_is_waited_for_but_not_for_ever() -> None:
    """Those who wait here look elsewhere now and then, all at the same time."""

    def play() -> None:
        here = Scene()
        for _ in range(2):
            here.come(agent(0), agent(1), *map(rank, range(3)))
            assert not here.look() and not here.look(after=1.9)
            here.leave()
            assert not here.look(after=0.1)
        here.come(agent(0), agent(1), *map(rank, range(3)))
        assert here.look(after=0.1)

    scene(play)


def test_who_follows_a_controller_takes_over_nothing() -> None:
    def play() -> None:
        here = Scene()
        here.standby._link = object()
        refused = here.standby.refusal(rank(0))
        assert isinstance(refused, p.Refused) and refused.retry and refused.controllers == ["127.0.0.1:1"]
        assert not here.look(after=60.0)

    scene(play)


@pytest.mark.parametrize(
    "stranger",
    [rank(4), rank(-1), p.replace(agent(0), node=2), p.replace(agent(0), world_size=8), p.replace(rank(0), token="x")],
)
def test_who_has_no_place_in_the_job_is_not_counted(stranger: p.Hello) -> None:
    def play() -> None:
        assert isinstance(Scene().standby.refusal(stranger), str)

    scene(play)


def test_a_standby_that_does_not_know_where_the_controller_is_waits_to_be_told() -> None:
    async def play() -> None:
        here = Scene()
        here.standby._peer = ""
        here.standby.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert here.standby._chore is not None and not here.standby._chore.done()
        await here.standby.close()

    aio.run(play())
