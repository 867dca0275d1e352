"""Leader election: one leads, another takes over when it is gone, and never both."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from evertrain import aio
from evertrain.kube.lease import CannotLead, Leader, LostLeadership, Sighting
from evertrain.kube.port import LEASE, NAMESPACE, Kind, NotFound, Object
from tests import virtual_time
from tests.kube.fake import FakeKube, refused


def leader(kube: FakeKube, me: str) -> Leader:
    return Leader(kube, "operator", "mindx-dl", me, duration=15, deadline=10, period=2)


class Work:
    def __init__(self) -> None:
        self.active: list[str] = []
        self.history: list[str] = []
        self.changed = asyncio.Event()

    async def of(self, me: str) -> None:
        assert not self.active, "two lead"
        self.active.append(me)
        self.history.append(me)
        self.changed.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.active.remove(me)

    async def until(self, *history: str) -> None:
        async with aio.timeout(60):
            while self.history != list(history):
                self.changed.clear()
                await self.changed.wait()


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_one_leads_and_hands_over() -> None:
    async def test() -> None:
        kube, work = FakeKube(), Work()
        first = asyncio.create_task(leader(kube, "a").lead(lambda: work.of("a")))
        await work.until("a")
        second = asyncio.create_task(leader(kube, "b").lead(lambda: work.of("b")))
        await asyncio.sleep(600)
        assert work.history == ["a"]
        began = asyncio.get_running_loop().time()
        await stop(first)
        await work.until("a", "b")
        assert asyncio.get_running_loop().time() - began <= 2, "it was released"
        spec = kube.find(LEASE, "operator", "mindx-dl")["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("b", 1)
        await stop(second)

    virtual_time.run(test())


def test_a_leader_that_is_cut_off_stops_before_another_begins() -> None:
    async def test() -> None:
        kube, work = FakeKube(), Work()
        first = asyncio.create_task(leader(kube, "a").lead(lambda: work.of("a")))
        await work.until("a")
        other = FakeKube()
        other.objects = kube.objects

        def before(verb: str, kind: Kind, name: str) -> None:
            raise ConnectionError("cut off")

        kube.before = before
        second = asyncio.create_task(leader(other, "b").lead(lambda: work.of("b")))
        began = asyncio.get_running_loop().time()
        with pytest.raises(LostLeadership):
            await first
        assert asyncio.get_running_loop().time() - began <= 10
        await work.until("a", "b")
        assert asyncio.get_running_loop().time() - began >= 15 - 2
        await stop(second)

    virtual_time.run(test())


def test_who_finds_the_lease_in_other_hands_stops_at_once() -> None:
    async def test() -> None:
        kube, work = FakeKube(), Work()
        first = asyncio.create_task(leader(kube, "a").lead(lambda: work.of("a")))
        await work.until("a")
        lease = kube.find(LEASE, "operator", "mindx-dl")
        for holder in ("b", ""):  # even if that one is gone again
            await kube.patch(LEASE, "operator", "mindx-dl", {"spec": {**lease["spec"], "holderIdentity": holder}})
        began = asyncio.get_running_loop().time()
        with pytest.raises(LostLeadership):
            await asyncio.wait_for(first, 60)
        assert asyncio.get_running_loop().time() - began <= 2 and not work.active

    virtual_time.run(test())


def test_an_answer_that_comes_late_does_not_make_the_lease_last_longer() -> None:
    async def test() -> None:
        kube, work = FakeKube(), Work()

        class Slow:
            """The server takes the lease at once, and says so almost too late."""

            def __getattr__(self, name: str) -> object:
                return getattr(kube, name)

            async def replace(self, kind: Kind, item: Object) -> Object:
                found = await kube.replace(kind, item)
                await asyncio.sleep(1.9)
                return found

        loop = asyncio.get_running_loop()
        first = asyncio.create_task(leader(Slow(), "a").lead(lambda: work.of("a")))  # type: ignore[arg-type]
        await work.until("a")
        renewed = 0.0

        def after(verb: str, kind: Kind, name: str) -> None:
            nonlocal renewed
            renewed = loop.time()
            kube.before = cut_off

        def cut_off(verb: str, kind: Kind, name: str) -> None:
            raise ConnectionError("cut off")

        kube.after = after
        with pytest.raises(LostLeadership):
            await asyncio.wait_for(first, 60)
        assert renewed and loop.time() - renewed <= 10

    virtual_time.run(test())


class Beside:
    """A leader that renews on a thread, as far as can be seen from there."""

    def __init__(self) -> None:
        self.kube, self.renewed, self.threads = FakeKube(), threading.Semaphore(0), set[threading.Thread]()
        self.kube.after = self.after
        self.leader = Leader(
            self.kube, "operator", "mindx-dl", "a", duration=300, deadline=200, period=0.01, connect=self.connect
        )

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[FakeKube]:
        self.threads.add(threading.current_thread())
        yield self.kube

    def after(self, verb: str, kind: Kind, name: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.renewed.release()


def test_the_lease_is_renewed_while_the_work_holds_the_loop_up() -> None:
    async def test() -> None:
        here = Beside()

        async def work() -> None:
            await asyncio.to_thread(here.renewed.acquire)  # it has begun
            for _ in range(3):
                assert here.renewed.acquire(timeout=60), "nobody else can run, and the lease is not renewed"

        async with aio.timeout(120):
            await here.leader.lead(work)
        assert here.kube.find(LEASE, "operator", "mindx-dl")["spec"]["holderIdentity"] == "", "it is released"
        assert here.threads and not any(thread.is_alive() for thread in here.threads)

    aio.run(test())


def test_who_renews_on_a_thread_and_loses_the_lease_stops() -> None:
    async def test() -> None:
        here, ended = Beside(), asyncio.Event()

        async def work() -> None:
            await asyncio.to_thread(here.renewed.acquire)
            before = here.kube.before

            def taken(verb: str, kind: Kind, name: str) -> None:
                if verb != "get":
                    return
                here.kube.before = before
                here.kube.find(LEASE, "operator", "mindx-dl")["spec"]["holderIdentity"] = "b"

            here.kube.before = taken
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        with pytest.raises(LostLeadership, match="operator is b's"):
            async with aio.timeout(120):
                await here.leader.lead(work)
        assert ended.is_set()

    aio.run(test())


def test_who_hangs_for_good_does_not_lead_for_ever() -> None:
    async def test() -> None:
        here = leader(FakeKube(), "a")
        assert await here._try(here._kube)
        with pytest.raises(LostLeadership):
            async with aio.timeout(60):
                await here._renew(here._kube, lambda: False)

    virtual_time.run(test())


def test_work_that_fails_is_said() -> None:
    async def broken() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        aio.run(leader(FakeKube(), "a").lead(broken))


def test_clocks_of_others_are_not_believed() -> None:
    sighting = Sighting()
    old = {"spec": {"holderIdentity": "a", "renewTime": "1990-01-01T00:00:00.000000Z", "leaseDurationSeconds": 15}}
    sighting.look(old, 100.0)
    assert not sighting.is_free("b", 114.9)
    assert sighting.is_free("b", 115.0)
    assert sighting.is_free("a", 100.0)


class WithNamespaces(FakeKube):
    """As a real server, it takes nothing into a namespace that is not there."""

    async def create(self, kind: Kind, item: Object) -> Object:
        namespace = item["metadata"].get("namespace")
        if namespace and (NAMESPACE, "", namespace) not in self.objects:
            raise NotFound(404, "NotFound", f'namespaces "{namespace}" not found')
        return await super().create(kind, item)


def test_the_namespace_of_the_lease_is_made() -> None:
    async def test() -> None:
        kube, work = WithNamespaces(), Work()
        leading = asyncio.create_task(leader(kube, "a").lead(lambda: work.of("a")))
        await work.until("a")
        assert kube.find(NAMESPACE, "mindx-dl")
        await stop(leading)

    virtual_time.run(test())


def test_a_namespace_that_may_not_be_made_is_named() -> None:
    def guard(verb: str, kind: Kind, name: str) -> None:
        if kind == NAMESPACE:
            raise refused(403, "Forbidden", "namespaces is forbidden")

    async def test() -> None:
        kube, work = WithNamespaces(), Work()
        kube.before = guard
        with pytest.raises(CannotLead, match="namespace mindx-dl, where the lease operator has to be, is missing"):
            async with aio.timeout(60):
                await leader(kube, "a").lead(lambda: work.of("a"))

    virtual_time.run(test())
