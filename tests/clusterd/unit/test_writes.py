"""How much ClusterD writes: reset files are not read before each write, and the timeline takes its time."""

from __future__ import annotations

import json

import pytest

from evertrain.clusterd.effects import Carrier
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import Note, WriteReset
from evertrain.clusterd.timeline.pace import Pace
from evertrain.kube.port import CONFIG_MAP, Kind, NotFound
from tests.kube.fake import FakeKube

JOB = Job("U", "train", "default")
NAME = "reset-config-train"


class Nobody:
    async def replace(self, job: Job, effect: object) -> None: ...

    def note(self, job: Job, note: Note, now: float) -> None: ...


class Counting(FakeKube):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.before = self._note_down

    def _note_down(self, verb: str, kind: Kind, name: str) -> None:
        if name == NAME:
            self.asked.append(verb)


async def made() -> tuple[Counting, Carrier]:
    kube = Counting()
    data = {"reset.json": json.dumps({"RankList": [], "RetryTime": 3}), "mine": "x"}
    await kube.create(CONFIG_MAP, {"metadata": {"name": NAME, "namespace": "default"}, "data": data})
    kube.asked.clear()
    return kube, Carrier(kube, Nobody(), Nobody())


async def ranks(kube: Counting) -> list[int]:
    found = kube.find(CONFIG_MAP, NAME)
    assert found["data"]["mine"] == "x"
    return [rank["RankId"] for rank in json.loads(found["data"]["reset.json"])["RankList"]]


async def test_a_reset_file_is_read_once() -> None:
    kube, carrier = await made()
    for order in (WriteReset("notifyFaultFlushing"), WriteReset("fault", (1, 2)), WriteReset("clear")):
        assert await carrier.carry(JOB, order) == ""
        assert await ranks(kube) == list(order.ranks)
    assert kube.asked == ["get", "replace", "replace", "replace"]


async def test_what_is_clear_is_not_cleared_again() -> None:
    kube, carrier = await made()
    for order in (WriteReset("fault", (1,)), WriteReset("clear"), WriteReset("clear")):
        assert await carrier.carry(JOB, order) == ""
    assert kube.asked == ["get", "replace", "replace"] and await ranks(kube) == []


async def test_who_has_written_to_it_meanwhile_is_not_overwritten() -> None:
    kube, carrier = await made()
    await carrier.carry(JOB, WriteReset("clear"))
    await kube.patch(CONFIG_MAP, NAME, "default", {"data": {"theirs": "y"}})
    kube.asked.clear()
    assert await carrier.carry(JOB, WriteReset("fault", (7,))) == ""
    assert kube.asked == ["replace", "get", "replace"]
    assert await ranks(kube) == [7] and kube.find(CONFIG_MAP, NAME)["data"]["theirs"] == "y"


async def test_a_reset_file_that_is_gone_or_that_a_device_plugin_uses() -> None:
    kube, carrier = await made()
    await carrier.carry(JOB, WriteReset("clear"))
    busy = {"reset.json": json.dumps({"RankList": [{"RankId": 1, "Policy": "reset"}]})}
    await kube.patch(CONFIG_MAP, NAME, "default", {"data": busy})
    assert "hotReset" in await carrier.carry(JOB, WriteReset("fault", (7,)))
    await kube.delete(CONFIG_MAP, NAME, "default")
    assert await carrier.carry(JOB, WriteReset("fault", (7,))) == ""
    with pytest.raises(NotFound):
        await kube.get(CONFIG_MAP, NAME, "default")


def test_some_at_once_and_then_one_after_the_other() -> None:
    pace = Pace(10.0, 3)
    assert [round(pace.reserve(5.0), 6) for _ in range(6)] == [0.0, 0.0, 0.0, 0.1, 0.2, 0.3]
    assert round(pace.reserve(5.25), 6) == 0.15
    assert [round(pace.reserve(100.0), 6) for _ in range(4)] == [0.0, 0.0, 0.0, 0.1], "a quiet time is not saved up"
