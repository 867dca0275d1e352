"""Ports that nobody listens on, for what is told its port before it starts.

Seconds pass until such a port is used. They are therefore below those that the system hands out, of which some other
test's process asks for dozens meanwhile, and each process that runs tests has a block of its own, of which it gives
none out again before all the others: two that chose at random would choose the same one once in a few hundred tests.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import socket
from collections.abc import Iterator

RANGE = range(12_000, 29_000)
BLOCK = 500


@functools.cache
def claim() -> Iterator[int]:
    """A block, taken as long as a socket with its name is open: until this process ends."""
    for start in RANGE[::BLOCK]:
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0evertrain-tests-ports-{start}")
        except OSError:
            name.close()
            continue
        atexit.register(name.close)  # which also keeps it
        return _free(range(start, start + BLOCK))
    raise RuntimeError("all blocks of ports are taken by other test processes")


def _free(block: range) -> Iterator[int]:
    for port in itertools.cycle(block):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))  # free on all addresses: pods have several of loopback
            except OSError:
                continue
        yield port


def free_ports(count: int) -> list[int]:
    return list(itertools.islice(claim(), count))


def free_port() -> int:
    return next(claim())
