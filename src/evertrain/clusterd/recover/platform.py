"""Where somebody outside decides: what a platform says by annotations. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from evertrain.clusterd.model import Job
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover.view import TYPES

FIRST = frozenset({n.RETRY, n.RECOVER, n.DUMP})
CONFIRMED = FIRST | {n.EXIT}


def strategy(job: Job | None, known: frozenset[str] = FIRST) -> str:
    """Empty as long as the platform has not decided."""
    text = job.annotations.get(n.PLATFORM_STRATEGY, "").strip(" ,") if job is not None else ""
    return text if text in known else ""


def faults_text(faults: Mapping[int, str]) -> str:
    return ",".join(f"{rank}:{kind}" for rank, kind in sorted(faults.items()))


def result(job: Job | None) -> dict[int, str] | None:
    """The faults that the platform knows; None as long as it has not said. What makes no sense is left out."""
    if job is None or n.RESULT_FAULT not in job.annotations:
        return None
    found = {}
    for part in job.annotations[n.RESULT_FAULT].split(","):
        rank, _, kind = part.strip().partition(":")
        rank, kind = rank.strip(), kind.strip()
        if rank.isascii() and rank.isdigit() and len(rank) < 10 and kind in TYPES:
            found[int(rank)] = kind
    return found


def table_ready(job: Job | None) -> bool | None:
    """None as long as the platform has not said."""
    text = job.annotations.get(n.TABLE_READY, "").strip() if job is not None else ""
    return None if not text else text == n.TRUE
