"""What launchers in the pods are told when pods are replaced without a recovery of their own: reset.json. Pure.

RetryTime       grows when pods were replaced and the launchers that are left shall start their processes again; 0
                when all pods are new
GracefulExit    1: end in good order, with a checkpoint if you can
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from evertrain.kube.port import Object

PREFIX, KEY, CHECK_CODE = "reset-config-", "reset.json", "checkCode"
RESTART_TYPE, POD_RESCHEDULE = "restartType", "podReschedule"
ROUND = "evertrain.dev/rescheduled"
"""Annotation: for which pods the last restart was told."""


def restarted(item: Object, pods: Sequence[str], whole: bool, now: int) -> Object | None:
    """The ConfigMap after these pods were replaced; None if it says so already, or is not one of this kind."""
    before = _read(item)
    round_ = hashlib.sha256(",".join(pods).encode()).hexdigest()[:16]
    metadata = item["metadata"]
    if before is None or (metadata.get("annotations") or {}).get(ROUND) == round_:
        return None
    retries = before.get("RetryTime")
    again = (retries if isinstance(retries, int) else 0) + 1
    text = _text(before, now, RankList=[], RetryTime=0 if whole else again)
    annotations = {**(metadata.get("annotations") or {}), ROUND: round_}
    return _with(item | {"metadata": metadata | {"annotations": annotations}}, text, {RESTART_TYPE: POD_RESCHEDULE})


def leaving(item: Object, leave: bool, now: int) -> Object | None:
    """The ConfigMap with GracefulExit as it should be; None if it is so."""
    before = _read(item)
    if before is None or bool(before.get("GracefulExit")) == leave:
        return None
    return _with(item, _text(before, now, GracefulExit=int(leave)), {})


def _read(item: Object) -> dict[str, Any] | None:
    try:
        found = json.loads((item.get("data") or {})[KEY])
    except (KeyError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(before: Mapping[str, Any], now: int, **changes: object) -> str:
    """In the order of the original's fields."""
    fields = {
        "RankList": before.get("RankList") or [],
        "UpdateTime": now,
        "RetryTime": before.get("RetryTime") or 0,
        "FaultFlushing": bool(before.get("FaultFlushing")),
        "GracefulExit": before.get("GracefulExit") or 0,
        "RestartFaultProcess": bool(before.get("RestartFaultProcess")),
    }
    return json.dumps({**fields, **changes}, separators=(",", ":"))


def _with(item: Object, text: str, more: Mapping[str, str]) -> Object:
    check = hashlib.sha256(text.encode()).hexdigest()
    return item | {"data": {**(item.get("data") or {}), **more, KEY: text, CHECK_CODE: check}}
