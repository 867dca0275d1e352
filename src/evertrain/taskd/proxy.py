"""The proxy of a node: passes messages between the manager and the agent and workers of the node."""

from __future__ import annotations

import time

from evertrain.taskd.codes import PROXY
from evertrain.taskd.net.background import Background, shared
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security


class Proxy:
    current: Proxy | None = None
    """The one that listens in this process; a pod has one."""

    def __init__(
        self,
        server_rank: str,
        listen: str,
        upstream: str,
        *,
        security: Security | None = None,
        background: Background | None = None,
    ) -> None:
        """The time of its start is part of its name, so that it is never taken for the one it replaces."""
        self._background = background or shared()
        self.own = Position(PROXY, server_rank, str(int(time.time())))
        self._node = Node(self.own, listen=listen, upstream=upstream, security=security)

    def start(self) -> int:
        """Listen, and begin to join the manager; the port. OSError if that can't be."""
        self._background.run(self._node.start())
        Proxy.current = self
        return self._node.port

    def wait_joined(self, timeout: float | None = None) -> bool:
        return self._background.run(self._node.wait_joined(timeout))

    def close(self) -> None:
        if Proxy.current is self:
            Proxy.current = None
        self._background.run(self._node.close())
