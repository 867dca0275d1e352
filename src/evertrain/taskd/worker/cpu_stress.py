"""A stress test where there is no NPU: does the processor compute right, and does data arrive as it was sent?

It runs beside a paused training, for some seconds, and on whole numbers, so that right is right to the last bit.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
from typing import Any

OK, FAULT_FOUND = 0, 2
VARIABLE = "TASKD_STRESS_SECONDS"
DEFAULT, LONGEST = 5.0, 240.0
"""Seconds that a test takes; well below the limit after which it is given up."""
_BYTES = 16 << 20
_SIZE, _LARGEST = 512, 64
"""Of a matrix and its numbers: sums stay below 2^24, up to which a float is exact whatever the order of additions."""


def detect(op: int) -> int:
    until = time.monotonic() + seconds()
    rounds = _computing() if op == 0 else _transferring()
    while True:
        if not next(rounds):
            return FAULT_FOUND
        if time.monotonic() >= until:
            return OK


def seconds() -> float:
    try:
        wanted = float(os.environ.get(VARIABLE, ""))
    except ValueError:
        return DEFAULT
    return min(max(wanted, 0.0), LONGEST)


def _computing() -> Any:
    """The same chain of hashes again and again, and products of matrices in both units that can make them."""
    first = _chain()
    torch = sys.modules.get("torch")
    while True:
        yield _chain() == first and (torch is None or _products_agree(torch))


def _chain() -> bytes:
    block = bytes(range(256)) * 4096
    digest = b""
    for _ in range(16):
        digest = hashlib.sha256(digest + block).digest()
    return digest


def _products_agree(torch: Any) -> bool:
    """A product of whole numbers, by floating-point units and by those for integers."""
    generator = torch.Generator().manual_seed(time.monotonic_ns() & 0xFFFFFFFF)
    left, right = (
        torch.randint(-_LARGEST, _LARGEST, (_SIZE, _SIZE), generator=generator, dtype=torch.int32) for _ in range(2)
    )
    return bool(torch.equal((left.float() @ right.float()).int(), left @ right))


def _transferring() -> Any:
    """Random bytes through a socket and back."""
    while True:
        data = os.urandom(_BYTES)
        left, right = socket.socketpair()
        with left, right:
            sender = threading.Thread(target=left.sendall, args=(data,))
            sender.start()
            received = bytearray()
            while len(received) < len(data):
                received += right.recv(1 << 20)
            sender.join()
        yield hashlib.sha256(received).digest() == hashlib.sha256(data).digest()
