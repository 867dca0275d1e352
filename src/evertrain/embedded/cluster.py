"""The whole cluster in one process and one loop: API server, controllers, scheduler, operator and virtual nodes.

The only module that knows all of them. They know of each other only what the API server says: each gets the port to it
and runs until it is cancelled. A part that fails is made anew, for none of them keeps anything that the API server
doesn't have; so a defect that some object brings to light costs a message in the log, not the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import yaml

from evertrain.acjob import crd
from evertrain.clusterd.shell import DATABASE as TIMELINE
from evertrain.clusterd.shell import ClusterD
from evertrain.embedded import clusterd, instance, volcano
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.api.server import ApiServer
from evertrain.embedded.certificates import Credentials, credentials, write_kubeconfig
from evertrain.embedded.controllers.events import EventExpiry
from evertrain.embedded.controllers.garbage import GarbageCollector
from evertrain.embedded.controllers.nodes import NodeLifecycle
from evertrain.embedded.controllers.removal import Removal
from evertrain.embedded.fleet import Fleet
from evertrain.embedded.network import choice
from evertrain.embedded.network.choice import Shared
from evertrain.embedded.network.fabric import WHAT, Fabric, NotAllowed
from evertrain.embedded.network.plan import LOOPBACK
from evertrain.embedded.node.config import NodeConfig
from evertrain.embedded.node.machine import Machine
from evertrain.embedded.node.node import VirtualNode
from evertrain.embedded.node.reach import Reach
from evertrain.embedded.scheduler.shell import Scheduler
from evertrain.embedded.schema import Registry
from evertrain.embedded.sideprocess import Lost
from evertrain.embedded.store import NotStored, Store
from evertrain.kube.port import (
    CUSTOM_RESOURCE_DEFINITION,
    QUEUE,
    SERVICE,
    AlreadyExists,
    ApiError,
    Conflict,
    Kind,
    Kube,
    Object,
)
from evertrain.noded.daemon import NodeDaemon
from evertrain.noded.sources import Sources
from evertrain.operator.shell import RANK_TABLES, Operator

logger = logging.getLogger(__name__)

FIRST_DELAY, MAX_DELAY = 0.1, 10.0
LEASE_SECONDS = 20.0
DATABASE = "objects.db"
NETWORK = "network"
"""The file with the addresses that the pods' network had the last time."""
ALLOW_ROOT = "allow namespaces (docs/virtual-nodes.md)"
SERVER_PORT = 443
NAME = "evertrain"
"""Of the cluster in its kubeconfig."""


@dataclass(frozen=True)
class Settings:
    folder: Path
    nodes: int = 2
    npus: int = 8
    labels: Mapping[str, str] = field(default_factory=dict)
    """On every node."""
    kubeconfig: Path | None = None
    """Where to write it; in the folder if not given."""
    port: int = 0
    """Of the API server; 0: the one of the last time if it is free."""
    operator: bool = True
    clusterd: str = clusterd.FREE
    """Where ClusterD serves, HOST:PORT on the loopback interface; empty: there is none."""
    clusterd_elsewhere: bool = False
    """If that port is in use, any other will do."""
    clusterd_insecure: bool = False
    """It asks nobody for a token."""
    node_grace: float = 40.0
    """Seconds without a heartbeat after which a node is not ready."""
    own_network: bool | None = None
    """Pods have a network of their own; None: where that is possible."""

    def text(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        npus = "no NPUs" if not self.npus else "1 NPU" if self.npus == 1 else f"{self.npus} NPUs"
        return f"{nodes} with {npus}{' each' if self.nodes > 1 and self.npus else ''}"


class CannotStart(Exception):
    """The text is for the user."""


class Part(Protocol):
    async def run(self) -> None: ...


class Cluster:
    """Used as a context: inside of it the cluster serves."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.kubeconfig = settings.kubeconfig or settings.folder / instance.KUBECONFIG
        self.taken_over = False
        """Did the cluster before end without order?"""
        self.clusterd = ""
        """Where ClusterD serves; empty if it doesn't."""
        self.shared: Shared | None = None
        """Why pods are in the network of this machine, if nobody asked for that."""
        self.own_network = False
        """Have pods one?"""
        self._environment: dict[str, str] = {}
        self._broken = ""
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Cluster:
        """Raises CannotStart."""
        try:
            async with self._stack:
                await self._start()
                self._stack = self._stack.pop_all()
        except (instance.InUse, clusterd.Unusable) as error:
            raise CannotStart(str(error)) from None
        except (sqlite3.OperationalError, NotStored, ApiError) as error:
            raise CannotStart(f"{self.settings.folder / DATABASE} can't be used: {error}") from None
        except sqlite3.DatabaseError as error:
            database = self.settings.folder / DATABASE
            raise CannotStart(f"{database} can't be used: {error}; move it away to begin anew") from None
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise CannotStart(f"{place}{error.strerror or error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        """Raises OSError if the cluster had to end before it was told to."""
        try:
            await self._stack.aclose()
        finally:
            if self._broken:
                raise OSError(self._broken)

    async def _start(self) -> None:
        """What is started here is ended in the opposite order: whoever makes and places pods first, then the nodes with
        their pods, then the server."""
        settings, folder, stack = self.settings, self.settings.folder, self._stack
        claim = stack.enter_context(instance.Claim(folder))
        self.taken_over = claim.left_by is not None
        _check_ours(self.kubeconfig)
        store = Store(folder / DATABASE)
        stack.callback(store.close)
        fabric = await self._make_network()
        plan = LOOPBACK if fabric is None else fabric.block.plan
        api = Api(store, Registry.builtin(), services=plan.services)
        bootstrap(api)

        def port(manager: str) -> Kube:
            return LocalKube(api, manager=manager)

        await install(port("evertrain"))
        place = await self._place_of_clusterd(port("evertrain"), fabric)
        # Secrets are in the volumes; the directory around it may be the user's own, and open to others.
        (folder / "nodes").mkdir(mode=0o700, exist_ok=True)
        machine = Machine(port("kubelet"), folder / "nodes", plan, fabric)
        nodes = {f"node-{number}": number for number in range(settings.nodes)}
        facts = Sources(port("noded"))
        fleet = Fleet(
            port("fleet"), nodes, lambda name: self._make_node(machine, name, nodes[name], facts, port("noded"))
        )
        server_ip = ""
        if fabric is not None:
            server_ip = str((await _service_of_the_server(port("evertrain")))["spec"]["clusterIP"])
        keys = credentials(folder / clusterd.KEYS, *filter(None, ("127.0.0.1", server_ip)))
        security = clusterd.security(folder, settings.clusterd_insecure or place is None)
        token_of = security.tokens.job if security.tokens is not None else lambda uid: ""
        inside = [await fabric.listen(server_ip, SERVER_PORT)] if fabric is not None else []
        server = self._listen(api, keys, fleet, inside)
        await server.start()
        stack.push_async_callback(server.stop)
        parts: dict[str, Callable[[], Part]] = {
            "garbage collector": lambda: GarbageCollector(port("garbage-collector")),
            "namespace controller": lambda: Removal(port("namespace-controller")),
            "node controller": lambda: NodeLifecycle(port("node-controller"), grace_seconds=settings.node_grace),
            "event expiry": lambda: EventExpiry(port("event-expiry")),
            "scheduler": lambda: Scheduler(port("volcano-scheduler"), shared_network=fabric is None),
        }
        if settings.operator:
            parts["operator"] = lambda: Operator(
                port("ascend-operator"), rank_tables=folder / "ranktables", token_of=token_of
            )
        if place is not None:
            timeline = folder / TIMELINE
            parts["ClusterD"] = lambda: ClusterD(
                port("clusterd"), place.sockets, security, timeline=timeline, chips=True
            )
        await stack.enter_async_context(_running({"kubelet": lambda: machine, "noded": lambda: facts}))
        await stack.enter_async_context(fleet)
        await stack.enter_async_context(_running(parts))
        write_kubeconfig(self.kubeconfig, server.url, keys, name=NAME)
        if fabric is not None:
            await stack.enter_async_context(self._ends_with(fabric))
        claim.announce(instance.Running(os.getpid(), str(self.kubeconfig.absolute()), server.url))

    @contextlib.asynccontextmanager
    async def _ends_with(self, fabric: Fabric) -> AsyncIterator[None]:
        """Without it no pod has a network any more, and none can get another."""
        user = asyncio.current_task()
        assert user is not None

        async def end() -> None:
            await fabric.lost()
            self._broken = f"{WHAT} has ended, and so does the cluster; start it again"
            user.cancel()

        ending = asyncio.create_task(end())
        try:
            yield
        finally:
            ending.cancel()

    async def _make_network(self) -> Fabric | None:
        """Of the pods' own, if they are to have one. Raises CannotStart."""
        settings, wanted = self.settings, self.settings.own_network
        if wanted is False:
            return None
        file = settings.folder / NETWORK
        shared = choice.unfit(wanted, nodes=settings.nodes, clusterd=bool(settings.clusterd))
        fabric = None
        if shared is None:
            try:
                fabric = await Fabric.start(file.read_text().strip() if file.exists() else "")
            except (NotAllowed, Lost) as error:
                shared = choice.not_allowed(str(error))
                if os.geteuid() == 0:
                    shared = replace(shared, remedy=ALLOW_ROOT)
        if fabric is None:
            assert shared is not None
            if wanted:
                raise CannotStart(f"pods can't have networks of their own: {shared.reason}; {shared.remedy}")
            self.shared = shared
            return None
        if fabric.unreachable:
            logger.info("this machine can't reach pods at their addresses: %s", fabric.unreachable)
        self._stack.callback(fabric.close)
        self.own_network = True
        file.write_text(f"{fabric.block.network}\n")
        return fabric

    async def _place_of_clusterd(self, kube: Kube, fabric: Fabric | None) -> clusterd.Place | None:
        if not self.settings.clusterd:
            await clusterd.leave(kube)
            return None
        place = await clusterd.take_place(
            kube, self.settings.clusterd, fabric, elsewhere=self.settings.clusterd_elsewhere
        )
        self._stack.callback(place.close)
        self.clusterd = place.address
        self._environment = place.environment()
        return place

    def _make_node(self, machine: Machine, name: str, number: int, facts: Sources, kube: Kube) -> VirtualNode:
        settings = self.settings
        lease = min(LEASE_SECONDS, settings.node_grace / 2)
        config = NodeConfig(
            name,
            number,
            machine.addresses.plan,
            npus=settings.npus,
            labels=settings.labels,
            lease_seconds=lease,
            environment=self._environment,
            # Where the operator puts rank tables, and where jobs look for them.
            host_paths={str(RANK_TABLES): settings.folder / "ranktables"},
        )

        reach = Reach()

        def noded() -> Part:
            # Without detectors: what is wrong with this machine would be wrong with each of its virtual nodes.
            return NodeDaemon(reach.over(kube), name, facts)

        return VirtualNode(machine, config, [lambda: _keep(f"noded of {name}", noded)], reach)

    def _listen(self, api: Api, keys: Credentials, fleet: Fleet, inside: Sequence[socket.socket]) -> ApiServer:
        """On the port asked for, else on that of the last time: whoever has the old kubeconfig finds us again.

        `inside`: sockets in the pods' network."""

        def listening(port: int) -> ApiServer:
            return ApiServer(api, keys, port=port, logs=fleet.log, stats=fleet.stats, more=inside)

        if port := self.settings.port:
            try:
                return listening(port)
            except OSError as error:
                raise CannotStart(f"port {port} can't be used: {error.strerror}") from None
        try:
            return listening(_port_of_last_time(self.kubeconfig))
        except OSError:
            return listening(0)


async def install(kube: Kube) -> None:
    """The kinds of AscendJobs and gangs; those of an older version are brought up to date."""
    for definition in [crd.definition(), *volcano.definitions()]:
        await _put(kube, CUSTOM_RESOURCE_DEFINITION, definition)
    queue = volcano.default_queue()
    name = queue["metadata"]["name"]
    with contextlib.suppress(AlreadyExists):
        await kube.create(QUEUE, queue)
    if not (await kube.get(QUEUE, name)).get("status"):  # also of one whose maker was killed here
        await kube.patch(QUEUE, name, None, {"status": queue["status"]}, status=True)


async def _service_of_the_server(kube: Kube) -> Object:
    """By which pods find it, as on every Kubernetes."""
    item = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kubernetes", "namespace": "default", "labels": {"component": "apiserver"}},
        "spec": {"ports": [{"name": "https", "protocol": "TCP", "port": SERVER_PORT, "targetPort": SERVER_PORT}]},
    }
    with contextlib.suppress(AlreadyExists):
        return await kube.create(SERVICE, item)
    return await kube.get(SERVICE, "kubernetes", "default")


async def _put(kube: Kube, kind: Kind, item: Object) -> None:
    while True:
        try:
            await kube.create(kind, item)
            return
        except AlreadyExists:
            there = await kube.get(kind, item["metadata"]["name"])
        try:
            await kube.replace(kind, there | {"spec": item["spec"]})
            return
        except Conflict:
            continue


def _check_ours(kubeconfig: Path) -> None:
    """Nobody's other clusters are overwritten."""
    try:
        found = yaml.safe_load(kubeconfig.read_text())
        ours = found is None or [cluster["name"] for cluster in found["clusters"]] == [NAME]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, yaml.YAMLError):
        ours = False
    if not ours:
        raise CannotStart(
            f"{kubeconfig} is not a kubeconfig of this cluster and would be overwritten; name another file, and have "
            "kubectl read both with KUBECONFIG=FILE1:FILE2"
        )


def _port_of_last_time(kubeconfig: Path) -> int:
    try:
        return urlsplit(yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]).port or 0
    except (OSError, ValueError, KeyError, IndexError, TypeError, yaml.YAMLError):
        return 0


@contextlib.asynccontextmanager
async def _running(parts: Mapping[str, Callable[[], Part]]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(_keep(name, make), name=name) for name, make in parts.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _keep(name: str, make: Callable[[], Part]) -> None:
    delay = FIRST_DELAY
    while True:
        began = asyncio.get_running_loop().time()
        try:
            await make().run()
            logger.error("the %s has ended by itself; it is started again", name)
        except Exception:
            logger.exception("the %s has failed; it is started again", name)
        lasted = asyncio.get_running_loop().time() - began
        delay = FIRST_DELAY if lasted > MAX_DELAY else min(delay * 2, MAX_DELAY)
        await asyncio.sleep(delay)
