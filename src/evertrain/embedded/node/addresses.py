"""Addresses on the loopback interface, one for each node and pod. Pure.

Node number i has the addresses 127.64.0.0/24 + i: .1 is the node itself, then come its pods, from .200 on its chips. A
pod that a Service selects gets the Service's address if no other pod has it: nothing here forwards from one to the
other, and so whoever connects to the Service reaches the pod.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

from evertrain.embedded import matching
from evertrain.kube.port import Object

RANGE = IPv4Network("127.64.0.0/11")
FIRST_POD, FIRST_CHIP = 2, 200
MAX_NODES = RANGE.num_addresses // 256


class Exhausted(Exception):
    """No address is left."""


def network(index: int) -> IPv4Network:
    if not 0 <= index < MAX_NODES:
        raise ValueError(f"a cluster has at most {MAX_NODES} nodes")
    return IPv4Network((int(RANGE.network_address) + 256 * index, 24))


def host(index: int) -> str:
    return str(network(index)[1])


def chip(index: int, number: int) -> str:
    """Empty for chips beyond those that have one."""
    return str(network(index)[FIRST_CHIP + number]) if FIRST_CHIP + number < 255 else ""


class Addresses:
    """Who has which address. Shared by all nodes."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}
        self._next: dict[int, int] = {}

    def take(self, uid: str, index: int, wishes: Iterable[str] = ()) -> str:
        """The first wish that is free, else a fresh one of the node's."""
        for wish in wishes:
            if _is_loopback(wish) and self._holders.get(wish, uid) == uid:
                self._holders[wish] = uid
                return wish
        own = network(index)
        span = FIRST_CHIP - FIRST_POD
        # Goes round, so that an address isn't given again right after its pod ended.
        start = self._next.get(index, 0)
        for offset in range(span):
            number = (start + offset) % span
            address = str(own[FIRST_POD + number])
            if self._holders.get(address, uid) == uid:
                self._next[index] = number + 1
                self._holders[address] = uid
                return address
        raise Exhausted(f"all {span} addresses of the node are in use")

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


def _is_loopback(address: str) -> bool:
    try:
        return IPv4Address(address).is_loopback
    except ValueError:
        return False
