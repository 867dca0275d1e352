"""Faults that restarting the process where it is may cure: withheld from schedulers for a minute. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from evertrain.clusterd.faults.jobview import JobView
from evertrain.clusterd.faults.seen import IN_PLACE, Look, Seen
from evertrain.faultcodes.levels import NORMAL, NOT_HANDLE, RESTART_BUSINESS, RESTART_REQUEST, SUB_HEALTH

WINDOW_MS = 60_000
CURABLE = frozenset({RESTART_REQUEST, RESTART_BUSINESS})
_FINE = frozenset({NORMAL, NOT_HANDLE, *CURABLE})


def curable(view: JobView, levels: Iterable[str]) -> bool:
    """Of a pod: it has no fault that needs another chip."""
    return all(level in _FINE or (level == SUB_HEALTH and view.ignores_sub_health) for level in levels)


def withhold(
    look: Look,
    seen: list[Seen],
    levels_of: Callable[[JobView, int], Iterable[str]],
    exposed: Collection[str],
) -> None:
    """`levels_of`: those of a pod's faults, wherever it is. `exposed`: pods (uids) whose job has given that way up."""
    mine: dict[tuple[str, int], list[str]] = {}
    for each in seen:
        if each.place is not None and not each.hidden:
            mine.setdefault((each.place.job, each.place.pod), []).append(each.fault.level)
    for each in seen:
        view, place = each.view, each.place
        if each.hidden or view is None or place is None or not view.restarts_in_place:
            continue
        if each.fault.level not in CURABLE or place.pod_uid in exposed:
            continue
        first = levels_of(view, 0) if place.pod != 0 else ()
        if not curable(view, mine[place.job, place.pod]) or not curable(view, first):
            continue
        if look.until(each.fault.time_ms + WINDOW_MS):
            each.hidden = IN_PLACE
