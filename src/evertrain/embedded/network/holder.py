"""The process that holds a cluster's network: makes namespaces and cables, and takes all of it along when it ends.

On the standard library alone, with a single thread: who enters a namespace must be one. It is asked over a socket of
messages (JSON) and answers each with one, {"error": …} and what else there is to say, descriptors attached. Its first
word says whether the kernel allows all this: {"error": "", "block": …, "machine": …}; `machine` is why this machine
itself can't reach the pods, empty if it can.

    {"do": "node", "index": …}                               a node, with its bridges and NICs
    {"do": "pod", "pod": …, "index": …, "addresses": […]}    → the descriptor of its namespace
    {"do": "enter", "index": …}                              → the same of the node itself
    {"do": "forget", "pod": …}                               it may go when nothing runs in it any more
    {"do": "address", "address": …}                          one of the cluster's own, of a Service that it serves
    {"do": "listen", "host": …, "port": …}                   → a socket that listens there
    {"do": "socket", "index": …}                             → one that can connect to pods, from that node
    {"do": "plug", "index": …, "joined": …, "pulled": […], "delay": …, "loss": …}
                                                             the node's cables: if it is not joined its packets are lost
                                                             and nobody is told; these NICs, and those of pods there,
                                                             have none; packets are late by so many seconds, or lost
    {"do": "traffic", "index": …}                            bytes through each NIC, as the node sees them
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import ipaddress
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from evertrain.embedded import kernel
from evertrain.embedded.network import plan
from evertrain.embedded.network.rtnetlink import Rtnetlink

MAX_MESSAGE = 65536
OWN_NAMESPACE = "/proc/self/ns/net"
BACKLOG = 1024
RAILS = range(plan.RAILS)
MACHINE = "eth-machine"
PLUG = "pod"
ALONE = 32
"""The prefix of an address that says nothing about others."""
ARP, IPV4, ETHERNET, ARP_REQUEST = 0x0806, 0x0800, 1, 1
LOCK = "\0evertrain-network-{}"


def main(arguments: list[str]) -> None:
    """The descriptor of the socket, the process id of who started us, the block of addresses of the last time."""
    connection = socket.socket(fileno=int(arguments[0]))
    kernel.die_with_parent(signal.SIGKILL, int(arguments[1]))
    kernel.raise_limit_of_descriptors()
    os.setsid()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is for the cluster, which ends us in order
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(connection, arguments[2])


def serve(connection: socket.socket, last: str) -> None:
    try:
        lock, block = _claim(last)
        world = World(block)
    except OSError as error:
        _answer(connection, {"error": error.strerror or str(error)}, [])
        return
    _answer(connection, {"error": "", "block": str(block.network), "machine": world.unreachable}, [world.users])
    gc.collect()
    gc.freeze()
    while data := connection.recv(MAX_MESSAGE):
        try:
            answer, descriptors = world.obey(json.loads(data))
        except OSError as error:
            answer, descriptors = {"error": error.strerror or str(error), "number": error.errno}, []
        except Exception as error:  # an order that we don't understand is no reason to take everybody's network away
            answer, descriptors = {"error": repr(error)}, []
        _answer(connection, {"error": ""} | answer, descriptors)
        for descriptor in answer.get("passed", ()):
            os.close(descriptor)
    lock.close()


def _claim(last: str) -> tuple[socket.socket, plan.Block]:
    """A block of addresses that nobody else here uses; it is ours as long as the socket is open."""
    machine = Rtnetlink()
    used = machine.routes()
    machine.close()
    for block in plan.blocks(used, last):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(LOCK.format(block.network))
            return lock, block
        except OSError:
            lock.close()
    raise OSError("this machine has routes to all addresses that are for networks like this")


def _answer(connection: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([json.dumps(message).encode()], attached)


@dataclass
class Namespace:
    """Of a network. `inside` is a connection to the kernel that was opened in it."""

    descriptor: int
    inside: Rtnetlink

    @classmethod
    def here(cls) -> Namespace:
        return cls(os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC), Rtnetlink())

    def close(self) -> None:
        self.inside.close()
        os.close(self.descriptor)


@dataclass
class Node:
    space: Namespace
    pods: int = 0
    """How many there were; the ends of their cables are numbered."""
    pulled: set[int] = field(default_factory=set)
    """Rails whose NIC has no cable."""
    worse: tuple[float, float] = (0.0, 0.0)
    """Delay and loss of all NICs, each way."""


class World:
    """Raises OSError if the kernel allows no such thing."""

    def __init__(self, block: plan.Block) -> None:
        self.block = block
        machine = Namespace.here()
        self.users, rights = _become_administrator()
        kernel.unshare(kernel.CLONE_NEWNET)
        self.space = Namespace.here()
        self._nodes: dict[int, Node] = {}
        self._pods: dict[str, int] = {}
        self._services: dict[str, str] = {}
        """Which pod has the address of a Service."""
        _no_ipv6()
        self.space.inside.switch("lo", True)
        for rail in RAILS:
            own = self.block.second(block.switch) if rail else block.switch
            self.space.inside.add_bridge(_switch(rail), plan.hardware(own))
            self.space.inside.switch(_switch(rail), True)
        self.space.inside.add_address(_switch(0), block.switch, block.rails[0].prefixlen)
        self.unreachable = _refusal(lambda: self._connect(machine)) if rights else "only root may connect the two"
        machine.close()

    def obey(self, order: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        match order["do"]:
            case "node":
                self._add_node(order["index"])
            case "pod":
                return {}, [self._add_pod(order["pod"], order["index"], order["addresses"])]
            case "enter":
                return {}, [self._node(order["index"]).space.descriptor]
            case "forget":
                descriptor = self._pods.pop(order["pod"], None)
                if descriptor is not None:
                    os.close(descriptor)
                self._services = {address: pod for address, pod in self._services.items() if pod != order["pod"]}
            case "address":
                self._own_address(order["address"])
            case "listen":
                made = _listen(order["host"], order["port"]).detach()
                return {"passed": [made]}, [made]
            case "socket":
                made = self._socket_of(order["index"])
                return {"passed": [made]}, [made]
            case "plug":
                self._worsen(order["index"], order["delay"], order["loss"])  # comes first: it may not be possible
                if not order["joined"]:
                    self._plug(order["index"], joined=False)
                self._set_cables(order["index"], set(order["pulled"]))
                if order["joined"]:
                    self._plug(order["index"], joined=True)
            case "traffic":
                return {"nics": self._traffic(order["index"])}, []
        return {}, []

    def _node(self, index: int) -> Node:
        """Raises OSError if nobody has made it yet."""
        if index not in self._nodes:
            raise OSError(errno.ENODEV, f"node {index} has no network yet")
        return self._nodes[index]

    def _socket_of(self, index: int) -> int:
        with self._within(self._node(index).space.descriptor):
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP).detach()

    @contextlib.contextmanager
    def _within(self, space: int) -> Iterator[None]:
        kernel.enter(space, kernel.CLONE_NEWNET)
        try:
            yield
        finally:
            kernel.enter(self.space.descriptor, kernel.CLONE_NEWNET)

    def _connect(self, machine: Namespace) -> None:
        """This machine gets a NIC at the switch of the first network."""
        name = "ev" + self.block.network.network_address.packed[1:2].hex() + format(os.getpid() & 0xFFFFFF, "x")
        self.space.inside.add_cable(MACHINE, name, machine.descriptor)
        self.space.inside.plug(MACHINE, _switch(0))
        self.space.inside.switch(MACHINE, True)
        machine.inside.switch(name, True)
        machine.inside.add_address(name, self.block.machine, self.block.rails[0].prefixlen)
        machine.inside.add_route(str(self.block.plan.services), name)

    def _own_address(self, address: str) -> None:
        with contextlib.suppress(FileExistsError):
            self.space.inside.add_address(_switch(0), address, self.block.plan.services.prefixlen)

    def _add_node(self, index: int) -> None:
        """Made anew if there was one: whatever was plugged into that one is cut off."""
        if index in self._nodes:
            self._nodes.pop(index).space.close()
            for rail in RAILS:
                self._unplug(index, rail)
        with self._new() as space:
            for rail in RAILS:
                self.space.inside.add_cable(_port(index, rail), _nic(rail), space.descriptor)
                self.space.inside.plug(_port(index, rail), _switch(rail))
                self.space.inside.switch(_port(index, rail), True)
                address = self.block.plan.host(index)
                own = self.block.second(address) if rail else address
                space.inside.add_bridge(_bridge(rail), plan.hardware(own))
                space.inside.plug(_nic(rail), _bridge(rail))
                for name in (_nic(rail), _bridge(rail)):
                    space.inside.switch(name, True)
                space.inside.add_address(_bridge(rail), own, self.block.rails[rail].prefixlen)
            space.inside.add_route(str(self.block.plan.services), _bridge(0))
        self._nodes[index] = Node(space)

    def _unplug(self, index: int, rail: int) -> None:
        with contextlib.suppress(OSError):  # its other end is gone, and so is this one, or will be in a moment
            self.space.inside.remove(_port(index, rail))

    def _add_pod(self, pod: str, index: int, addresses: list[str]) -> int:
        """The first address is the pod's own, the others are those of Services."""
        if (descriptor := self._pods.pop(pod, None)) is not None:
            os.close(descriptor)
        node = self._node(index)
        node.pods += 1
        own, *services = addresses
        for address in services:
            self._withdraw(address)
        with self._new() as space:
            for rail in RAILS:
                name, plug = _eth(rail), f"{PLUG}{node.pods}-{rail}"
                hardware = plan.hardware(self.block.second(own) if rail else own)
                node.space.inside.add_cable(plug, name, space.descriptor, hardware)
                node.space.inside.plug(plug, _bridge(rail))
                node.space.inside.switch(plug, rail not in node.pulled)
                space.inside.switch(name, True)
            rails = self.block.rails
            space.inside.add_address(_eth(0), own, rails[0].prefixlen)
            for address in services:
                space.inside.add_address(_eth(0), address, ALONE)
            space.inside.add_address(_eth(1), self.block.second(own), rails[1].prefixlen)
            space.inside.add_route(str(self.block.plan.services), _eth(0))
        space.inside.close()
        self._pods[pod] = space.descriptor
        for address in services:
            self._services[address] = pod
            self._announce(address, plan.hardware(own))
        return space.descriptor

    def _withdraw(self, address: str) -> None:
        """The address of a Service, from the pod that has it so far. That may be one which nobody can reach, and which
        doesn't know that it is no more."""
        descriptor = self._pods.get(self._services.pop(address, ""))
        if descriptor is None:
            return
        with self._within(descriptor):
            before = Rtnetlink()
        with contextlib.suppress(OSError):
            before.remove_address(_eth(0), address, ALONE)
        before.close()

    def _announce(self, address: str, hardware: bytes) -> None:
        """To all nodes and pods: who has the address now (ARP). They would go on for half a minute and more with who
        had it before. It comes from the switch, for bridges believe that whoever says something is where it comes
        from, and it can't come from the pod yet: its port of the node's bridge is not open at once."""
        packed, sender = ipaddress.IPv4Address(address).packed, plan.hardware(self.block.switch)
        head = struct.pack("!6s6sHHHBBH", b"\xff" * 6, sender, ARP, ETHERNET, IPV4, 6, 4, ARP_REQUEST)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as made:
            made.bind((_switch(0), 0))
            made.send(head + hardware + packed + bytes(6) + packed)

    @contextlib.contextmanager
    def _new(self) -> Iterator[Namespace]:
        """A namespace that stays if all goes well in it."""
        kernel.unshare(kernel.CLONE_NEWNET)
        try:
            _no_ipv6()
            space = Namespace.here()
        finally:
            kernel.enter(self.space.descriptor, kernel.CLONE_NEWNET)
        try:
            space.inside.switch("lo", True)
            yield space
        except BaseException:
            space.close()
            raise

    def _plug(self, index: int, *, joined: bool) -> None:
        """The other ends of its cables into the switches, or out of them: the NICs don't notice."""
        for rail in RAILS:
            self.space.inside.plug(_port(index, rail), _switch(rail) if joined else "")

    def _set_cables(self, index: int, pulled: set[int]) -> None:
        """Pods have a share of the NIC: where it has no cable, neither have they."""
        node = self._node(index)
        changed, node.pulled = node.pulled ^ pulled, pulled
        plugs = [name for name in node.space.inside.interfaces() if name.startswith(PLUG)]
        for rail in changed:
            self.space.inside.switch(_port(index, rail), rail not in pulled)
            for plug in plugs:
                if plug.endswith(f"-{rail}"):
                    with contextlib.suppress(OSError):  # its pod has just ended
                        node.space.inside.switch(plug, rail not in pulled)

    def _worsen(self, index: int, delay: float, loss: float) -> None:
        node = self._node(index)
        if node.worse == (delay, loss):
            return
        for rail in RAILS:
            for inside, name in ((self.space.inside, _port(index, rail)), (node.space.inside, _nic(rail))):
                if delay or loss:
                    inside.worsen(name, delay, loss)
                else:
                    inside.worsen_no_more(name)
        node.worse = delay, loss

    def _traffic(self, index: int) -> dict[str, dict[str, Any]]:
        found = self._node(index).space.inside.interfaces()
        return {_nic(rail): {"received": found[_nic(rail)].received, "sent": found[_nic(rail)].sent} for rail in RAILS}


def _switch(rail: int) -> str:
    return f"switch{rail}"


def _port(index: int, rail: int) -> str:
    return f"node{index}-{rail}"


def _nic(rail: int) -> str:
    return f"nic{rail}"


def _bridge(rail: int) -> str:
    return f"bridge{rail}"


def _eth(rail: int) -> str:
    return f"eth{rail}"


def _become_administrator() -> tuple[int, bool]:
    """Of networks: in a user namespace of our own if we are not that of the machine. Its descriptor, and whether we
    may change the machine's own network, too."""
    rights = _may_change_networks()
    if not rights:
        kernel.become_own_user_namespace()
    return os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC), rights


def _may_change_networks() -> bool:
    """And mounts: who starts the containers needs both. What a child may do, we may do."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWNS)
            kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
            Rtnetlink().switch("lo", True)
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _no_ipv6() -> None:
    """In the namespace where we are: nobody uses it, and it would search for neighbours and routers all the time."""
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w") as file:
        file.write("1")


def _refusal(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _listen(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


if __name__ == "__main__":
    main(sys.argv[1:])
