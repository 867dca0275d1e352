"""The actor of a job when the cluster does not do what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import pytest

from evertrain import aio
from evertrain.clusterd import actor as actors
from evertrain.clusterd.actor import Actor
from evertrain.clusterd.effects import Carrier
from evertrain.clusterd.keep import Keeper, Overtaken, Record, decode
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import (
    Effect,
    Event,
    Failed,
    IsolateNode,
    JobSeen,
    Note,
    ReplacePods,
    StopComplete,
    Subscribed,
    WriteReset,
)
from evertrain.clusterd.services.ports import Unavailable
from evertrain.kube.port import CONFIG_MAP, ApiError, Kind
from tests.kube.fake import FakeKube

JOB = Job("U", "train", "default")
REPLACE = ReplacePods(("uid",), "it is broken")


class Scripted:
    """A machine in the middle of a recovery that wants what the test says."""

    state, deadline, worth_keeping = "X", None, True

    def __init__(self, **answers: list[Effect]) -> None:
        self.heard: list[Event] = []
        self.answers = answers
        self.hears: Callable[[Event], object] = lambda event: None

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.heard.append(event)
        self.hears(event)
        return self.answers.get(type(event).__name__, [])

    def dump(self) -> bytes:
        return json.dumps({"state": self.state}).encode()

    def may_start_om(self) -> bool:
        return False


@contextlib.asynccontextmanager
async def running(actor: Actor) -> AsyncIterator[None]:
    task = asyncio.ensure_future(actor.run())
    try:
        async with aio.timeout(30):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def kept(kube: FakeKube) -> tuple[Effect, ...]:
    return decode(kube.find(CONFIG_MAP, "clusterd-recovery-U")).effects


async def test_pods_that_can_not_be_replaced_now_are_replaced_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(actors, "AGAIN", 0.01)
    kube, machine, tries = FakeKube(), Scripted(StopComplete=[REPLACE]), 0
    away = True

    async def carry(job: Job, effect: Effect) -> str:
        nonlocal tries
        tries += 1
        return "no route" if away else ""

    actor = Actor(JOB, machine, Keeper(kube, JOB), carry)
    async with running(actor):
        assert await actor.tell(StopComplete(0))
        while tries < 5:
            await asyncio.sleep(0.01)
        await actor.tell(Subscribed())
        assert Failed(REPLACE, "no route") in machine.heard and kept(kube) == (REPLACE,)
        away = False
        while kept(kube):
            await asyncio.sleep(0.01)
        before = tries
        await asyncio.sleep(0.1)
        assert tries == before


@pytest.mark.parametrize("effect", [WriteReset("restartAllProcess", recovery="R"), IsolateNode("node-1", "stress")])
async def test_what_nobody_would_ask_for_again_is_tried_until_it_is_done(
    monkeypatch: pytest.MonkeyPatch, effect: Effect
):
    monkeypatch.setattr(actors, "AGAIN", 0.01)
    kube, machine, away, done = FakeKube(), Scripted(StopComplete=[effect]), True, asyncio.Event()
    failed = asyncio.Event()

    async def carry(job: Job, each: Effect) -> str:
        if not away:
            done.set()
        return "no route" if away else ""

    machine.hears = lambda event: failed.set() if isinstance(event, Failed) else None
    actor = Actor(JOB, machine, Keeper(kube, JOB), carry)
    async with running(actor):
        assert await actor.tell(StopComplete(0))
        await failed.wait()
        await actor.tell(Subscribed())
        assert kept(kube) == (effect,)
        away = False
        await done.wait()
        while kept(kube):
            await asyncio.sleep(0.01)


async def test_a_restart_that_could_not_be_written_is_none_of_the_next_recovery(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(actors, "AGAIN", 0.01)
    restart, fault = WriteReset("restartAllProcess", recovery="R"), WriteReset("fault", (1,), recovery="S")
    kube, machine, done = FakeKube(), Scripted(StopComplete=[restart], Subscribed=[fault]), []
    failed, told = asyncio.Event(), asyncio.Event()

    async def carry(job: Job, each: Effect) -> str:
        if told.is_set():
            done.append(each)
        return "no route" if each == restart and not told.is_set() else ""

    machine.hears = lambda event: failed.set() if isinstance(event, Failed) else None
    actor = Actor(JOB, machine, Keeper(kube, JOB), carry)
    async with running(actor):
        assert await actor.tell(StopComplete(0))
        await failed.wait()
        told.set()
        await actor.tell(Subscribed())
        while kept(kube):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # several times as long as a try is put off
    assert restart not in done or done.index(restart) < done.index(fault)
    assert done[-1] == fault


async def test_what_was_left_and_can_not_be_done_is_told_the_machine_and_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(actors, "AGAIN", 0.01)
    kube, machine, answers = FakeKube(), Scripted(), ["no route", ""]
    replaced = asyncio.Event()

    async def carry(job: Job, effect: Effect) -> str:
        why = answers.pop(0)
        if not why:
            replaced.set()
        return why

    left = Record("U", b'{"state":"X"}', (REPLACE,))
    actor = Actor(JOB, machine, Keeper(kube, JOB), carry, left=left)
    actor.put(JobSeen(JOB))
    async with running(actor):
        await replaced.wait()
        while len(machine.heard) < 2:
            await asyncio.sleep(0.01)
    assert machine.heard == [JobSeen(JOB), Failed(REPLACE, "no route")]


async def test_a_defect_in_what_carries_out_costs_an_effect_and_no_more(caplog: pytest.LogCaptureFixture):
    class Broken:
        async def replace(self, job: Job, effect: ReplacePods) -> None:
            raise KeyError("a defect")

        def note(self, job: Job, note: Note, now: float) -> None:
            raise KeyError("another")

    carrier = Carrier(FakeKube(), Broken(), Broken())
    assert "a defect" in await carrier.carry(JOB, REPLACE)
    assert await carrier.carry(JOB, Note("phase", "x")) == ""
    assert "another" in caplog.text


async def test_what_is_too_large_to_be_kept_is_acted_on_nevertheless(caplog: pytest.LogCaptureFixture):
    kube, machine, done = FakeKube(), Scripted(StopComplete=[REPLACE]), asyncio.Event()

    def before(verb: str, kind: Kind, name: str) -> None:
        if kind == CONFIG_MAP:
            raise ApiError(422, "Invalid", "[]: Too long: must have at most 1048576 bytes")

    async def carry(job: Job, effect: Effect) -> str:
        done.set()
        return ""

    kube.before = before
    actor = Actor(JOB, machine, Keeper(kube, JOB), carry)
    async with running(actor):
        assert await actor.tell(StopComplete(0))
        await done.wait()
    assert "Too long" in caplog.text


async def test_who_waits_to_write_of_a_job_that_is_gone_gives_up():
    kube, machine, asked = FakeKube(), Scripted(), asyncio.Event()

    def before(verb: str, kind: Kind, name: str) -> None:
        asked.set()
        raise ApiError(500, "InternalError", "out of order")

    async def carry(job: Job, effect: Effect) -> str:
        return ""

    kube.before = before
    actor = Actor(JOB, machine, Keeper(kube, JOB), carry)
    task = asyncio.ensure_future(actor.run())
    actor.put(JobSeen(JOB))
    await asyncio.wait_for(asked.wait(), 30)
    actor.put(JobSeen(None))
    await asyncio.wait_for(task, 30)


async def test_who_is_not_heard_before_the_end_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(actors, "MOST_WAITING", 2)
    kube, machine, asked = FakeKube(), Scripted(), asyncio.Event()

    def before(verb: str, kind: Kind, name: str) -> None:
        asked.set()
        raise ConnectionError("no route")

    async def carry(job: Job, effect: Effect) -> str:
        return ""

    kube.before = before
    actor = Actor(JOB, machine, Keeper(kube, JOB), carry)
    task = asyncio.ensure_future(actor.run())
    actor.put(JobSeen(JOB))
    await asyncio.wait_for(asked.wait(), 30)
    waiting = [asyncio.ensure_future(actor.tell(StopComplete(number))) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):  # the API server is away, and nobody knows for how long
        await actor.tell(StopComplete(2))
    task.cancel()
    found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert [type(each) for each in found] == [Unavailable, Unavailable]


async def test_who_is_overtaken_writes_and_does_nothing_more():
    kube, done = FakeKube(), []

    async def carry(job: Job, effect: Effect) -> str:
        done.append(effect)
        return ""

    old = Actor(JOB, Scripted(StopComplete=[REPLACE]), Keeper(kube, JOB), carry)
    task = asyncio.ensure_future(old.run())
    assert await old.tell(Subscribed())
    # It is stopped for a while, and another one takes over.
    taken = Record("U", b'{"state":"Y"}')
    await Keeper(kube, JOB, exists=True).keep(taken)
    telling = asyncio.ensure_future(old.tell(StopComplete(0)))
    with pytest.raises(Overtaken):
        await asyncio.wait_for(task, 30)
    assert not done and decode(kube.find(CONFIG_MAP, "clusterd-recovery-U")) == taken and not telling.done()
    telling.cancel()


async def test_who_is_overtaken_removes_nothing_either():
    kube = FakeKube()
    old = Keeper(kube, JOB)
    await old.keep(Record("U", b'{"state":"X"}'))
    taken = Record("U", b'{"state":"Y"}')
    await Keeper(kube, JOB, exists=True).keep(taken)
    with pytest.raises(Overtaken):
        await asyncio.wait_for(old.remove(), 30)
    assert decode(kube.find(CONFIG_MAP, "clusterd-recovery-U")) == taken


async def test_what_others_have_only_labelled_is_removed():
    kube = FakeKube()
    keeper = Keeper(kube, JOB)
    await keeper.keep(Record("U", b'{"state":"X"}'))
    await kube.patch(CONFIG_MAP, "clusterd-recovery-U", "default", {"metadata": {"labels": {"theirs": "y"}}})
    await asyncio.wait_for(keeper.remove(), 30)
    assert not kube.items(CONFIG_MAP)


async def test_a_write_that_nobody_has_answered_and_labels_of_others_are_no_rival():
    kube = FakeKube()
    keeper = Keeper(kube, JOB)
    await keeper.keep(Record("U", b'{"state":"A"}'))

    def lost(verb: str, kind: Kind, name: str) -> None:
        kube.after = lambda verb, kind, name: None
        raise TimeoutError("no answer")

    kube.after = lost
    await asyncio.wait_for(keeper.keep(Record("U", b'{"state":"B"}')), 30)
    await kube.patch(CONFIG_MAP, "clusterd-recovery-U", "default", {"metadata": {"labels": {"their": "own"}}})
    await asyncio.wait_for(keeper.keep(Record("U", b'{"state":"C"}')), 30)
    assert decode(kube.find(CONFIG_MAP, "clusterd-recovery-U")).state == b'{"state":"C"}'
