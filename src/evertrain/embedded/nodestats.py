"""What a node counts, as one asks a kubelet through the API server: GET nodes/NAME/proxy/stats/summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from evertrain.kube.port import Object

SUMMARY = "stats/summary"
"""Behind `proxy`."""


@dataclass(frozen=True)
class Traffic:
    """Bytes through a NIC, since its node was made."""

    received: int
    sent: int


class StatsUnavailable(Exception):
    """The node doesn't run; the message is for the user."""


class StatsSource(Protocol):
    """Whoever runs the nodes, given the name of one. Raises StatsUnavailable."""

    async def __call__(self, node: str) -> Object: ...


async def no_stats(node: str) -> Object:
    """Of a server without nodes."""
    raise StatsUnavailable(f"node {node} does not run")


def summary(node: str, time: str, nics: Mapping[str, Traffic]) -> Object:
    """In the kubelet's words. Without NICs of its own a node has no network to tell of."""
    found: Object = {"nodeName": node}
    if nics:
        interfaces = [{"name": name, "rxBytes": nic.received, "txBytes": nic.sent} for name, nic in nics.items()]
        found["network"] = {"time": time, **interfaces[0], "interfaces": interfaces}
    return {"node": found, "pods": []}


def traffic(summary: Object) -> dict[str, Traffic]:
    """By NIC, of a summary; empty if the node has none."""
    interfaces = (summary["node"].get("network") or {}).get("interfaces") or []
    return {each["name"]: Traffic(each.get("rxBytes", 0), each.get("txBytes", 0)) for each in interfaces}
