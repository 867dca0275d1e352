"""Who of a cluster's pods has which address, and what each finds in its /etc/hosts. Pure.

A pod that a Service selects gets the Service's address if no other pod has it: nothing here forwards from one to the
other, and so whoever connects to the Service reaches the pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ipaddress import IPv4Address

from evertrain.embedded import matching
from evertrain.embedded.network.plan import LOOPBACK, Plan
from evertrain.kube.port import Object


class Exhausted(Exception):
    """No address is left."""


class Addresses:
    """Who has which address. Shared by all nodes."""

    def __init__(self, plan: Plan = LOOPBACK, exists: Callable[[str], bool] = lambda uid: True) -> None:
        """`exists`: is there still a pod with that uid? What is left of one on a node that can't be reached doesn't
        count."""
        self.plan = plan
        self._exists = exists
        self._holders: dict[str, str] = {}
        self._next: dict[int, int] = {}

    def take(self, uid: str, index: int, wishes: Iterable[str] = ()) -> str:
        """The first wish that is free, else one of the node's."""
        for wish in wishes:
            holder = self._holders.get(wish, uid)
            if wish in self.plan and (holder == uid or not self._exists(holder)):
                self._holders[wish] = uid
                return wish
        return self.own(uid, index)

    def own(self, uid: str, index: int) -> str:
        """One of the node's: that which it has already, else a fresh one."""
        nodes = self.plan.of_node(index)
        for address, holder in self._holders.items():
            if holder == uid and IPv4Address(address) in nodes:
                return address
        own = self.plan.pods(index)
        # Goes round, so that an address isn't given again right after its pod ended.
        start = self._next.get(index, 0)
        for offset in range(len(own)):
            number = (start + offset) % len(own)
            if own[number] not in self._holders:
                self._next[index] = number + 1
                self._holders[own[number]] = uid
                return own[number]
        raise Exhausted(f"all {len(own)} addresses of the node are in use")

    def release(self, uid: str) -> None:
        for address in [address for address, holder in self._holders.items() if holder == uid]:
            del self._holders[address]


def of_services(pod: Object, services: Iterable[Object]) -> list[str]:
    """Addresses of the Services that select the pod, by name."""
    labels, namespace = pod["metadata"].get("labels") or {}, pod["metadata"].get("namespace")
    found = []
    for service in services:
        selector = (service.get("spec") or {}).get("selector")
        address = (service.get("spec") or {}).get("clusterIP")
        same = service["metadata"].get("namespace") == namespace
        if selector and same and address and matching.matches_labels({"matchLabels": selector}, labels):
            found.append((service["metadata"]["name"], str(address)))
    return [address for _, address in sorted(found)]


def hosts(pod: Object, address: str, services: Iterable[Object]) -> str:
    """The pod's /etc/hosts. There is no name server: the Services are in it, by all the names they would have."""
    name, namespace = pod["metadata"]["name"], pod["metadata"].get("namespace", "")
    own = (pod.get("spec") or {}).get("hostname") or name
    lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost ip6-loopback", f"{address}\t{own}"]
    for alias in (pod.get("spec") or {}).get("hostAliases") or []:
        lines.append(f"{alias.get('ip', '')}\t{' '.join(alias.get('hostnames') or [])}")
    for service in services:
        target = (service.get("spec") or {}).get("clusterIP")
        if target and target != "None":
            short, where = service["metadata"]["name"], service["metadata"].get("namespace", "")
            names = [f"{short}.{where}.svc.cluster.local", f"{short}.{where}.svc", f"{short}.{where}"]
            lines.append(f"{target}\t{' '.join([*names, *([short] if where == namespace else [])])}")
    return "\n".join(lines) + "\n"
