"""Whose the switches of timings are: of the job that they were set for, or of who has made the ConfigMap."""

from __future__ import annotations

from evertrain.clusterd.traces import Traces
from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, Object
from tests.kube.fake import FakeKube


def owners(item: Object) -> list[str]:
    return [each["uid"] for each in item["metadata"].get("ownerReferences", ())]


async def test_switches_belong_to_the_job_that_has_the_name_now() -> None:
    kube = FakeKube()
    traces = Traces(kube, Cache(kube, CONFIG_MAP))
    for uid, value in (("U", "on"), ("V", "off")):
        await traces.set("default", "train", uid, {"Step": value})
        item = kube.find(CONFIG_MAP, "data-trace-train")
        assert owners(item) == [uid] and await traces.get("default", "train") == {"Step": value}


async def test_a_config_map_that_somebody_has_made_stays_theirs() -> None:
    kube = FakeKube()
    metadata = {"name": "data-trace-train", "namespace": "default", "labels": {"reset": "true"}}
    await kube.create(CONFIG_MAP, {"metadata": metadata, "data": {}})
    await Traces(kube, Cache(kube, CONFIG_MAP)).set("default", "train", "U", {"Step": "on"})
    assert owners(kube.find(CONFIG_MAP, "data-trace-train")) == []
