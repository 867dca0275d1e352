"""Recoveries of many jobs kept together: nothing is acknowledged before it is there, and another ClusterD finds all."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

import pytest

from evertrain import aio
from evertrain.clusterd import keep
from evertrain.clusterd import pages as paging
from evertrain.clusterd.keep import Keeper, Overtaken, Record
from evertrain.clusterd.model import Job
from evertrain.clusterd.pages import Pages
from evertrain.kube.port import CONFIG_MAP, Kind, Object
from tests.kube.fake import FakeKube

JOBS = [Job(f"U{number}", f"train-{number}", "default") for number in range(20)]


def record(job: Job, state: str, more: str = "") -> Record:
    return Record(job.uid, json.dumps({"state": state, "more": more}).encode())


async def left(kube: FakeKube) -> dict[str, str]:
    """What a ClusterD that takes over finds."""
    pages = Pages(kube)
    found = await keep.kept(kube, pages, {})
    pages.close()  # it only looks
    assert len({each.job for each in found}) == len(found)
    return {each.job: "lost" if each.lost else json.loads(each.state)["state"] for each in found}


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody goes to pages, and leaves them soon."""
    monkeypatch.setattr(paging, "CROWD", 0)
    monkeypatch.setattr(paging, "LATER", 0.01)


@contextlib.contextmanager
def slow(kube: FakeKube) -> Iterator[list[str]]:
    """Counts writes."""
    asked: list[str] = []
    kube.before = lambda verb, kind, name: asked.append(verb)
    yield asked
    kube.before = lambda verb, kind, name: None


async def test_who_recovers_alone_has_a_config_map_of_its_own() -> None:
    kube = FakeKube()
    pages = Pages(kube)
    for job in JOBS[:3]:
        await Keeper(kube, job, pages=pages).keep(record(job, "A"))
    assert sorted(item["metadata"]["name"] for item in (await kube.list(CONFIG_MAP)).items) == [
        f"{keep.PREFIX}{job.uid}" for job in JOBS[:3]
    ]


async def test_what_comes_while_a_page_is_written_is_written_together(crowded: None) -> None:
    kube = FakeKube()
    pages = Pages(kube)
    keepers = [Keeper(kube, job, pages=pages) for job in JOBS]
    with slow(kube) as asked:
        await asyncio.gather(*(keeper.keep(record(job, "A")) for keeper, job in zip(keepers, JOBS, strict=True)))
        assert await left(kube) == {job.uid: "A" for job in JOBS}
        await asyncio.gather(*(keeper.keep(record(job, "B")) for keeper, job in zip(keepers, JOBS, strict=True)))
    assert await left(kube) == {job.uid: "B" for job in JOBS}
    assert asked.count("create") == 1 and asked.count("patch") <= 3, asked
    for keeper in keepers:
        await keeper.remove()
    async with aio.timeout(30):
        while (await kube.list(CONFIG_MAP)).items:
            await asyncio.sleep(0.01)
    await keepers[0].keep(record(JOBS[0], "C"))
    assert await left(kube) == {"U0": "C"}


async def test_nobody_is_told_that_it_is_kept_before_it_is(crowded: None) -> None:
    kube = FakeKube()
    pages = Pages(kube)
    keeper = Keeper(kube, JOBS[0], pages=pages)
    away, tried = True, asyncio.Event()

    def refusing(verb: str, kind: Kind, name: str) -> None:
        if away and verb in ("create", "patch"):
            tried.set()
            raise ConnectionError("no route")

    await keeper.keep(record(JOBS[0], "A"))
    kube.before = refusing
    keeping = [
        asyncio.ensure_future(keeper.keep(record(JOBS[0], "B"))),
        asyncio.ensure_future(Keeper(kube, JOBS[1], pages=pages).keep(record(JOBS[1], "X"))),
    ]
    await asyncio.wait_for(tried.wait(), 30)
    assert not any(each.done() for each in keeping)
    assert await left(kube) == {"U0": "A"}
    away = False
    await asyncio.wait_for(asyncio.gather(*keeping), 30)
    assert await left(kube) == {"U0": "B", "U1": "X"}


async def test_who_takes_over_goes_on_with_the_page_and_who_led_before_writes_no_more(crowded: None) -> None:
    kube = FakeKube()
    old = Pages(kube)
    keepers = [Keeper(kube, job, pages=old) for job in JOBS[:3]]
    for keeper, job in zip(keepers, JOBS[:3], strict=True):
        await keeper.keep(record(job, "A"))
    new = Pages(kube)
    assert len(await keep.kept(kube, new, {})) == 3
    await Keeper(kube, JOBS[0], exists=True, pages=new).keep(record(JOBS[0], "B"))
    assert len((await kube.list(CONFIG_MAP)).items) == 1
    for keeper, job in zip(keepers, JOBS[:3], strict=True):
        with pytest.raises(Overtaken):
            await asyncio.wait_for(keeper.keep(record(job, "C")), 30)
    assert await left(kube) == {"U0": "B", "U1": "A", "U2": "A"}
    # What somebody else has spoilt is not used for what begins now.
    await asyncio.wait_for(Keeper(kube, JOBS[5], pages=old).keep(record(JOBS[5], "A")), 30)
    assert (await left(kube))["U5"] == "A"


async def test_who_led_before_does_not_delete_a_page_of_the_one_after(
    crowded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "LATER", 0.0)
    kube = FakeKube()
    old, new = Pages(kube), Pages(kube)
    first = Keeper(kube, JOBS[0], pages=old)
    await first.keep(record(JOBS[0], "A"))
    assert len(await keep.kept(kube, new, {})) == 1
    await Keeper(kube, JOBS[0], exists=True, pages=new).keep(record(JOBS[0], "B"))
    page = old.page_of(JOBS[0].uid)
    assert page is not None
    await first.remove()
    async with aio.timeout(30):
        while not page.gone:
            await asyncio.sleep(0)
        with pytest.raises(Overtaken):
            await page.put(JOBS[0].uid, "C")
    assert await left(kube) == {"U0": "B"}


async def test_a_write_that_nobody_has_answered_labels_of_others_and_a_page_that_is_deleted(crowded: None) -> None:
    kube = FakeKube()
    pages = Pages(kube)
    keepers = [Keeper(kube, job, pages=pages) for job in JOBS[:2]]

    def lost(verb: str, kind: Kind, name: str) -> None:
        kube.after = lambda verb, kind, name: None
        raise TimeoutError("no answer")

    async with aio.timeout(30):
        for state in ("A", "B"):
            kube.after = lost
            await keepers[0].keep(record(JOBS[0], state))
            assert await left(kube) == {"U0": state}
        await keepers[1].keep(record(JOBS[1], "X"))
        (page,) = (await kube.list(CONFIG_MAP)).items
        name = page["metadata"]["name"]
        await kube.patch(CONFIG_MAP, name, "default", {"metadata": {"labels": {"their": "own"}}})
        await keepers[0].keep(record(JOBS[0], "C"))
        await kube.delete(CONFIG_MAP, name, "default")
        await keepers[0].keep(record(JOBS[0], "D"))
    assert await left(kube) == {"U0": "D", "U1": "X"}


async def test_a_record_that_grows_gets_a_config_map_of_its_own(crowded: None) -> None:
    kube = FakeKube()
    pages = Pages(kube)
    keeper, other = (Keeper(kube, job, pages=pages) for job in JOBS[:2])
    await keeper.keep(record(JOBS[0], "A"))
    await other.keep(record(JOBS[1], "X"))
    await keeper.keep(record(JOBS[0], "B", "x" * paging.GROWN))
    # Killed before it has left the page, it is there twice: the newer one counts.
    assert await left(kube) == {"U0": "B", "U1": "X"}
    own = kube.find(CONFIG_MAP, f"{keep.PREFIX}U0")
    assert own is not None
    await keeper.keep(record(JOBS[0], "C"))
    await other.keep(record(JOBS[1], "Y"))
    assert await left(kube) == {"U0": "C", "U1": "Y"}
    await keeper.remove()
    assert await left(kube) == {"U1": "Y"}


async def test_of_two_records_of_a_job_the_newer_one_counts_and_the_other_goes(crowded: None) -> None:
    kube = FakeKube()
    first, second = Pages(kube), Pages(kube)
    await Keeper(kube, JOBS[0], pages=first).keep(record(JOBS[0], "A"))
    await Keeper(kube, JOBS[1], pages=first).keep(record(JOBS[1], "X"))
    await Keeper(kube, JOBS[0], pages=second).keep(record(JOBS[0], "B"))
    taken = Pages(kube)
    found = {each.job: json.loads(each.state)["state"] for each in await keep.kept(kube, taken, {})}
    assert found == {"U0": "B", "U1": "X"}

    async def places() -> list[str]:
        items: list[Object] = (await kube.list(CONFIG_MAP)).items
        return sorted(job for item in items for job in item["data"])

    async with aio.timeout(30):
        while await places() != ["U0", "U1"]:
            await asyncio.sleep(0.01)
    assert await left(kube) == {"U0": "B", "U1": "X"}


async def test_what_can_not_be_read_costs_nobody_else(caplog: pytest.LogCaptureFixture, crowded: None) -> None:
    kube = FakeKube()
    await Keeper(kube, JOBS[0], pages=Pages(kube)).keep(record(JOBS[0], "A"))
    (page,) = (await kube.list(CONFIG_MAP)).items
    await kube.patch(CONFIG_MAP, page["metadata"]["name"], "default", {"data": {"U1": "{"}})
    assert await left(kube) == {"U0": "A", "U1": "lost"}
    assert "(U1) can't be read" in caplog.text
