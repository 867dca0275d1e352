"""Everything of `framework_ttp` under the name of the module in which the original has it, and some more."""

from evertrain.mindio.tft.api_framework import (
    get_device,
    get_mindio_export_version,
    set_mindio_export_version,
    tft_wait_repair_action,
)
from evertrain.mindio.tft.faults import fault_handles, fault_types
from evertrain.mindio.tft.runtime import runtime
from mindio_ttp.framework_ttp import *  # noqa: F403
from mindio_ttp.framework_ttp import __all__ as _all

save_handler = runtime.callbacks

__all__ = [
    *_all,
    "fault_handles", "fault_types", "get_device", "get_mindio_export_version", "save_handler",
    "set_mindio_export_version", "tft_wait_repair_action",
]  # fmt: skip
