"""Ages as kubectl writes them: 5s, 2m10s, 3h, 4d."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from evertrain.kube.times import parse_time


def as_time(value: Any) -> datetime | None:
    """An RFC 3339 time; None if it is none."""
    if not isinstance(value, str) or not value:
        return None
    try:
        when = parse_time(value)
    except ValueError:
        return None
    return when if when.tzinfo else None


def age(value: Any, now: datetime) -> str:
    if not value:
        return "<unknown>"
    when = as_time(value)
    return "<invalid>" if when is None else duration((now - when).total_seconds())


def duration(elapsed: float) -> str:
    """Two units where they matter: nobody needs the seconds of a day."""
    seconds = int(elapsed)
    if seconds < -1:
        return "<invalid>"
    if seconds <= 0:
        return "0s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if hours < 192:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    if days < 730:
        return f"{days}d"
    if days < 365 * 8:
        return f"{days // 365}y{days % 365}d" if days % 365 else f"{days // 365}y"
    return f"{days // 365}y"
