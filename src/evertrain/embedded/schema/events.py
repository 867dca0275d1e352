"""The two kinds of Event: one object, two sets of names."""

from __future__ import annotations

from evertrain.kube.port import Object

_NAMES = {
    "involvedObject": "regarding",
    "message": "note",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "reportingComponent": "reportingController",
}
_BACK = {new: core for core, new in _NAMES.items()}


def new_event(item: Object) -> Object:
    """A v1 Event as events.k8s.io/v1 shows it."""
    return {_NAMES.get(key, key): value for key, value in item.items()} | {"apiVersion": "events.k8s.io/v1"}


def core_event(item: Object) -> Object:
    """An Event of events.k8s.io/v1 as v1 shows it, which is also how it is stored."""
    made = {_BACK.get(key, key): value for key, value in item.items()} | {"apiVersion": "v1"}
    made.setdefault("involvedObject", {})
    return made
