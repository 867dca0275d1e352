"""What ClusterD writes: the state of recoveries, reset files, ConfigMaps for others."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest

from evertrain import aio
from evertrain.clusterd import keep, reset
from evertrain.clusterd.actor import Actor
from evertrain.clusterd.keep import Keeper, Record, Unreadable, decode
from evertrain.clusterd.model import Job
from evertrain.clusterd.pages import Pages
from evertrain.clusterd.publish import Publisher, config_map
from evertrain.clusterd.recover.events import (
    Answer,
    Effect,
    Event,
    IsolateNode,
    JobSeen,
    Note,
    PatchGroup,
    PatchPod,
    ProcessFault,
    ReplacePods,
    Signal,
    StopComplete,
    Subscribed,
    SwitchNics,
    WriteReset,
)
from evertrain.kube.port import CONFIG_MAP, Object
from tests.kube.fake import FakeKube

JOB = Job("U", "train", "default")


# The state of a recovery.


def test_a_record_comes_back_as_it_was():
    effects = (
        WriteReset("fault", (1, 2), True),
        PatchGroup({"a": None}, {"b": "c"}),
        PatchPod("pod", "uid", {"x": "y"}),
        ReplacePods(("u",), "why", whole_job=True),
        IsolateNode("node-1", "why"),
    )
    record = Record("U", b'{"state":"X","clock":1.5}', effects, "nic", ("so far",))
    item = keep.config_map(JOB, record.encode())
    assert decode(item) == record
    assert item["metadata"]["name"] == "clusterd-recovery-U"
    assert item["metadata"]["ownerReferences"][0]["uid"] == "U"


def test_what_is_said_again_anyway_is_not_kept():
    record = Record("U", b"{}", (Signal("stopTrain", "1"), Note("phase", "x"), Answer("nic", "done")))
    assert decode(keep.config_map(JOB, record.encode())).effects == ()


def test_a_large_state_is_compressed():
    state = json.dumps({"faults": {str(rank): "1" for rank in range(100_000)}}).encode()
    item = keep.config_map(JOB, Record("U", state).encode())
    assert len(json.dumps(item)) < 900 * 1024 and "data" not in item
    assert json.loads(decode(item).state) == json.loads(state)


@pytest.mark.parametrize(
    "item",
    [
        {},
        {"data": {}},
        {"data": {"state.json": "{"}},
        {"data": {"state.json": '{"version":2,"job":"U","state":{}}'}},
        {"data": {"state.json": '{"version":1,"job":"U","state":{},"effects":[["WriteReset",{}]]}'}},
        {"binaryData": {"state.z": "not base64!"}},
        {"binaryData": {"state.z": "AAAA"}},
        {"data": {"state.json": "[" * 100_000}},
        {"data": {"state.json": '{"version":1,"job":"U","state":{},"effects":' + "[" * 100_000}},
    ],
)
def test_what_can_not_be_read_is_said(item: Object):
    with pytest.raises(Unreadable):
        decode(item)


async def test_what_can_not_be_read_is_found_nevertheless():
    kube = FakeKube()
    pages = Pages(kube)
    text = '{"version":2,"job":"U","state":{"state":"X"}}'
    for name, content in (("clusterd-recovery-U", text), ("clusterd-recovery-V", "{"), ("clusterd-recovery-W", "")):
        item = keep.config_map(JOB, content.encode())
        await kube.create(CONFIG_MAP, item | {"metadata": item["metadata"] | {"name": name}})
    page = keep.config_map(JOB, b"")["metadata"] | {"name": "clusterd-recoveries-1"}
    newer = Record("W", b'{"state":"Y"}')
    await kube.create(CONFIG_MAP, {"metadata": page, "data": {"P": "{", "W": newer.encode(7).decode()}})
    found = {each.job: each for each in await keep.kept(kube, pages, {})}
    assert found.pop("W") == newer
    assert {job: each.state for job, each in found.items()} == {"U": b'{"state":"X"}', "V": b"", "P": b""}
    assert "version 2" in found["U"].lost and found["V"].lost and found["P"].lost
    assert pages.page_of("P") is not None and pages.page_of("V") is None


async def test_what_stands_in_the_namespace_of_others_is_passed_over(caplog: pytest.LogCaptureFixture):
    kube = FakeKube()
    mine, forged = Record("U", b'{"state":"X"}'), Record("U", b'{"state":"Y"}', (IsolateNode("node-1", "why"),))
    await kube.create(CONFIG_MAP, keep.config_map(JOB, mine.encode(1)))
    await kube.create(CONFIG_MAP, keep.config_map(Job("U", "train", "mallory"), forged.encode(2)))
    page = {"name": "clusterd-recoveries-1", "namespace": "mallory", "labels": {keep.LABEL: "true"}}
    await kube.create(CONFIG_MAP, {"metadata": page, "data": {"U": forged.encode(3).decode()}})
    pages = Pages(kube)
    assert await keep.kept(kube, pages, {"U": JOB}) == [mine]
    assert pages.page_of("U") is None and "not in the namespace of job U" in caplog.text
    assert len(kube.items(CONFIG_MAP)) == 3  # nor is it ours to delete


async def test_that_time_goes_on_is_no_reason_to_write():
    kube = FakeKube()
    keeper = Keeper(kube, JOB)
    await keeper.keep(Record("U", b'{"state":"A","clock":1}'))
    first = await kube.get(CONFIG_MAP, "clusterd-recovery-U", "default")
    await keeper.keep(Record("U", b'{"state":"A","clock":2}'))
    assert await kube.get(CONFIG_MAP, "clusterd-recovery-U", "default") == first
    await keeper.keep(Record("U", b'{"state":"B","clock":3}'))
    assert json.loads(decode(await kube.get(CONFIG_MAP, "clusterd-recovery-U", "default")).state)["state"] == "B"
    await keeper.remove()
    assert (await kube.list(CONFIG_MAP)).items == []
    await keeper.keep(Record("U", b'{"state":"C"}'))
    assert len((await kube.list(CONFIG_MAP)).items) == 1


# The reset file.

BEFORE = {
    "reset.json": '{"RankList":[{"RankId":7,"Status":"fault","Policy":""}],"UpdateTime":1,"RetryTime":4,'
    '"FaultFlushing":true,"GracefulExit":1,"RestartFaultProcess":true}',
    "restartType": "podReschedule",
}


@pytest.mark.parametrize(
    "order, expected",
    [
        (
            WriteReset("clear"),
            '{"RankList":[],"UpdateTime":9,"RetryTime":4,"FaultFlushing":false,"GracefulExit":0,'
            '"RestartFaultProcess":true}',
        ),
        (
            WriteReset("notifyFaultFlushing"),
            '{"RankList":[],"UpdateTime":9,"RetryTime":4,"FaultFlushing":true,"GracefulExit":0,'
            '"RestartFaultProcess":true}',
        ),
        (
            WriteReset("restartAllProcess"),
            '{"RankList":[],"UpdateTime":9,"RetryTime":5,"FaultFlushing":true,"GracefulExit":0,'
            '"RestartFaultProcess":true}',
        ),
        (
            WriteReset("fault", (3,)),
            '{"RankList":[{"RankId":3,"LogicId":0,"Status":"fault","Policy":"","InitialPolicy":"","ErrorCode":null,'
            '"ErrorCodeHex":""}],"UpdateTime":9,"RetryTime":4,"FaultFlushing":false,"GracefulExit":0,'
            '"RestartFaultProcess":false}',
        ),
    ],
)
def test_the_reset_file_is_the_originals(order: WriteReset, expected: str):
    found = reset.renewed(BEFORE, order, 9)
    assert found["reset.json"] == expected
    assert found["checkCode"] == hashlib.sha256(expected.encode()).hexdigest()
    assert found["restartType"] == "podReschedule"


def test_processes_are_started_again_once_by_each_recovery():
    data, counts = dict(BEFORE), []
    for recovery in ("a", "a", "b", "", ""):
        data = reset.renewed(data, WriteReset("restartAllProcess", recovery=recovery), 9)
        data = reset.renewed(data, WriteReset("clear", recovery=recovery), 9)
        counts.append(json.loads(data["reset.json"])["RetryTime"])
    assert counts == [5, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "data, order",
    [
        ({}, WriteReset("clear")),
        ({"reset.json": "nonsense"}, WriteReset("clear")),
        ({"reset.json": "[]"}, WriteReset("clear")),
        ({"reset.json": '{"RankList":[{"Policy":"reset"}]}'}, WriteReset("clear")),
        ({"reset.json": "{}"}, WriteReset("dance")),
    ],
)
def test_what_must_not_be_written_is_refused(data: dict[str, str], order: WriteReset):
    with pytest.raises(reset.Refused):
        reset.renewed(data, order, 9)


# ConfigMaps for others.


async def test_config_maps_are_written_when_they_change():
    kube = FakeKube()
    publisher = Publisher(kube, rate=1000)
    running = asyncio.ensure_future(publisher.run())
    try:

        async def versions() -> dict[str, tuple[str, str]]:
            return {
                item["metadata"]["name"]: (item["data"]["x"], item["metadata"]["resourceVersion"])
                for item in (await kube.list(CONFIG_MAP)).items
            }

        async def until(wanted: dict[str, str]) -> None:
            async with aio.timeout(30):
                while {name: value for name, (value, _) in (await versions()).items()} != wanted:
                    await asyncio.sleep(0.01)

        theirs = {"metadata": {"name": "a", "namespace": "n", "labels": {"their": "own"}}, "data": {"x": "0", "y": "1"}}
        await kube.create(CONFIG_MAP, theirs)
        publisher.put(config_map("n", "a", {"x": "1"}, {"l": "1"}))
        publisher.put(config_map("n", "b", {"x": "1"}))
        await until({"a": "1", "b": "1"})
        changed = await kube.get(CONFIG_MAP, "a", "n")
        assert changed["metadata"]["labels"] == {"their": "own", "l": "1"} and changed["data"] == {"x": "1"}
        before = await versions()
        publisher.put(config_map("n", "a", {"x": "1"}, {"l": "1"}))
        publisher.put(config_map("n", "b", {"x": "2"}))
        publisher.put(config_map("n", "b", {"x": "3"}))
        await until({"a": "1", "b": "3"})
        assert (await versions())["a"] == before["a"]
        publisher.remove("n", "a")
        await until({"b": "3"})
        publisher.put(config_map("n", "a", {"x": "1"}, {"l": "1"}))
        await until({"a": "1", "b": "3"})
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# The actor.


class Scripted:
    """A machine that wants what the test says."""

    def __init__(self) -> None:
        self.state, self.deadline, self.worth_keeping, self.idle = "INIT", None, False, True
        self.heard: list[Event] = []
        self.answers: dict[type, list[Effect]] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.heard.append(event)
        if isinstance(event, ProcessFault):
            raise RuntimeError("a defect")
        return self.answers.get(type(event), [])

    def dump(self) -> bytes:
        return json.dumps({"state": self.state}).encode()

    def may_start_om(self) -> bool:
        return self.idle


async def test_effects_are_carried_out_in_order_after_the_state_is_kept():
    kube, machine, done = FakeKube(), Scripted(), []

    async def carry(job: Job, effect: Effect) -> str:
        done.append(effect)
        if isinstance(effect, WriteReset):
            kept = decode(await kube.get(CONFIG_MAP, "clusterd-recovery-U", "default"))
            assert effect in kept.effects
        return "no way" if isinstance(effect, PatchGroup) else ""

    actor = Actor(JOB, machine, Keeper(kube, JOB), carry)
    machine.idle, machine.worth_keeping, machine.state = False, True, "X"
    write, group, signal = WriteReset("clear"), PatchGroup({"a": "b"}), Signal("stopTrain", "uuid")
    machine.answers[StopComplete] = [write, group, signal]
    running = asyncio.ensure_future(actor.run())
    line = await actor.signals()
    assert await actor.tell(StopComplete(0))
    assert await asyncio.wait_for(anext(line), 30) == signal
    assert await actor.tell(Subscribed())
    assert done == [write, group]
    failed = next(event for event in machine.heard if type(event).__name__ == "Failed")
    assert (failed.effect, failed.why) == (group, "no way")
    async with aio.timeout(30):  # done is done, as who takes over must know sooner or later
        while decode(await kube.get(CONFIG_MAP, "clusterd-recovery-U", "default")).effects:
            await asyncio.sleep(0.01)
    # A defect in the machine costs an event, not the job.
    assert await actor.tell(ProcessFault({1: "0"}))
    # Of a state that has changed while nobody looked only the newest counts.
    machine.heard.clear()
    for name in ("a", "b", "c"):
        actor.put(JobSeen(Job("U", name, "default")))
    assert await actor.tell(Subscribed())
    assert [event.job.name for event in machine.heard if isinstance(event, JobSeen) and event.job] == ["c"]
    actor.put(JobSeen(None))
    await asyncio.wait_for(running, 30)
    assert (await kube.list(CONFIG_MAP)).items == [] and not await actor.tell(Subscribed())
    with pytest.raises(StopAsyncIteration):
        await anext(line)


async def test_an_order_is_taken_only_by_one_that_has_nothing_to_do():
    kube, machine, over = FakeKube(), Scripted(), []

    async def carry(job: Job, effect: Effect) -> str:
        return ""

    actor = Actor(JOB, machine, Keeper(kube, JOB), carry, over=over.append)
    running = asyncio.ensure_future(actor.run())
    try:
        machine.idle = False
        assert not await actor.tell(SwitchNics({0: True}), guarded=True)
        assert actor.answers("nic") is None and machine.heard == []
        machine.idle = True

        def begins(event: Event, now: float) -> list[Effect]:
            machine.idle = isinstance(event, StopComplete)
            return [Answer("nic", "switch nic finish")] if machine.idle else []

        machine.handle = begins  # type: ignore[method-assign]
        assert await actor.tell(SwitchNics({0: True}), guarded=True)
        answers = actor.answers("nic")
        assert answers is not None and actor.answers("stress") is None
        assert await actor.tell(StopComplete(0))
        assert [text async for text in answers] == ["switch nic finish"]
        assert actor.answers("nic") is None and over == [JOB]

        assert await actor.tell(SwitchNics({0: True}), guarded=True)
        assert await actor.tell(StopComplete(0))
        assert actor.answers("stress") is None
        late = actor.answers("nic")
        assert late is not None and [text async for text in late] == ["switch nic finish"], "it was over too early"
        assert actor.answers("nic") is None
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
