"""The environment variables of the callback interface. A value out of range or not a number means the default."""

from __future__ import annotations

import os


def _number(name: str, default: int, low: int, high: int) -> int:
    text = os.environ.get(name, "").strip()
    if not (text.isascii() and text.isdigit()):
        return default
    value = int(text)
    return value if low <= value <= high else default


def retry_times() -> int:
    """How often a processor tries to connect."""
    return _number("TTP_RETRY_TIMES", 10, 1, 300)


def action_limit() -> int:
    """Seconds that a rank may take for any action of the controller but a collection."""
    return _number("TTP_NORMAL_ACTION_TIME_LIMIT", 180, 30, 1800)


def platform_limit() -> int:
    """Seconds that the controller waits for each answer of the platform."""
    return _number("MINDIO_WAIT_MINDX_TIME", 30, 1, 3600)


def stop_clean_before_dump() -> bool:
    return _number("TTP_STOP_CLEAN_BEFORE_DUMP", 0, 0, 1) == 1


def framework_type() -> int:
    """0: replicas by the default algorithm; 1: by replica_shift."""
    return _number("TTP_FRAMEWORK_TYPE", 0, 0, 1)


def mindspore() -> bool:
    return os.environ.get("MINDIO_FOR_MINDSPORE", "").strip().lower() in ("true", "1")


def token() -> str:
    """The secret of the job; empty if it has none."""
    return os.environ.get("EVERTRAIN_TOKEN", "")


def under_platform() -> bool:
    """The platform leads the controller; it does not end with rank 0's training function."""
    return "MINDX_TASK_ID" in os.environ


def replaces_process() -> bool:
    """This process was started in the place of one that failed, while the others of the job went on."""
    return os.environ.get("RESTART_FAULT_PROCESS_TYPE") == "worker"


def connect_budget() -> float:
    """Seconds that connecting may take in all: as many pauses of 1, 2, 4, 8, 10, 10, … seconds as there are tries."""
    return float(sum(min(2**attempt, 10) if attempt < 4 else 10 for attempt in range(retry_times())))
