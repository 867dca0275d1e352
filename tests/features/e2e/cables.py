"""Two network links for each of two virtual nodes: real interfaces, joined by cables, with counters of their own.

Virtual nodes share the network of their machine, where what is sent to an address of one's own never sees a cable. So
the thread of a test gets a network namespace, which everything that it starts inherits, and in which packets to an end
of a cable leave by the other end. It has no name: the kernel drops it, and the cables in it, with the last process that
is in it, also if the test is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.torch import nics

PRIMARY, BACKUP = "primary", "backup"
ENDS = (0, 1)
START = """\
place=${XDL_IP#127.64.}; place=${place%.*}   # node-1 has the address 127.64.1.1
export TASKD_NICS="primary$place,backup$place"
"""
"""In front of the script of a pod."""

SETTINGS = Path("/proc/sys/net")
"""Of the namespace of whoever opens them."""
_NETWORKS = {PRIMARY: "10.81.0", BACKUP: "10.82.0"}
_NAMESPACE = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)

needs_cables = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network interfaces take root and `ip`"
)


@contextlib.contextmanager
def laid() -> Iterator[Cables]:
    """For the thread that calls it."""
    with open("/proc/thread-self/ns/net") as home:
        _call(_libc.unshare(_NAMESPACE))
        try:
            yield Cables()
        finally:
            _call(_libc.setns(home.fileno(), _NAMESPACE))


class Cables:
    def __init__(self) -> None:
        _ip("link", "set", "lo", "up")
        (SETTINGS / "ipv4/conf/all/rp_filter").write_text("0")  # the larger of this and an interface's own counts
        for name in _NETWORKS:
            _ip("link", "add", f"{name}0", "type", "veth", "peer", "name", f"{name}1")
            for end in ENDS:
                self._lay(name, end)
            for end in ENDS:
                self._route(name, end)
                _ip("rule", "add", "pref", "2", "to", _address(name, end), "lookup", _table(name, end))
            self.wait_up(name)
        # After the rules above, where it would be the first.
        _ip("rule", "add", "pref", "3", "lookup", "local")
        _ip("rule", "del", "pref", "0")

    def carried(self, name: str) -> int:
        """Bytes that went over this cable so far."""
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            interface, _, numbers = line.strip().partition(":")
            if interface == f"{name}0":
                return int(numbers.split()[0]) + int(numbers.split()[8])
        raise AssertionError(f"there is no {name}0")

    def pull_out(self, name: str) -> None:
        _ip("link", "set", f"{name}0", "down")

    def plug_in(self, name: str) -> None:
        _ip("link", "set", f"{name}0", "up")
        self._route(name, 1)  # the kernel has forgotten it
        self.wait_up(name)

    def wait_up(self, name: str) -> None:
        until = time.monotonic() + 30
        while any(nics.why_down(f"{name}{end}") for end in ENDS):
            assert time.monotonic() < until, f"the cable {name} does not come up"
            time.sleep(0.01)

    def _lay(self, name: str, end: int) -> None:
        interface = f"{name}{end}"
        (SETTINGS / "ipv6/conf" / interface / "disable_ipv6").write_text("1")  # nothing is said unasked
        (SETTINGS / "ipv4/conf" / interface / "accept_local").write_text("1")
        (SETTINGS / "ipv4/conf" / interface / "rp_filter").write_text("0")
        _ip("addr", "add", f"{_address(name, end)}/32", "dev", interface)
        _ip("link", "set", interface, "up")
        _ip("rule", "add", "pref", "1", "iif", interface, "lookup", "local")

    def _route(self, name: str, end: int) -> None:
        """To this end, from the other one."""
        way = ("dev", f"{name}{1 - end}", "src", _address(name, 1 - end))
        _ip("route", "replace", _address(name, end), *way, "table", _table(name, end))


def _address(name: str, end: int) -> str:
    return f"{_NETWORKS[name]}.{end + 1}"


def _table(name: str, end: int) -> str:
    return str(100 + 10 * list(_NETWORKS).index(name) + end)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _call(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
