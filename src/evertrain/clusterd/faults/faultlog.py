"""The faults of jobs as lines for a log: each that has begun or ended, with its code and place. Pure."""

from __future__ import annotations

from evertrain.clusterd.model import JobFaults

MOST = 20
"""Lines about one change of one job: a switch that fails may have hundreds of ports."""
Fault = tuple[str, str, str, str, str]
"""Node, kind of its part, number of that, code, level."""


class FaultLog:
    def __init__(self) -> None:
        self._known: dict[str, frozenset[Fault]] = {}
        """By job, of those that have any."""

    def update(self, faults: JobFaults) -> list[str]:
        before = self._known.get(faults.job, frozenset())
        now = frozenset((each.node, each.type, each.device, each.code, each.level) for each in faults.devices)
        if now:
            self._known[faults.job] = now
        else:
            self._known.pop(faults.job, None)
        found = [f"{_words(fault)} has begun" for fault in sorted(now - before)]
        found += [f"{_words(fault)} has ended" for fault in sorted(before - now)]
        more = [f"{len(found) - MOST} more faults have begun or ended"] if len(found) > MOST else []
        return [f"job {faults.job}: {text}" for text in (*found[:MOST], *more)]


def _words(fault: Fault) -> str:
    node, kind, device, code, level = fault
    part = f"{kind} {device} of {node}" if device not in ("", "-1") else node
    return f"fault {code or 'without code'} ({level or 'no level'}) of {part}"
