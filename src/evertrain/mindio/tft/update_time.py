"""Did a memory error of the device fall into an optimizer update? By the device's clock, in microseconds."""

from __future__ import annotations

import re

from evertrain.mindio.tft import device

_ERROR_TIME = re.compile(r"time us\s*=\s*(\d+)")
_start: int | None = None
_end: int | None = None


def tft_set_update_start_time(start_time: int | None = None) -> None:
    global _start
    _start = device.port().timestamp() if start_time is None else start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    global _end
    _end = device.port().timestamp() if end_time is None else end_time


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """The replicas can be trusted if the error came after the last update, or inside one that is not complete."""
    start = _start if start_time is None else start_time
    end = _end if end_time is None else end_time
    if not hbm_error_time or not start or not end:
        return False
    return hbm_error_time > max(start, end) or start < hbm_error_time < end


def get_l2_hbm_error_time(text: str) -> int:
    """When the error happened, as its text says; 0 if it does not."""
    found = _ERROR_TIME.search(text)
    return int(found.group(1)) if found else 0


def forget() -> None:
    global _start, _end
    _start = _end = None
