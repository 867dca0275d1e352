"""The rendezvous store of a generation, kept by the controller and reached over the rank's own link.

torch's process groups find each other through a `Store`. Its usual implementation is a TCP server inside one of the
ranks, which makes that rank special, and its waits can't be cancelled: a client of a silent server blocks beyond any
timeout. This one has no server of its own. What a group sets and waits for goes over the link that the rank holds
anyway, the controller keeps it, and a wait that has become pointless ends with the exception that the link raises in
it: the link knows first when the controller calls everybody out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed import Store

_CHECK = 0.25
"""Seconds that the answer to "does this key exist" may take: the link only knows how to wait for a key."""


class StoreLink(Protocol):
    """The part of a link to the controller that carries a store."""

    def store_set(self, key: str, value: bytes) -> None:
        """Set a key; returns before it is stored."""

    def store_get(self, keys: list[str], timeout: float) -> list[bytes]:
        """Wait until all keys exist. Raises TimeoutError, or what cancelled the wait."""

    def store_add(self, key: str, amount: int) -> int:
        """Add to a counter, whose value can be read as decimal digits, and return the sum."""


class LinkStore(Store):
    """A torch store over a link. All of its keys start with `prefix`, so that generations can't mix."""

    def __init__(self, link: StoreLink, prefix: str, timeout: float) -> None:
        super().__init__()
        self._link = link
        self._prefix = prefix
        self._timeout = timeout

    # What process groups and their rendezvous use. torch calls these by name from C++ as well.

    def set(self, key: str, value: str | bytes) -> None:
        self._link.store_set(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._wait_for([key], self._timeout)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for(keys, self._timeout if timeout is None else timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        return self._link.store_add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        try:
            self._wait_for(keys, _CHECK)
        except TimeoutError:
            return False
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait_for(keys, self._timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout)

    def has_extended_api(self) -> bool:
        """torch asks before it uses `append`, `multi_get` or `multi_set`; there is no `append` here."""
        return False

    def delete_key(self, key: str) -> bool:
        """Nothing is deleted: the controller drops all keys of a generation with the generation."""
        return False

    def append(self, key: str, value: str | bytes) -> None:
        raise NotImplementedError("the rendezvous store can't append; use set or add")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        raise NotImplementedError("the rendezvous store has no compare_set; use add for a counter")

    def num_keys(self) -> int:
        raise NotImplementedError("the rendezvous store doesn't count its keys")

    # The names under which C++ looks for some of them.
    deleteKey = delete_key
    compareSet = compare_set
    getNumKeys = num_keys

    def _wait_for(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        return self._link.store_get([self._prefix + key for key in keys], timeout)
