"""A small cluster for tests of scheduler and nodes: the real API, without HTTP, and real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from evertrain import aio
from evertrain.embedded import volcano
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.network.fabric import Fabric
from evertrain.embedded.network.plan import LOOPBACK
from evertrain.embedded.node.config import NodeConfig
from evertrain.embedded.node.machine import Machine
from evertrain.embedded.node.node import VirtualNode
from evertrain.embedded.podlogs import LogRequest
from evertrain.embedded.scheduler.shell import Scheduler
from evertrain.embedded.schema import Registry
from evertrain.embedded.store import Store
from evertrain.kube.port import CUSTOM_RESOURCE_DEFINITION, EVENT, POD, QUEUE, AlreadyExists, Object
from tests.leftovers import TEST_ID

PATIENCE = 120.0


@dataclass
class SmallCluster:
    kube: LocalKube
    machine: Machine
    nodes: dict[str, VirtualNode] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def start(self, index: int, **settings: Any) -> VirtualNode:
        # What a pod runs can be told by this variable from what others run.
        environment = {TEST_ID: os.environ.get(TEST_ID, "")}
        usual = {"backoff": 0.1, "environment": environment, "plan": self.machine.addresses.plan}
        config = NodeConfig(f"node-{index}", index, **{**usual, **settings})
        node = self.nodes[config.name] = VirtualNode(self.machine, config)
        self.tasks[config.name] = asyncio.create_task(node.run())
        return node

    async def drop_dead(self, name: str) -> None:
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])
        del self.nodes[name]

    def pod(self, name: str) -> Object:
        return self.machine.pods.get(name, "default") or {}

    async def until(self, name: str, condition: Callable[[Object], Any], patience: float = PATIENCE) -> Object:
        met = await self.machine.pods.until(lambda: bool(self.pod(name) and condition(self.pod(name))), patience)
        assert met, f"{name}: {self.pod(name).get('status')}\n{await self.log(name)}\n{await self.events(name)}"
        return self.pod(name)

    async def phase(self, name: str, *phases: str) -> Object:
        return await self.until(name, lambda pod: (pod.get("status") or {}).get("phase") in phases)

    async def gone(self, name: str, patience: float = PATIENCE) -> None:
        assert await self.machine.pods.until(lambda: not self.pod(name), patience), self.pod(name).get("status")

    async def log(self, name: str, container: str = "main", **request: Any) -> str:
        pod = self.pod(name)
        node = self.nodes.get((pod.get("spec") or {}).get("nodeName") or "")
        if node is None:
            return "(no node)"
        try:
            pieces = [piece async for piece in node.log(pod, LogRequest(container, **request))]
        except Exception as error:
            return f"({error})"
        return b"".join(pieces).decode()

    async def events(self, name: str) -> list[str]:
        await self.machine.recorder.flush()
        found = (await self.kube.list(EVENT)).items
        return [f"{e['reason']}: {e['message']}" for e in found if e["involvedObject"]["name"] == name]

    async def create(self, pod: Object) -> Object:
        return await self.kube.create(POD, pod)


def pod(name: str, *command: str, **spec: Any) -> Object:
    """A pod with one container `main`; `container` adds to it."""
    container = {"name": "main", "image": "any", "command": list(command), **spec.pop("container", {})}
    metadata = {"name": name, "namespace": "default", **spec.pop("metadata", {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"restartPolicy": "Never", "containers": [container], **spec},
    }


@contextlib.asynccontextmanager
async def small_cluster(
    folder: Path, nodes: int = 1, *, scheduler: bool = True, fabric: Fabric | None = None, **settings: Any
) -> AsyncIterator[SmallCluster]:
    """`fabric`: the pods' own network, if they are to have one."""
    plan = LOOPBACK if fabric is None else fabric.block.plan
    store = Store(folder / "objects.db")
    api = Api(store, Registry.builtin(), services=plan.services)
    bootstrap(api)
    kube = LocalKube(api, manager="test")
    for definition in volcano.definitions():
        with contextlib.suppress(AlreadyExists):
            await kube.create(CUSTOM_RESOURCE_DEFINITION, definition)
    with contextlib.suppress(AlreadyExists):
        await kube.create(QUEUE, volcano.default_queue())
    cluster = SmallCluster(kube, Machine(kube, folder / "nodes", plan, fabric))
    parts = [asyncio.create_task(cluster.machine.run())]
    if scheduler:
        parts.append(asyncio.create_task(Scheduler(kube, shared_network=fabric is None).run()))
    for index in range(nodes):
        cluster.start(index, **settings)
    try:
        yield cluster
    finally:
        for task in (*cluster.tasks.values(), *parts):
            task.cancel()
        await asyncio.gather(*cluster.tasks.values(), *parts, return_exceptions=True)
        store.close()


def state(item: Object, index: int = 0) -> Object:
    statuses = (item.get("status") or {}).get("containerStatuses") or []
    return dict(statuses[index]["state"]) if statuses else {}


def terminated(item: Object, index: int = 0) -> Object:
    return dict(state(item, index)["terminated"])


def conditions(item: Object) -> dict[str, str]:
    return {condition["type"]: condition["status"] for condition in item["status"].get("conditions") or []}


def processes(word: str) -> list[psutil.Process]:
    """Those with this word in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(word in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


async def soon(condition: Callable[[], Any], patience: float = 3.0) -> None:
    """Of what the kernel and the disk do, nobody tells."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def run(work: Any) -> None:
    aio.run(asyncio.wait_for(work, 90))


async def ready(cluster: SmallCluster, name: str, word: str = "ready") -> None:
    """Until the log has the word."""
    item = cluster.pod(name)
    node = cluster.nodes[item["spec"]["nodeName"]]
    async for piece in node.log(item, LogRequest("main", follow=True)):
        if word.encode() in piece:
            return
    raise AssertionError(f"{name} ended without saying {word}")
