"""Which of its two network links a job uses.

Where nodes have NICs, their counters tell; where they share the network of this machine, the example's links are two
ranges of loopback addresses, and the system's table of connections tells.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

NICS = {"primary": "nic0", "backup": "nic1"}
NETWORKS = {"primary": IPv4Network("127.101.0.0/16"), "backup": IPv4Network("127.102.0.0/16")}
_TABLE = Path("/proc/net/tcp")
_ESTABLISHED = "01"


def busiest(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda name: counts[name])


def connections(network: IPv4Network, pids: Iterable[int]) -> int:
    """That these processes have open and that begin in this network."""
    own = {target for pid in pids for target in _descriptors(pid)}
    # The kernel hands the table over in pieces, and rows may be lost or double where it changes in between.
    before, found = None, _sockets(own, network)
    while found != before:
        before, found = found, _sockets(own, network)
    return len(found)


def _sockets(own: set[str], network: IPv4Network) -> set[str]:
    rows = (line.split() for line in _TABLE.read_text().splitlines()[1:])
    sockets = {f"socket:[{row[9]}]": _address(row[1]) for row in rows if row[3] == _ESTABLISHED}
    return {name for name in own & sockets.keys() if sockets[name] in network}


def _descriptors(pid: int) -> set[str]:
    """What the open files of a process are."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(file))
    return found


def _address(text: str) -> IPv4Address:
    """The kernel writes the four bytes as one number, in this machine's order."""
    return IPv4Address(int(text.partition(":")[0], 16).to_bytes(4, sys.byteorder))
