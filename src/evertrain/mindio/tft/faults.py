"""Which fault an exception of the training function means, by its text.

The first pattern that the text contains decides, built-in ones first, then the user's in their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from evertrain.mindio.tft import update_time
from evertrain.mindio.tft.log import logger
from evertrain.mindio.tft.numbers import MAX_ERROR_CODE, ReportState

OTHER = "OTHER"
UCE = "UCE ERROR"
HBM = "HBM MULTI BIT ECC"
HBM_CORRUPTED = "HBM MULTI BIT ECC CORRUPTED"
FORCE_STOP = "FORCE STOP"
ARF_FINISH = "ARF FINISH"
STEP_FINISH = "STEP FINISH"
_NETWORK = ("HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "UB LINK ERROR", "HCCS LINK ERROR")
_NO_FIRST_WAIT = (ARF_FINISH, STEP_FINISH, OTHER)

_DEVICE_ERROR = re.compile(r"device error type[^0-9a-zA-Z]*((?:0[xX])?[0-9a-fA-F]+)")


@dataclass(frozen=True)
class Fault:
    name: str
    state: ReportState
    error_code: str = ""

    @property
    def waits_for_clean(self) -> bool:
        return self.name not in _NO_FIRST_WAIT


def _itself(pattern: str) -> Callable[[str], str]:
    return lambda text: pattern


def _judge_hbm(text: str) -> str:
    repairable = update_time.tft_can_do_uce_repair(update_time.get_l2_hbm_error_time(text))
    return HBM if repairable else HBM_CORRUPTED


fault_handles: dict[str, Callable[[str], str]] = {}
"""Pattern to what says, given the whole text, which class it is: a key of `fault_types`. In the order of testing."""
fault_types: dict[str, str] = {}
"""Class to the name of its ReportState."""
_needs_uce = {UCE, HBM, *_NETWORK}


def reset() -> None:
    """The built-in patterns alone."""
    fault_handles.clear()
    fault_types.clear()
    fault_handles.update({UCE: _itself(UCE), HBM: _judge_hbm})
    for pattern in (FORCE_STOP, ARF_FINISH, STEP_FINISH, *_NETWORK):
        fault_handles[pattern] = _itself(pattern)
    fault_types.update(
        {
            UCE: "RS_UCE",
            HBM: "RS_UCE",
            HBM_CORRUPTED: "RS_UCE_CORRUPTED",
            FORCE_STOP: "RS_NORMAL",
            ARF_FINISH: "RS_PREREPAIR_FINISH",
            STEP_FINISH: "RS_STEP_FINISH",
            **dict.fromkeys(_NETWORK, "RS_HCCL_FAILED"),
            OTHER: "RS_UNKNOWN",
        }
    )


reset()


def register(fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]) -> None:
    fault_handles[fault_pattern] = fault_handle
    fault_types[fault_pattern] = fault_type


def classify(text: str, enable_uce: bool) -> Fault:
    code = _DEVICE_ERROR.search(text)
    error_code = code.group(1)[:MAX_ERROR_CODE] if code else ""
    for pattern, handle in list(fault_handles.items()):
        if pattern not in text:
            continue
        if pattern in _needs_uce and not enable_uce:
            break
        try:
            name = handle(text)
            return Fault(name, ReportState[fault_types[name]], error_code)
        except Exception as error:
            logger.error("the handler of the fault %r named no registered type: %r", pattern, error)
            break
    return Fault(OTHER, ReportState.RS_UNKNOWN, error_code)
