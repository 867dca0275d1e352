"""Addresses as configurations and environment variables give them."""

from __future__ import annotations

import ipaddress
import re

_DOMAIN = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.-]{1,256}[a-zA-Z0-9]")


def pre_handle_ip(address: str) -> str:
    """An IP address as it stands before `:port`: IPv6 in brackets. A name is refused, it has to be resolved before."""
    if not address:
        raise ValueError("address is empty")
    bare = _without_brackets(address)
    try:
        parsed = ipaddress.ip_address(bare)
    except ValueError:
        raise ValueError(f"invalid IP address: {address}") from None
    if parsed.version == 4 and bare != address:
        raise ValueError(f"invalid IP address: {address}")
    return f"[{bare}]" if parsed.version == 6 else address


def port(value: object, default: int) -> int:
    """As a configuration gives it: a string mostly, or nothing."""
    if value is None or value == "":
        return default
    text = str(value)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ValueError(f"invalid port: {text}")
    return int(text)


def with_brackets(host: str) -> str:
    """As it stands before `:port`; a name stays as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_problem(host: str) -> str:
    """Why something can't listen or be called at a host; empty if it can.

    An address that means one machine (IPv6 in brackets, since a port follows), or a domain name.
    """
    if not host:
        return "address is empty"
    bare = _without_brackets(host)
    try:
        parsed = ipaddress.ip_address(bare)
    except ValueError:
        if re.fullmatch(r"[0-9.]+", host) or not _DOMAIN.fullmatch(host):
            return f"neither an IP address nor a domain name: {host}"
        return ""
    if (parsed.version == 6) != (bare != host):
        return f"only IPv6 addresses stand in brackets, and always: {host}"
    if parsed.is_unspecified:
        return f"{host} means every address of a machine, not one"
    if parsed.is_multicast:
        return f"{host} is a multicast address"
    return ""


def is_valid_host(host: str) -> bool:
    return not host_problem(host)


def _without_brackets(address: str) -> str:
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address
