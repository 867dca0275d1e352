"""A ClusterD that stands by: it tells nobody, and when it leads it misses nothing that another one has written last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from evertrain import aio
from evertrain.clusterd.faulting import Faults
from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.hub import Hub
from evertrain.clusterd.observe import Observer
from evertrain.clusterd.recover.machine import Recovery
from evertrain.clusterd.recover.names import FAULT_TYPE, SUB_HEALTH
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NODE, POD, POD_GROUP, Change, Kind
from tests.clusterd.hub import PATIENCE, Notes, Replacements, make_job
from tests.operator.cluster import Cluster, cluster, until


class Slow:
    """A way to the API server on which watches of some kinds tell nothing until they may."""

    def __init__(self, kube: Any, *held: Kind) -> None:
        self._kube, self._held = kube, held
        self.may_tell = asyncio.Event()
        self.listed: list[tuple[Kind, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)

    async def list(self, kind: Kind, *place: Any, **chosen: Any) -> Any:
        found = await self._kube.list(kind, *place, **chosen)
        self.listed.append((kind, chosen.get("labels", "")))
        return found

    async def watch(self, kind: Kind, *place: Any, **chosen: Any) -> AsyncIterator[Change]:
        async for change in self._kube.watch(kind, *place, **chosen):
            if kind in self._held:
                await self.may_tell.wait()
            yield change


class Standby:
    def __init__(self, kube: Slow) -> None:
        observer = Observer(kube)  # type: ignore[arg-type]
        self.hub = Hub(
            kube,  # type: ignore[arg-type]
            machine=Recovery,
            rescheduler=Replacements(),
            timeline=Notes(),
            observer=observer,
            faults=Faults(kube, FaultCentre(), observer),  # type: ignore[arg-type]
        )
        self.leads = asyncio.Event()

    async def knows(self, uid: str) -> bool:
        return uid in self.hub.jobs

    async def lead(self) -> None:
        self.leads.set()
        async with aio.timeout(PATIENCE):
            await self.hub.ready.wait()


@contextlib.asynccontextmanager
async def standby(here: Cluster, *held: Kind) -> AsyncIterator[tuple[Standby, Slow]]:
    async with contextlib.AsyncExitStack() as stack:
        client = here.client()
        stack.push_async_callback(client.close)
        kube = Slow(client, *held)
        made = Standby(kube)
        running = asyncio.ensure_future(made.hub.run(made.leads))
        try:
            yield made, kube
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_it_has_read_what_is_large_and_tells_nobody(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with standby(here) as (other, kube):
            await until(lambda: other.knows(uid), PATIENCE)
            assert not other.hub.summaries() and not other.hub.ready.is_set()
            assert not (await here.kube.list(CONFIG_MAP, labels="outside-job-info=true")).items
            kube.listed.clear()
            await other.lead()
            assert uid in other.hub.summaries()
            assert not {kind for kind, _ in kube.listed} & {NODE, POD_GROUP}
            assert [labels for kind, labels in kube.listed if kind == POD and FAULT_TYPE not in labels] == []


async def test_a_job_that_it_has_not_been_told_of(tmp_path: Path) -> None:
    """What is kept of its recovery would be thrown away."""
    async with cluster(tmp_path) as here:
        first = (await make_job(here))["metadata"]["uid"]
        async with standby(here, ASCEND_JOB) as (other, kube):
            await until(lambda: other.knows(first), PATIENCE)
            second = (await make_job(here, "second"))["metadata"]["uid"]
            kube.listed.clear()
            leading = asyncio.create_task(other.lead())

            async def has_asked() -> bool:
                return leading.done() or any(kind == ASCEND_JOB for kind, _ in kube.listed)

            await until(has_asked, PATIENCE)
            kube.may_tell.set()
            await leading
            assert second in other.hub.jobs


async def test_a_label_that_it_has_not_been_told_of(tmp_path: Path) -> None:
    """Nobody else would take it off again."""
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with standby(here, POD) as (other, _):
            await until(lambda: other.knows(uid), PATIENCE)
            pod = next(iter((await here.kube.list(POD, "default")).items))["metadata"]["name"]
            await here.kube.patch(POD, pod, "default", {"metadata": {"labels": {FAULT_TYPE: SUB_HEALTH}}})
            await other.lead()

            async def is_off() -> bool:
                return FAULT_TYPE not in (await here.kube.get(POD, pod, "default"))["metadata"]["labels"]

            await until(is_off, PATIENCE)
