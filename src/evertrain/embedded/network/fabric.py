"""A cluster's network, seen from the cluster (see `holder`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv4Network
from typing import Any

from evertrain.embedded.network.plan import Block
from evertrain.embedded.nodestats import Traffic
from evertrain.embedded.sideprocess import SideProcess

WHAT = "the process that holds the pods' network"


class NotAllowed(Exception):
    """This kernel gives us no namespaces for networks: why."""


class Fabric:
    """From `start` to `close`. What is asked of it raises OSError if the kernel refuses, and Lost if it is gone."""

    def __init__(self, process: SideProcess, users: int, block: Block, unreachable: str) -> None:
        self._process = process
        self.users = users
        """Descriptor of the user namespace in which one may enter those of pods."""
        self.block = block
        self.unreachable = unreachable
        """Why this machine can't reach the pods; empty if it can."""

    @classmethod
    async def start(cls, last: str = "") -> Fabric:
        """`last`: the block of addresses of the last time. Raises NotAllowed."""
        process = SideProcess("evertrain.embedded.network.holder", WHAT, patience=None)
        hello, descriptors = await process.start(last)
        if hello["error"]:
            process.kill()
            raise NotAllowed(hello["error"])
        return cls(process, descriptors[0], Block(IPv4Network(hello["block"])), hello["machine"])

    def close(self) -> None:
        """Everything goes; namespaces in which processes run, with the last of these."""
        self._process.kill()
        if self.users >= 0:
            os.close(self.users)
            self.users = -1

    async def lost(self) -> None:
        """Until it is gone although nobody has closed it, and all pods are without links."""
        await self._process.ended()

    async def add_node(self, index: int) -> None:
        await self._ask("node", index=index)

    async def add_pod(self, pod: str, index: int, addresses: Sequence[str]) -> int:
        """The descriptor of its namespace, which the caller closes. The first address is its own."""
        return (await self._ask("pod", pod=pod, index=index, addresses=list(addresses)))[0]

    async def enter_node(self, index: int) -> int:
        """The descriptor of the node's own namespace, which the caller closes."""
        return (await self._ask("enter", index=index))[0]

    async def forget_pod(self, pod: str) -> None:
        await self._ask("forget", pod=pod)

    async def listen(self, host: str, port: int) -> socket.socket:
        """For pods, at the address of a Service that the cluster itself serves."""
        await self._ask("address", address=host)
        return socket.socket(fileno=(await self._ask("listen", host=host, port=port))[0])

    async def socket_of(self, index: int) -> socket.socket:
        """One of a node, which can be connected to its pods; it doesn't block."""
        made = socket.socket(fileno=(await self._ask("socket", index=index))[0])
        made.setblocking(False)
        return made

    async def plug(
        self, index: int, *, joined: bool = True, pulled: Collection[int] = (), delay: float = 0.0, loss: float = 0.0
    ) -> None:
        """All cables of a node. If it is not joined, what goes in or out is lost from now on, and nobody is told. The
        NICs that are pulled, and no others, have no cable: links are down, in its pods, too. What goes through the
        others is late by so many seconds each way, and that share of it is lost."""
        await self._ask("plug", index=index, joined=joined, pulled=list(pulled), delay=delay, loss=loss)

    async def traffic(self, index: int) -> dict[str, Traffic]:
        """By NIC."""
        answer, _ = await self._process.ask({"do": "traffic", "index": index})
        return {name: Traffic(**counts) for name, counts in answer["nics"].items()}

    async def _ask(self, what: str, **order: Any) -> list[int]:
        """The descriptors of the answer."""
        _, descriptors = await self._process.ask({"do": what} | order)
        return descriptors
