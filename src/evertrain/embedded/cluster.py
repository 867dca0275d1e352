"""The whole cluster in one process and one loop: API server, controllers, scheduler, operator and virtual nodes.

The only module that knows all of them. They know of each other only what the API server says: each gets the port to it
and runs until it is cancelled. A part that fails is made anew, for none of them keeps anything that the API server
doesn't have; so a defect that some object brings to light costs a message in the log, not the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import yaml

from evertrain.acjob.crd import definition as ascend_job_definition
from evertrain.embedded import instance, volcano
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.api.logs import LogRequest, LogsUnavailable
from evertrain.embedded.api.server import ApiServer
from evertrain.embedded.certificates import credentials, write_kubeconfig
from evertrain.embedded.power import OFF, ON, ORDER, STATE
from evertrain.embedded.schema import Registry
from evertrain.embedded.store import Store
from evertrain.kube.cache import Cache
from evertrain.kube.port import CUSTOM_RESOURCE_DEFINITION, NODE, QUEUE, AlreadyExists, ApiError, Kube, NotFound, Object

logger = logging.getLogger(__name__)

FIRST_DELAY, MAX_DELAY = 0.1, 10.0
READY_PATIENCE = 30.0


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

    def text(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        npus = "no NPUs" if not self.npus else "1 NPU" if self.npus == 1 else f"{self.npus} NPUs"
        return f"{nodes} with {npus}{' each' if self.nodes > 1 else ''}"


class Part(Protocol):
    async def run(self) -> None: ...


class Cluster:
    """Used as a context: inside of it the cluster serves."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.kubeconfig = settings.kubeconfig or settings.folder / instance.KUBECONFIG
        self.taken_over = False
        """Did the cluster before end without order?"""
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Cluster:
        async with self._stack:
            await self._start()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        """Everything that is started here is ended in the opposite order."""
        folder = self.settings.folder
        claim = self._stack.enter_context(instance.Claim(folder))
        self.taken_over = claim.left_by is not None
        store = Store(folder / "objects.db")
        self._stack.callback(store.close)
        api = Api(store, Registry())
        bootstrap(api)
        self._nodes = Nodes(self.settings, lambda manager: LocalKube(api, manager=manager))
        keys = credentials(folder / "keys")
        server = self._listen(api, keys)
        await server.start()
        self._stack.push_async_callback(server.stop)
        await install(LocalKube(api, manager="evertrain"))
        await self._start_parts(api)
        await self._nodes.all_ready(READY_PATIENCE)
        write_kubeconfig(self.kubeconfig, server.url, keys)
        claim.announce(instance.Running(claim_pid(), str(self.kubeconfig), server.url))
