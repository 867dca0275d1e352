"""What parts do for the sake of an installation: health, who leads, and a cluster without Volcano."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from evertrain import aio
from evertrain.acjob.podgroup import NO_GROUPS
from evertrain.clusterd.leading import LEADS, show_leader
from evertrain.kube import daemon
from evertrain.kube.cache import Cache
from evertrain.kube.port import EVENT, POD, POD_GROUP, QUEUE, ApiError, Kind, NotFound
from evertrain.noded import __main__ as noded
from evertrain.noded.sources import Sources
from tests.kube.fake import FakeKube
from tests.operator.bench import Bench
from tests.requests_asked import Recording


def pod(name: str, leads: bool = False) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "clusterd"} | ({LEADS: "true"} if leads else {})
    return {"metadata": {"name": name, "namespace": "mindx-dl", "labels": labels}, "spec": {}}


def leaders(kube: FakeKube) -> list[str]:
    return [item["metadata"]["name"] for item in kube.items(POD) if LEADS in item["metadata"]["labels"]]


# Who leads.


def test_the_leader_is_shown_and_the_one_before_no_longer() -> None:
    async def test() -> None:
        kube = FakeKube()
        for item in (pod("a", leads=True), pod("b"), pod("c", leads=True)):
            await kube.create(POD, item)
        await show_leader(Recording(kube, "clusterd"), "mindx-dl", "b")
        assert leaders(kube) == ["b"]
        calls = len(kube.calls)
        await show_leader(Recording(kube, "clusterd"), "mindx-dl", "b")
        assert leaders(kube) == ["b"] and len(kube.calls) == calls + 1

    aio.run(test())


def test_who_cannot_be_shown_goes_on_trying(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("evertrain.clusterd.leading.AGAIN", 0.001)

    async def test() -> None:
        kube = FakeKube()
        await kube.create(POD, pod("b"))
        refused = iter(range(3))

        def before(verb: str, kind: Kind, name: str) -> None:
            if verb == "patch" and next(refused, None) is not None:
                raise ApiError(403, "Forbidden", "no")

        kube.before = before
        await show_leader(kube, "mindx-dl", "b")
        assert leaders(kube) == ["b"]
        assert caplog.text.count("can't be told that b leads") == 1

    aio.run(test())


def test_a_leader_before_that_goes_meanwhile_does_no_harm() -> None:
    async def test() -> None:
        kube = FakeKube()
        for item in (pod("a", leads=True), pod("b")):
            await kube.create(POD, item)

        def before(verb: str, kind: Kind, name: str) -> None:
            if verb == "patch" and name == "a":
                kube.remove(POD, "a", "mindx-dl")

        kube.before = before
        await show_leader(kube, "mindx-dl", "b")
        assert leaders(kube) == ["b"]

    aio.run(test())


# Health.


async def answer(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    line = (await reader.readline()).decode().strip()
    writer.close()
    return line


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_noded_is_healthy_once_it_knows_its_node_and_only_the_node_is_told() -> None:
    async def test() -> None:
        port = free_port()
        arguments = ["--enable-healthz", "--healthz-host=127.0.0.1", f"-healthz-address={port}"]
        options = noded.parser().parse_args(arguments)
        kube = FakeKube()
        sources = Sources(kube, "node-0")
        async with daemon.health(options, sources.is_ready):
            assert await answer("127.0.0.1", port) == "HTTP/1.1 503 Service Unavailable"
            reading = asyncio.ensure_future(sources.run())
            async with aio.timeout(30):
                await sources.ready()
            assert await answer("127.0.0.1", port) == "HTTP/1.1 200 OK"
            with pytest.raises(OSError):
                await answer("127.0.0.2", port)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    aio.run(test())


# Without Volcano.


def without_volcano(kube: FakeKube) -> None:
    def before(verb: str, kind: Kind, name: str) -> None:
        if kind in (POD_GROUP, QUEUE):
            raise NotFound(404, "NotFound", "the server could not find the requested resource")

    kube.before = before


def test_a_job_is_told_that_volcano_is_missing_and_goes_on_when_it_comes() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit(run_policy={"schedulingPolicy": {"queue": "default"}})
        without_volcano(bench.kube)
        observer = bench.operator.observer

        async def look() -> None:
            for cache in observer.caches:
                try:
                    await cache.refresh()
                except NotFound:
                    assert cache.kind in (POD_GROUP, QUEUE)
            await bench.operator.look(("default", "test-job"))

        await look()
        async with aio.timeout(5):
            await asyncio.wait_for(asyncio.gather(*(cache.answered.wait() for cache in observer.caches)), 5)
            await observer.synced()
        assert bench.conditions() == [("Created", "True", "JobCreated")], "it may be about to start"
        bench.later(6)
        await look()
        assert bench.conditions() == [("Created", "True", "PodGroupNotInitialized")]
        assert bench.last["message"] == NO_GROUPS.message
        assert "volcano-scheduler is maybe not running" in NO_GROUPS.message
        assert ("Normal", "PodGroupNotInitialized") in bench.events()
        assert not bench.pods()

        bench.kube.before = lambda verb, kind, name: None
        await bench.settle()
        assert len(bench.kube.items(POD_GROUP)) == 1
        bench.admit()
        await bench.settle()
        assert len(bench.pods()) == 2

    aio.run(test())


def test_while_volcano_is_missing_jobs_are_looked_at_again() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit()
        without_volcano(bench.kube)
        running = asyncio.ensure_future(bench.operator.run())
        try:
            async with aio.timeout(20):
                await bench.operator.ready.wait()
                while "status" not in bench.job() or not bench.job()["status"]:
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    aio.run(test())


def test_that_a_kind_is_missing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        kube = FakeKube()
        without_volcano(kube)
        cache = Cache(kube, POD_GROUP)
        running = asyncio.ensure_future(cache.run())
        async with aio.timeout(20):
            await cache.answered.wait()
        assert not cache.is_served and not cache.synced.is_set()
        await asyncio.sleep(0.3)
        kube.before = lambda verb, kind, name: None
        async with aio.timeout(20):
            await cache.synced.wait()
        assert cache.is_served
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with caplog.at_level("INFO"):
        aio.run(test())
    assert caplog.text.count("the server could not find") == 1


@pytest.mark.parametrize(("workers", "said"), [(1, True), (0, False)])
def test_without_gang_scheduling_a_job_of_several_pods_says_so(workers: int, said: bool) -> None:
    async def test() -> None:
        bench = Bench(gang=False)
        await bench.submit(workers=workers)
        await bench.settle()
        assert len(bench.pods()) == workers + 1
        told = [item["message"] for item in bench.kube.items(EVENT) if item["reason"] == "NoGangScheduling"]
        assert len(told) == said
        assert not said or "one by one" in told[0]

    aio.run(test())
