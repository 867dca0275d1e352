"""The ConfigMaps job-summary-* of jobs that become smaller, and of jobs that go."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from evertrain.clusterd.jobs import summary
from evertrain.clusterd.model import Device, Job, Pod
from evertrain.clusterd.publish import Publisher
from evertrain.clusterd.summaries import KEPT, Summaries
from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, NODE
from tests import virtual_time
from tests.kube.fake import FakeKube


def test_parts_that_are_not_needed_any_more_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "LIMIT", 4096 + 400)  # a server or two

    async def test() -> None:
        kube = FakeKube()
        publisher = Publisher(kube)
        summaries = Summaries(publisher, Cache(kube, NODE), asyncio.get_running_loop().time)

        def there() -> list[str]:
            names = [item["metadata"]["name"] for item in kube.items(CONFIG_MAP)]
            return sorted(name for name in names if name.startswith(summary.PREFIX))

        pods = {rank: Pod(rank, f"u{rank}", f"p{rank}", node=f"n{rank}", devices=(Device("0"),)) for rank in range(4)}
        large = Job("U", "train", "default", pods=pods)
        small = replace(large, pods={0: pods[0]})
        running = [asyncio.ensure_future(publisher.run()), asyncio.ensure_future(summaries.run())]
        try:
            summaries.update(large)
            await asyncio.sleep(10)
            assert len(there()) > 1
            summaries.update(small)
            await asyncio.sleep(10)
            assert there() == ["job-summary-train"]
            summaries.gone(small)
            await asyncio.sleep(KEPT - 1)
            assert there() == ["job-summary-train"]
            await asyncio.sleep(11)
            assert there() == []
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    virtual_time.run(test())


@pytest.mark.parametrize("after", [10, 0, None])
def test_a_job_does_not_keep_parts_of_an_earlier_one_of_its_name(
    monkeypatch: pytest.MonkeyPatch, after: int | None
) -> None:
    """`after`: so many seconds after that one has gone it is heard of; None: before."""
    monkeypatch.setattr(summary, "LIMIT", 4096 + 400)  # a server or two

    async def test() -> None:
        kube = FakeKube()
        publisher = Publisher(kube)
        summaries = Summaries(publisher, Cache(kube, NODE), asyncio.get_running_loop().time)
        pods = {rank: Pod(rank, f"u{rank}", f"p{rank}", node=f"n{rank}", devices=(Device("0"),)) for rank in range(4)}
        large = Job("U", "train", "default", pods=pods)
        running = [asyncio.ensure_future(publisher.run()), asyncio.ensure_future(summaries.run())]
        try:
            summaries.update(large)
            await asyncio.sleep(10)
            small = replace(large, uid="V", pods={0: pods[0]})
            if after is None:
                summaries.update(small)
                summaries.gone(large)
            else:
                summaries.gone(large)
                await asyncio.sleep(after)
                assert len(kube.items(CONFIG_MAP)) > 2
                summaries.update(small)
            await asyncio.sleep(2 * KEPT)
            names = {item["metadata"]["name"] for item in kube.items(CONFIG_MAP)}
            assert names == {"job-summary-train", "current-job-statistic"}
            assert kube.find(CONFIG_MAP, "job-summary-train")["data"]["job_id"] == "V"
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    virtual_time.run(test())


def test_a_job_that_can_not_be_told_of_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = summary.Summary.config_maps

    def config_maps(self: summary.Summary) -> object:
        if self.job.name == "poisoned":
            raise ValueError("no such thing")
        return found(self)

    monkeypatch.setattr(summary.Summary, "config_maps", config_maps)

    async def test() -> None:
        kube = FakeKube()
        publisher = Publisher(kube)
        summaries = Summaries(publisher, Cache(kube, NODE), asyncio.get_running_loop().time)
        running = [asyncio.ensure_future(publisher.run()), asyncio.ensure_future(summaries.run())]
        try:
            summaries.update(Job("P", "poisoned", "default"))
            summaries.update(Job("U", "train", "default"))
            await asyncio.sleep(10)
            assert kube.find(CONFIG_MAP, "job-summary-train")
            assert "job P can't be summarised" in caplog.text
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    virtual_time.run(test())
