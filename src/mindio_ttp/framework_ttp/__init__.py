"""What a training framework calls."""

from evertrain.mindio.tft.api_controller import tft_destroy_controller, tft_init_controller, tft_start_controller
from evertrain.mindio.tft.api_framework import (
    install_exit_hooks,
    set_mindio_export_version,  # noqa: F401
    tft_destroy_processor,
    tft_end_updating_os,
    tft_get_reboot_type,
    tft_get_repair_step,
    tft_get_repair_type,
    tft_init_processor,
    tft_is_reboot_node,
    tft_pause_train,
    tft_register_clean_handler,
    tft_register_decrypt_handler,
    tft_register_exception_handler,
    tft_register_exit_handler,
    tft_register_rebuild_group_handler,
    tft_register_rename_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_register_stream_sync_handler,
    tft_register_zit_downgrade_rebuild_handler,
    tft_register_zit_upgrade_rebuild_handler,
    tft_register_zit_upgrade_repair_handler,
    tft_register_zit_upgrade_rollback_handler,
    tft_report_error,
    tft_report_load_ckpt_step,
    tft_reset_limit_step,
    tft_set_dp_group_info,
    tft_set_optimizer_replica,
    tft_set_step_args,
    tft_start_copy_os,
    tft_start_processor,
    tft_start_updating_os,
    tft_wait_next_action,
)
from evertrain.mindio.tft.decorator import tft_exception_handler
from evertrain.mindio.tft.numbers import Action, OptimizerType, RepairType, ReportState
from evertrain.mindio.tft.update_time import tft_can_do_uce_repair

__all__ = [
    "tft_init_controller", "tft_start_controller", "tft_destroy_controller",
    "tft_init_processor", "tft_start_processor", "tft_destroy_processor",
    "tft_start_updating_os", "tft_start_copy_os", "tft_end_updating_os",
    "tft_set_optimizer_replica", "tft_exception_handler", "tft_set_step_args",
    "tft_register_rename_handler", "tft_register_save_ckpt_handler", "tft_register_exit_handler",
    "tft_register_stop_handler", "tft_register_clean_handler", "tft_register_rebuild_group_handler",
    "tft_register_repair_handler", "tft_register_rollback_handler", "tft_register_stream_sync_handler",
    "tft_register_zit_upgrade_rollback_handler", "tft_register_zit_upgrade_repair_handler",
    "tft_register_zit_upgrade_rebuild_handler", "tft_register_zit_downgrade_rebuild_handler",
    "tft_register_exception_handler", "tft_register_decrypt_handler",
    "tft_report_error", "tft_wait_next_action", "tft_get_repair_step", "tft_get_repair_type",
    "tft_is_reboot_node", "tft_get_reboot_type", "tft_can_do_uce_repair", "tft_reset_limit_step",
    "tft_pause_train", "tft_set_dp_group_info", "tft_report_load_ckpt_step",
    "OptimizerType", "Action", "ReportState", "RepairType",
]  # fmt: skip

install_exit_hooks()
