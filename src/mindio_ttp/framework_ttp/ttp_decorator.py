"""The decorator and what frameworks import beside it."""

from evertrain.mindio.tft.api_framework import (
    get_device,
    get_mindio_export_version,
    set_mindio_export_version,
    tft_get_reboot_type,
    tft_get_repair_step,
    tft_get_repair_type,
    tft_is_reboot_node,
    tft_pause_train,
    tft_register_exception_handler,
    tft_report_error,
    tft_report_load_ckpt_step,
    tft_reset_limit_step,
    tft_set_step_args,
    tft_wait_next_action,
    tft_wait_repair_action,
)
from evertrain.mindio.tft.decorator import tft_exception_handler
from evertrain.mindio.tft.faults import fault_handles, fault_types
from evertrain.mindio.tft.numbers import Action, OptimizerType, RepairType, ReportState
from evertrain.mindio.tft.runtime import runtime

save_handler = runtime.callbacks

__all__ = [
    "Action", "OptimizerType", "RepairType", "ReportState",
    "fault_handles", "fault_types", "get_device", "get_mindio_export_version", "save_handler",
    "set_mindio_export_version", "tft_exception_handler", "tft_get_reboot_type", "tft_get_repair_step",
    "tft_get_repair_type", "tft_is_reboot_node", "tft_pause_train", "tft_register_exception_handler",
    "tft_report_error", "tft_report_load_ckpt_step", "tft_reset_limit_step", "tft_set_step_args",
    "tft_wait_next_action", "tft_wait_repair_action",
]  # fmt: skip
