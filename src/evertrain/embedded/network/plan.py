"""Which addresses a cluster uses. Pure.

Node number i has the i-th 256 addresses of the cluster's: .1 is the node, then come its pods, from .200 on its chips.
Services have a range of their own.

Where pods share the network of this machine, all of these are addresses of its loopback interface. Where they have
one of their own, they are of a block of 2^18 addresses, in quarters: pods by their first NIC, pods by their second,
Services, and one that stays empty. Blocks that this machine has a route to, or another cluster of it has, are left
alone. They are out of 10.0.0.0/8; the other ranges are for machines which reach all of that by a tunnel, say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

EVERYTHING = IPv4Network("10.0.0.0/8")
ELSE = (IPv4Network("100.64.0.0/10"), IPv4Network("172.16.0.0/12"))
BLOCK = 14
FIRST = 17
"""Neither the first block nor the last, which people give to networks of their own."""
RAILS = 2
MOST_NODES = 255
"""Of a block: in a quarter, without the last 256 addresses."""
NODE, FIRST_POD, FIRST_CHIP, LAST = 1, 2, 200, 254
SWITCH, MACHINE = 256 * 255 + 1, 256 * 255 + 2
"""Numbers of two more addresses in the first quarter: of the cluster's own servers, and of this machine."""


@dataclass(frozen=True)
class Plan:
    nodes: IPv4Network
    services: IPv4Network
    spare: int = 0
    """At the end of the first, so many times 256 addresses are no node's."""

    @property
    def max_nodes(self) -> int:
        return self.nodes.num_addresses // 256 - self.spare

    def of_node(self, index: int) -> IPv4Network:
        if not 0 <= index < self.max_nodes:
            raise ValueError(f"a cluster has at most {self.max_nodes} nodes")
        return IPv4Network((int(self.nodes.network_address) + 256 * index, 24))

    def host(self, index: int) -> str:
        return str(self.of_node(index)[NODE])

    def chip(self, index: int, number: int) -> str:
        """Empty for chips beyond those that have one."""
        return str(self.of_node(index)[FIRST_CHIP + number]) if FIRST_CHIP + number <= LAST else ""

    def pods(self, index: int) -> Sequence[str]:
        network = self.of_node(index)
        return [str(network[number]) for number in range(FIRST_POD, FIRST_CHIP)]

    def __contains__(self, address: str) -> bool:
        try:
            found = IPv4Address(address)
        except ValueError:
            return False
        return found in self.nodes or found in self.services


LOOPBACK = Plan(IPv4Network("127.64.0.0/11"), IPv4Network("127.96.0.0/11"))


@dataclass(frozen=True)
class Block:
    network: IPv4Network

    @property
    def plan(self) -> Plan:
        return Plan(self.rails[0], tuple(self.network.subnets(new_prefix=16))[RAILS], spare=1)

    @property
    def rails(self) -> tuple[IPv4Network, ...]:
        return tuple(self.network.subnets(new_prefix=16))[:RAILS]

    @property
    def switch(self) -> str:
        return str(self.rails[0][SWITCH])

    @property
    def machine(self) -> str:
        return str(self.rails[0][MACHINE])

    def second(self, address: str) -> str:
        """The address by the other NIC of whoever has this one."""
        return str(IPv4Address(int(IPv4Address(address)) + self.rails[0].num_addresses))


def blocks(used: Collection[IPv4Network], last: str = "") -> Iterator[Block]:
    """Those to try, in this order: that of the last time first. `used`: where this machine has routes to."""
    found = [Block(network) for network in EVERYTHING.subnets(new_prefix=BLOCK)]
    found = [*found[FIRST:-1], *found[1:FIRST]]
    found += [Block(network) for other in ELSE for network in other.subnets(new_prefix=BLOCK)]
    found.sort(key=lambda block: str(block.network) != last)
    for block in found:
        if not any(block.network.overlaps(each) for each in used):
            yield block


def hardware(address: str) -> bytes:
    """The hardware address of the NIC that has this one, always the same: nobody who knew it has to learn another when
    its owner is made anew."""
    return b"\x02\x00" + IPv4Address(address).packed
