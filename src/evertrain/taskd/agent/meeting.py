"""How an agent waits for those of other nodes without being deaf meanwhile."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

LOOK = 0.02
"""Seconds between looks at what other nodes write."""
_ANSWER = 1.0


class PatientStore:
    """torchrun's store with waits that can be left: `pause` is called all the time, and may raise."""

    def __init__(self, store: Any, pause: Callable[[float], None]) -> None:
        self.inner, self._pause = store, pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self.inner.get(key))

    def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        keys = list(keys)
        self.wait(keys)
        return list(self.inner.multi_get(keys))

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        keys = list(keys)
        end = time.monotonic() + (self.inner.timeout if timeout is None else timeout).total_seconds()
        while not self.inner.check(keys):
            if time.monotonic() >= end:
                self.inner.wait(keys, timedelta(milliseconds=1))  # raises as torch does
            self._pause(LOOK)


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there. torch itself would wait until somebody does, and be deaf meanwhile."""
    try:
        socket.create_connection((host, port), _ANSWER).close()
    except OSError:
        return False
    return True


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def hosts_store(endpoint: str, pod_ip: str, rank: str) -> bool | None:
    """Whether this pod has the store where agents meet by c10d; None if torchrun can see that for itself.

    Pods that share a machine have loopback addresses. For torchrun any of those is its own, so the first that comes
    would have the store, and take it along when it goes.
    """
    host = endpoint.rpartition(":")[0].strip("[]") if ":" in endpoint else endpoint
    if host == "localhost":
        host = "127.0.0.1"
    try:
        shared = all(ipaddress.ip_address(each).is_loopback for each in (host, pod_ip))
    except ValueError:
        return None
    return int(rank) == 0 if shared and rank.isdecimal() else None
