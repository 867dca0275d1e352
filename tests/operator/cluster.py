"""An embedded API server with the kinds of jobs, and nodes that only claim to run pods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from evertrain import aio
from evertrain.acjob import crd
from evertrain.embedded import volcano
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.api.server import ApiServer
from evertrain.embedded.certificates import credentials, write_kubeconfig
from evertrain.embedded.controllers.garbage import GarbageCollector
from evertrain.embedded.schema import Registry
from evertrain.embedded.store import Store
from evertrain.kube.client import Client
from evertrain.kube.port import ASCEND_JOB, CUSTOM_RESOURCE_DEFINITION, POD, POD_GROUP, QUEUE, Kind, NotFound, Object


class Cluster:
    """An API server with the kinds of jobs, and nodes that only claim to run pods."""

    def __init__(self, folder: Path, api: Api, server: ApiServer) -> None:
        self.folder = folder
        self.api = api
        self.kube = LocalKube(api)
        self.server = server
        self.kubeconfig = folder / "kubeconfig"

    def client(self, port: int | None = None) -> Client:
        path = self.folder / f"kubeconfig-{port or self.server.port}"
        write_kubeconfig(path, f"https://127.0.0.1:{port or self.server.port}", credentials(self.folder / "keys"))
        return Client.from_kubeconfig(path)

    async def states(self) -> list[str]:
        jobs = (await self.kube.list(ASCEND_JOB)).items
        return [((job.get("status") or {}).get("conditions") or [{"type": ""}])[-1]["type"] for job in jobs]

    async def nodes(self) -> None:
        """Every group is let in; every pod runs, and the next time succeeds."""
        while True:
            for group in (await self.kube.list(POD_GROUP)).items:
                if not (group.get("status") or {}).get("phase"):
                    await self._set(POD_GROUP, group, {"phase": "Running"})
            for pod in (await self.kube.list(POD)).items:
                phase = pod["status"]["phase"]
                if phase in ("Pending", "Running"):
                    await self._set(POD, pod, {"phase": "Running" if phase == "Pending" else "Succeeded"})
            await asyncio.sleep(0.02)

    async def _set(self, kind: Kind, item: Object, status: Object) -> None:
        metadata = item["metadata"]
        with contextlib.suppress(NotFound):
            await self.kube.patch(kind, metadata["name"], metadata["namespace"], {"status": status}, status=True)


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    store = Store(folder / "objects.db")
    api = Api(store, Registry.builtin())
    bootstrap(api)
    server = ApiServer(api, credentials(folder / "keys"))
    await server.start()
    try:
        running = Cluster(folder, api, server)
        for definition in [crd.definition(), *volcano.definitions()]:
            await running.kube.create(CUSTOM_RESOURCE_DEFINITION, definition)
        await running.kube.create(QUEUE, {"metadata": {"name": "default"}, "spec": {"weight": 1}})
        async with background(GarbageCollector(running.kube).run):
            yield running
    finally:
        await server.stop()
        store.close()


@contextlib.asynccontextmanager
async def background(*parts: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(part()) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 180.0) -> None:
    async with aio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)
