"""A node's way to the API server, which is gone while the node is cut off from the network."""

from __future__ import annotations

import errno
from typing import Any, cast

from evertrain.kube.port import Kube


class Reach:
    def __init__(self) -> None:
        self.cut = False

    def over(self, kube: Kube) -> Kube:
        """The same, as it looks from the node."""
        return cast(Kube, _Over(self, kube))


class _Over:
    def __init__(self, reach: Reach, kube: Kube) -> None:
        self._reach = reach
        self._kube = kube

    def __getattr__(self, name: str) -> Any:
        # Each request is looked up anew. One that is on its way when the node is cut off arrives.
        if self._reach.cut:
            raise OSError(errno.EHOSTUNREACH, "the node is cut off from the network")
        return getattr(self._kube, name)
