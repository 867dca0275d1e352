"""The formats of strings that Kubernetes checks. Unknown formats are not judged."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Callable
from datetime import date, datetime
from typing import Any
from urllib.parse import urlsplit

_DATE_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_DURATION = re.compile(r"[+-]?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h|d|w)\s*)+|0")
_UUID = re.compile(r"(?i)[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}")
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_HOSTNAME = re.compile(
    r"(?=.{1,255}$)([a-zA-Z0-9]([-a-zA-Z0-9]{0,61}[a-zA-Z0-9])?)(\.[a-zA-Z0-9]([-a-zA-Z0-9]{0,61}[a-zA-Z0-9])?)*\.?"
)


def _date_time(text: str) -> bool:
    if not _DATE_TIME.fullmatch(text):
        return False
    whole = re.sub(r"\.\d+", "", text).replace("Z", "+00:00")
    datetime.fromisoformat(whole)
    return True


def _byte(text: str) -> bool:
    base64.b64decode(re.sub("[\r\n]", "", text), validate=True)  # as `base64` writes it, in lines
    return True


def _holds(parse: Callable[[str], Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        parse(text)
        return True

    return check


_CHECKS: dict[str, Callable[[str], bool]] = {
    "date-time": _date_time,
    "date": _holds(date.fromisoformat),
    "byte": _byte,
    "duration": lambda text: bool(_DURATION.fullmatch(text)),
    "uuid": lambda text: bool(_UUID.fullmatch(text)),
    "email": lambda text: bool(_EMAIL.fullmatch(text)),
    "hostname": lambda text: bool(_HOSTNAME.fullmatch(text)),
    "ipv4": _holds(ipaddress.IPv4Address),
    "ipv6": _holds(ipaddress.IPv6Address),
    "cidr": _holds(lambda text: ipaddress.ip_network(text, strict=False)),
    "uri": lambda text: bool(urlsplit(text).scheme) or text.startswith("/"),
}


def fits(name: str, text: str) -> bool:
    check = _CHECKS.get(name)
    if check is None:
        return True
    try:
        return check(text)
    except (ValueError, binascii.Error):
        return False
