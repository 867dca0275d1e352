"""A bridge, and a cable from it to each node. All of it is inside of this process's network namespace."""

from __future__ import annotations

import contextlib
import subprocess

NODES = "10.77.0"
"""Of the bridge (.1) and the nodes (.10 and up)."""
PODS = "10.78"
"""Each node has the 256 addresses after its number."""
SERVICES = "10.79"
HERE = f"{NODES}.1"
BRIDGE = "nodes"


def ip(*command: str, environment: dict[str, str]) -> None:
    done = subprocess.run(["ip", *command], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(command)}: {done.stderr.strip()}")


def node_address(number: int) -> str:
    return f"{NODES}.{10 + number}"


def pod_range(number: int) -> str:
    return f"{PODS}.{number}.0/24"


class Network:
    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._ip("link", "set", "lo", "up")
        self._ip("link", "add", BRIDGE, "type", "bridge")
        self._ip("address", "add", f"{HERE}/24", "dev", BRIDGE)
        self._ip("link", "set", BRIDGE, "up")

    def _ip(self, *command: str) -> None:
        ip(*command, environment=self._environment)

    def plug_in(self, number: int, pid: int) -> None:
        """A node, by the id of a process in its namespace, which finds an interface `eth0`."""
        cable = self._cable(number)
        with contextlib.suppress(RuntimeError):  # of a node that was killed; the kernel removes it in its own time
            self._ip("link", "delete", cable)
        self._ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._ip("link", "set", cable, "master", BRIDGE)
        self._ip("link", "set", cable, "up")
        self._ip("route", "replace", pod_range(number), "via", node_address(number))

    def cut(self, number: int) -> None:
        self._ip("link", "set", self._cable(number), "down")

    def mend(self, number: int) -> None:
        self._ip("link", "set", self._cable(number), "up")

    @staticmethod
    def _cable(number: int) -> str:
        return f"to-node-{number}"


def settle(number: int, nodes: int, environment: dict[str, str]) -> None:
    """In a node: its address, and the ways to the pods of the others."""
    ip("link", "set", "lo", "up", environment=environment)
    ip("address", "add", f"{node_address(number)}/24", "dev", "eth0", environment=environment)
    ip("link", "set", "eth0", "up", environment=environment)
    ip("route", "add", "default", "via", HERE, environment=environment)
    for other in range(nodes):
        if other != number:
            ip("route", "add", pod_range(other), "via", node_address(other), environment=environment)
    with open("/proc/sys/net/ipv4/ip_forward", "w") as file:
        file.write("1")
