"""The store over a link: what torch's groups do with it, and how a wait in it ends."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from evertrain.torch import backends, groups
from evertrain.torch.interrupt import Interrupted
from evertrain.torch.store import LinkStore


class Cancelled(Exception):
    pass


class Link:
    """A controller's keys in a dict, shared by the ranks of a test, which are threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._cancelled = False

    def store_set(self, key: str, value: bytes) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def store_get(self, keys: list[str], timeout: float) -> list[bytes]:
        with self._changed:
            there = self._changed.wait_for(lambda: self._cancelled or all(k in self.values for k in keys), timeout)
            if self._cancelled:
                raise Cancelled("called out")
            if not there:
                raise TimeoutError(f"no {keys}")
            return [self.values[key] for key in keys]

    def store_add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()


def test_keys_carry_the_prefix_of_the_generation() -> None:
    link = Link()
    store = LinkStore(link, "g7/", timeout=1.0)
    store.set("a", "text")
    store.set("b", b"bytes")
    store.multi_set(["c", "d"], ["1", "2"])
    assert link.values == {"g7/a": b"text", "g7/b": b"bytes", "g7/c": b"1", "g7/d": b"2"}
    assert store.get("a") == b"text"
    assert store.multi_get(["b", "c"]) == [b"bytes", b"1"]
    assert LinkStore(link, "g8/", timeout=0.05).check(["a"]) is False
    assert store.check(["a", "b"]) is True


def test_counters_add_up_and_can_be_read() -> None:
    store = LinkStore(Link(), "g/", timeout=1.0)
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    assert store.get("n") == b"5"


def test_torch_reaches_it_from_its_own_side() -> None:
    """A PrefixStore is C++: it calls the methods by name."""
    store = LinkStore(Link(), "g/", timeout=1.0)
    outer = dist.PrefixStore("outer", store)
    outer.set("key", "value")
    outer.wait(["key"], timedelta(seconds=1))
    assert outer.get("key") == b"value"
    assert outer.add("n", 4) == 4
    assert outer.check(["nothing"]) is False
    assert outer.delete_key("key") is False


def test_a_wait_keeps_its_timeout() -> None:
    store = LinkStore(Link(), "g/", timeout=900.0)
    with pytest.raises(TimeoutError):
        store.wait(["nothing"], timedelta(seconds=0.05))
    store.set_timeout(timedelta(seconds=0.05))
    assert store.timeout == timedelta(seconds=0.05)
    with pytest.raises(TimeoutError):
        store.get("nothing")


@pytest.mark.parametrize("call", ["append", "compare_set", "num_keys"])
def test_what_it_cannot_do_is_said(call: str) -> None:
    store = LinkStore(Link(), "g/", timeout=1.0)
    arguments = {"append": ("k", "v"), "compare_set": ("k", "a", "b"), "num_keys": ()}[call]
    with pytest.raises(NotImplementedError, match="rendezvous store"):
        getattr(store, call)(*arguments)


def test_gloo_groups_meet_in_it() -> None:
    link, sums = Link(), [0.0] * 3
    built: list[groups.GuardedGroup] = []

    def rank(number: int) -> None:
        store = LinkStore(link, "g1/", timeout=20.0)
        group = groups.build(1, number, 3, store, backends.pick("cpu"), 20.0, threading.Event())
        built.append(group)
        x = torch.tensor([float(number)])
        group.allreduce([x]).wait()
        sums[number] = x.item()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == [3.0] * 3
    for group in built:
        group.stop()


def test_a_cancelled_link_ends_the_building_of_a_group() -> None:
    link, cancelled = Link(), threading.Event()
    threading.Timer(0.1, lambda: (cancelled.set(), link.cancel())).start()
    with pytest.raises(Interrupted):
        groups.build(1, 0, 2, LinkStore(link, "g1/", 900.0), backends.pick("cpu"), 900.0, cancelled)


def test_a_link_that_raises_ends_the_building_of_a_group() -> None:
    link = Link()
    threading.Timer(0.1, link.cancel).start()
    with pytest.raises(groups.GroupError, match="called out"):
        groups.build(1, 0, 2, LinkStore(link, "g1/", 60.0), backends.pick("cpu"), 60.0, threading.Event())
