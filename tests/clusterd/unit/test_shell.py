"""All of ClusterD in one, over an API server in memory: in which order things end, and what is said when they can't be
done."""

from __future__ import annotations

import asyncio

import pytest

from evertrain.clusterd import shell
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.ports import Unavailable
from evertrain.clusterd.shell import ClusterD
from evertrain.kube.port import ASCEND_JOB, Kind
from tests.kube.fake import FakeKube


async def test_it_stops_to_act_before_calls_under_way_are_given_their_time(monkeypatch: pytest.MonkeyPatch):
    acted: list[bool] = []

    class Server:
        def __init__(self, hub: object, security: Security) -> None:
            self.health = self

        def set(self, healthy: bool) -> None:
            pass

        async def start(self, *places: object) -> int:
            return 1

        async def close(self) -> None:
            acted.append(clusterd.hub.ready.is_set())
            with pytest.raises(Unavailable):
                await clusterd.hub.register("U")

    monkeypatch.setattr(shell, "Server", Server)
    clusterd = ClusterD(FakeKube(), [], Security(insecure=True))
    running = asyncio.ensure_future(clusterd.run())
    await asyncio.wait_for(clusterd.ready.wait(), 30)
    assert clusterd.hub.ready.is_set()
    running.cancel()
    await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 30)
    assert acted == [False]


async def test_timings_that_can_not_be_asked_for_now():
    kube = FakeKube()
    hub = ClusterD(kube, [], Security(insecure=True)).hub
    await kube.create(ASCEND_JOB, {"metadata": {"name": "train", "namespace": "default", "uid": "U"}})
    await hub.observer.jobs.refresh()

    def before(verb: str, kind: Kind, name: str) -> None:
        raise ConnectionError("no route")

    kube.before = before
    with pytest.raises(Unavailable):
        await hub.trace("default", "train")
    with pytest.raises(Unavailable):
        await hub.set_trace("default", "train", {})


async def test_services_of_jobs_that_are_gone_or_others_now_are_forgotten():
    kube = FakeKube()
    hub = ClusterD(kube, [], Security(insecure=True)).hub
    hub.observer.listen(hub._job_changed)
    hub._lead()
    metadata = {"name": "train", "namespace": "default", "labels": {"jobID": "a"}}
    uid = (await kube.create(ASCEND_JOB, {"metadata": metadata}))["metadata"]["uid"]

    async def look() -> None:
        await hub.observer.jobs.refresh()
        hub._look()

    await look()
    assert hub.jobs_of("a") == [uid]
    await kube.patch(ASCEND_JOB, "train", "default", {"metadata": {"labels": {"jobID": "b"}}})
    await look()
    assert (hub.jobs_of("a"), hub.jobs_of("b")) == ([], [uid])
    kube.remove(ASCEND_JOB, "train")
    await look()
    assert hub.jobs_of("b") == [] and not hub._by_service


async def test_a_job_of_a_service_is_told_of_those_in_its_namespace():
    kube = FakeKube()
    hub = ClusterD(kube, [], Security(insecure=True)).hub
    hub.observer.listen(hub._job_changed)
    uids = []
    for namespace in ("here", "there"):
        metadata = {"name": "chat", "namespace": namespace, "labels": {"jobID": "a"}}
        uids.append((await kube.create(ASCEND_JOB, {"metadata": metadata}))["metadata"]["uid"])
    await hub.observer.jobs.refresh()
    hub._lead()
    assert hub.jobs_of("a") == sorted(uids)
    assert [hub.jobs_of("a", uid) for uid in uids] == [[uid] for uid in uids]
