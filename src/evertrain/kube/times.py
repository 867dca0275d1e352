"""Times as Kubernetes writes them: RFC 3339, with Z and up to nine digits of a second."""

from __future__ import annotations

import re
from datetime import datetime

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?", re.ASCII)


def parse_time(text: str) -> datetime:
    """ValueError if it is none. What is finer than a microsecond is dropped."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time")
    # Up to Python 3.10, fromisoformat knows no Z and takes three or six digits.
    seconds, fraction, zone = found.groups(default="")
    return datetime.fromisoformat(f"{seconds}.{fraction:0<6.6}{zone.replace('Z', '+00:00')}")
