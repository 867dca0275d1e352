"""Which network link the collectives of this process use, where it has two of them.

    TASKD_NICS="eth0,eth1"                  the primary link and the backup, of every process of the pod
    TASKD_NICS="eth0,eth1;eth2,eth3"        of the process with local rank 0, and of the one with local rank 1
    TASKD_NICS="10.0.1.7,10.0.2.7"          addresses instead of interfaces

Collectives begin on the primary link, or on the backup if the primary is down, so that a process that is started again
while a switch is being replaced joins the others. An order of the cluster moves them (`failover`).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

from evertrain.torch.errors import UsageError

VARIABLE = "TASKD_NICS"
INTERFACE = "GLOO_SOCKET_IFNAME"
"""torch's own variable: which interface the groups use that a script makes itself."""

_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915  # SIOCGIFFLAGS, SIOCGIFADDR
_UP, _RUNNING = 0x1, 0x40

_on_backup: bool | None = None
"""None until somebody needs to know."""


def pair() -> tuple[str, str] | None:
    """The primary link and the backup of this process; None if it was told of none. UsageError if it makes no sense."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    pairs = [tuple(name.strip() for name in entry.split(",")) for entry in text.split(";")]
    if any(len(entry) != 2 or not all(entry) for entry in pairs):
        raise UsageError(f"{VARIABLE}={text!r}: a primary link and a backup are needed, like eth0,eth1")
    place = int(os.environ.get("LOCAL_RANK", "0")) if len(pairs) > 1 else 0
    if place >= len(pairs):
        raise UsageError(f"{VARIABLE}={text!r}: no links for local rank {place}")
    primary, backup = pairs[place]
    return primary, backup


def current() -> str | None:
    """The link in use; None if this process was told of none."""
    links = pair()
    return None if links is None else links[on_backup()]


def on_backup() -> bool:
    global _on_backup
    if _on_backup is None:
        links = pair()
        _on_backup = links is not None and bool(why_down(links[0])) and not why_down(links[1])
    return _on_backup


def use(backup: bool) -> None:
    """Groups that are made from now on use this link."""
    global _on_backup
    _on_backup = backup
    links = pair()
    if links is not None and not is_address(links[backup]):
        os.environ[INTERFACE] = links[backup]


def is_address(link: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(link))
    return False


def why_down(link: str) -> str:
    """Why this link can't be used; empty if it looks as if it could."""
    if not is_address(link):
        return _why_interface_down(link)
    family = socket.AF_INET6 if ipaddress.ip_address(link).version == 6 else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((link, 0))
    except OSError as error:
        return f"{link}: {error.strerror}"
    for _, name in socket.if_nameindex():
        if _address(name) == link:
            return _why_interface_down(name)
    return ""


def _why_interface_down(name: str) -> str:
    try:
        (flags,) = struct.unpack_from("16xH", _ask(name, _GET_FLAGS))
    except OSError as error:
        return f"{name}: {error.strerror}"
    return "" if flags & _UP and flags & _RUNNING else f"{name} is down"


def _address(name: str) -> str:
    try:
        return socket.inet_ntoa(_ask(name, _GET_ADDRESS)[20:24])
    except OSError:
        return ""  # it has none


def _ask(name: str, request: int) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))
