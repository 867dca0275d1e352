"""reset.json: what agents in the pods are told about faulty ranks and restarts, through a ConfigMap. Pure.

The text is that of the original's Go program, field by field, for readers compare the SHA-256 of it (`checkCode`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from evertrain.clusterd.recover.events import WriteReset
from evertrain.kube.port import Object

PREFIX = "reset-config-"
KEY, CHECK_CODE = "reset.json", "checkCode"
CLEAR, FLUSHING, FAULT, RESTART_ALL = "clear", "notifyFaultFlushing", "fault", "restartAllProcess"
HOT_RESET = ("reset", "restart")
RESTARTED = "evertrain-restarted-by"
"""The recovery that has last started all processes again."""


class Refused(ValueError):
    """It must not be written, or can't; the text says why."""


def renewed(data: Mapping[str, str], order: WriteReset, now: int) -> dict[str, str]:
    """The data of the ConfigMap after the order. Keys of others stay."""
    before = _read(data)
    if any(isinstance(rank, dict) and rank.get("Policy") in HOT_RESET for rank in before.get("RankList") or ()):
        raise Refused("chips are being reset by the device plugin (hotReset), which does not go with process recovery")
    retries, flushing, restart = _whole(before.get("RetryTime")), False, bool(before.get("RestartFaultProcess"))
    ranks: list[Object] = []
    match order.operation:
        case "clear":
            pass
        case "notifyFaultFlushing":
            flushing = True
        case "fault":
            ranks = [_rank(rank) for rank in sorted(order.ranks)]
            restart = order.restart_fault_process
        case "restartAllProcess":
            # A ClusterD that takes over may say it once more. Agents would start their processes a second time.
            retries += not (order.recovery and data.get(RESTARTED) == order.recovery)
            flushing = bool(before.get("FaultFlushing"))
        case other:
            raise Refused(f"there is no operation {other!r}")
    text = json.dumps(
        {
            "RankList": ranks,
            "UpdateTime": now,
            "RetryTime": retries,
            "FaultFlushing": flushing,
            "GracefulExit": 0,
            "RestartFaultProcess": restart,
        },
        separators=(",", ":"),
    )
    more = {RESTARTED: order.recovery} if order.operation == RESTART_ALL and order.recovery else {}
    return {**data, **more, KEY: text, CHECK_CODE: hashlib.sha256(text.encode()).hexdigest()}


def same(before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """They say the same but for the time at which they were written."""
    return {**_read(before), "UpdateTime": 0} == {**_read(after), "UpdateTime": 0}


def _read(data: Mapping[str, str]) -> dict[str, Any]:
    if KEY not in data:
        raise Refused(f"it has no {KEY}")
    try:
        found = json.loads(data[KEY])
    except (ValueError, RecursionError) as error:
        raise Refused(f"{KEY} is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("RankList") or [], list):
        raise Refused(f"{KEY} is not what it should be")
    return found


def _rank(rank: int) -> Object:
    return {
        "RankId": rank,
        "LogicId": 0,
        "Status": "fault",
        "Policy": "",
        "InitialPolicy": "",
        "ErrorCode": None,
        "ErrorCodeHex": "",
    }


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
