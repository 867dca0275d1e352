"""What is written beside a recovery: in order for each object, only the newest, and nobody waits for it."""

from __future__ import annotations

import asyncio

import pytest

from evertrain import aio
from evertrain.clusterd.actor import Actor
from evertrain.clusterd.keep import Keeper, decode
from evertrain.clusterd.lanes import Lanes, lane_of, merged
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import (
    Effect,
    Event,
    PatchGroup,
    PatchPod,
    ReplacePods,
    Signal,
    Status,
    StopComplete,
    WriteReset,
)
from evertrain.kube.port import CONFIG_MAP
from tests.kube.fake import FakeKube

JOB = Job("U", "train", "default")
CLEAR, FLUSH, RESTART = WriteReset("clear"), WriteReset("notifyFaultFlushing"), WriteReset("restartAllProcess")
FIRST, SECOND = WriteReset("fault", (1,)), WriteReset("fault", (2,), restart_fault_process=True)


@pytest.mark.parametrize(
    "orders, left",
    [
        ([FLUSH, CLEAR], [CLEAR]),
        ([CLEAR, FLUSH, FIRST], [FIRST]),
        ([FIRST, CLEAR], [FIRST, CLEAR]),
        ([FLUSH, FIRST, CLEAR, FLUSH, SECOND, CLEAR], [SECOND, CLEAR]),
        ([FLUSH, RESTART, CLEAR], [RESTART, CLEAR]),
        ([RESTART, FIRST, RESTART], [RESTART, FIRST, RESTART]),
        ([FIRST, CLEAR, FLUSH, CLEAR], [FIRST, CLEAR]),
    ],
)
def test_of_a_reset_file_what_nobody_has_to_see_any_more_is_left_out(orders: list[Effect], left: list[Effect]) -> None:
    waiting: list[Effect] = []
    for order in orders:
        waiting = merged(waiting, order)
    assert waiting == left


def test_labels_and_annotations_become_one_change() -> None:
    pod = merged([PatchPod("a", "1", {"x": "1", "y": "1"})], PatchPod("a", "1", {"x": None}))
    assert pod == [PatchPod("a", "1", {"x": None, "y": "1"})]
    group = merged([PatchGroup(annotations={"x": "1"})], PatchGroup(annotations={"y": None}))
    assert group == [PatchGroup(annotations={"x": "1", "y": None})]
    results = [PatchGroup(annotations={"result": "retry-failed"}), PatchGroup(annotations={"result": "exit-success"})]
    assert merged(results[:1], results[1]) == results, "each is said"


def test_what_others_act_on_is_not_done_beside() -> None:
    for effect in (ReplacePods(("u",), "why"), PatchGroup({"a": "b"}), PatchPod("a", "1", annotations={"x": "1"})):
        assert lane_of(effect) is None


async def test_one_after_the_other_for_each_object_and_not_more_than_there_are_places() -> None:
    done: list[Effect] = []
    most = now = 0
    idle = asyncio.Event()

    async def do(effect: Effect) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        done.append(effect)

    lanes = Lanes(do, asyncio.Semaphore(2), idle.set)
    pods = [PatchPod(f"pod-{number}", f"{number}", {"x": "1"}) for number in range(5)]
    for effect in (*pods, FIRST, CLEAR):
        assert lanes.put(effect)
    assert not lanes.put(Signal("stopTrain", "1"))
    assert lanes.undone == [*pods, FIRST, CLEAR]
    async with aio.timeout(30):
        await idle.wait()
    assert done.index(FIRST) < done.index(CLEAR)
    assert most == 2 and len(done) == 7 and not lanes and lanes.undone == []


async def test_what_a_signal_waits_for_overtakes_what_only_informs() -> None:
    """As many jobs as there may be: none of their labels has to be written before."""
    done: list[Effect] = []
    allowed, idle = asyncio.Event(), asyncio.Event()

    async def do(effect: Effect) -> None:
        if isinstance(effect, PatchPod | PatchGroup):
            await allowed.wait()
        done.append(effect)

    places = asyncio.Semaphore(1)
    others, ours = Lanes(do, places, lambda: None), Lanes(do, places, idle.set)
    label, annotation = PatchPod("a", "1", {"x": "1"}), PatchGroup(annotations={"x": "1"})
    others.put(label)
    await asyncio.sleep(0)
    for effect in (FIRST, CLEAR, annotation):
        ours.put(effect)
    async with aio.timeout(30):
        await ours.told("reset")
        assert done == [FIRST, CLEAR] and ours.undone == [annotation]
        allowed.set()
        await ours.told("reset", "group")
        await idle.wait()
    assert done[2:] in ([label, annotation], [annotation, label]) and not ours


@pytest.mark.parametrize("at_once", [False, True])
async def test_who_is_told_waits_for_what_is_being_written(at_once: bool) -> None:
    done: list[Effect] = []
    allowed, begun = asyncio.Event(), asyncio.Event()

    async def do(effect: Effect) -> None:
        begun.set()
        await allowed.wait()
        done.append(effect)

    lanes = Lanes(do, asyncio.Semaphore(1), lambda: None)

    async def hurried() -> None:
        lanes.put(FIRST)
        await lanes.told("reset")

    if at_once:  # before the lane has begun by itself
        telling = asyncio.ensure_future(hurried())
        await begun.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert lanes.undone == [FIRST], "it is not done yet"
        lanes.put(CLEAR)
    else:
        lanes.put(FIRST)
        await begun.wait()
        lanes.put(CLEAR)
        telling = asyncio.ensure_future(lanes.told("reset"))
    await asyncio.sleep(0)
    assert not telling.done() and lanes.undone == [FIRST, CLEAR]
    allowed.set()
    async with aio.timeout(30):
        await telling
    assert done == [FIRST, CLEAR]


class Told:
    """A machine that wants what the test says, and is over when it has heard the result."""

    state, deadline, worth_keeping = "X", None, False

    def __init__(self, **answers: list[Effect]) -> None:
        self.answers, self.over = answers, False

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.over = isinstance(event, Status)
        return self.answers.get(type(event).__name__, [])

    def dump(self) -> bytes:
        return b'{"state":"X"}'

    def may_start_om(self) -> bool:
        return self.over


async def test_a_signal_does_not_wait_for_the_reset_file_but_what_is_kept_does() -> None:
    kube, allowed, done = FakeKube(), asyncio.Event(), []

    async def carry(job: Job, effect: Effect) -> str:
        await allowed.wait()
        done.append(effect)
        return ""

    signal = Signal("changeStrategy", "1")
    actor = Actor(JOB, Told(StopComplete=[FIRST, signal], Status=[CLEAR]), Keeper(kube, JOB), carry)
    running = asyncio.ensure_future(actor.run())
    try:
        async with aio.timeout(30):
            line = await actor.signals()
            assert await actor.tell(StopComplete(0))
            assert await anext(line) == signal and done == []
            assert await actor.tell(Status(0, "recover"))
            assert decode(kube.find(CONFIG_MAP, "clusterd-recovery-U")).effects == (FIRST, CLEAR)
            allowed.set()
            while (await kube.list(CONFIG_MAP)).items:
                await asyncio.sleep(0.01)
        assert done == [FIRST, CLEAR]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_pods_are_replaced_when_the_reset_file_is_written() -> None:
    allowed, done = asyncio.Event(), []

    async def carry(job: Job, effect: Effect) -> str:
        if effect == FIRST:
            await allowed.wait()
        done.append(effect)
        return ""

    away, signal = ReplacePods(("u",), "why"), Signal("globalFault", "1")
    actor = Actor(JOB, Told(StopComplete=[FIRST, away, signal]), Keeper(FakeKube(), JOB), carry)
    running = asyncio.ensure_future(actor.run())
    try:
        async with aio.timeout(30):
            line = await actor.signals()
            assert await actor.tell(StopComplete(0))
            assert done == []
            allowed.set()
            assert await anext(line) == signal
        assert done == [FIRST, away]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
