"""The controller's functions for the platform. They live in `evertrain.mindio.tft.api_controller`."""

from evertrain.mindio.tft.api_controller import (
    tft_destroy_controller as tft_destroy_controller,
)
from evertrain.mindio.tft.api_controller import (
    tft_init_controller as tft_init_controller,
)
from evertrain.mindio.tft.api_controller import (
    tft_notify_controller_change_strategy,
    tft_notify_controller_dump,
    tft_notify_controller_on_global_rank,
    tft_notify_controller_prepare_action,
    tft_notify_controller_stop_train,
    tft_query_high_availability_switch,
    tft_register_mindx_callback,
)
from evertrain.mindio.tft.api_controller import (
    tft_notify_controller_not_replaced as tft_notify_controller_not_replaced,
)
from evertrain.mindio.tft.api_controller import (
    tft_notify_controller_process_ended as tft_notify_controller_process_ended,
)
from evertrain.mindio.tft.api_controller import (
    tft_query_progress as tft_query_progress,
)
from evertrain.mindio.tft.api_controller import (
    tft_start_controller as tft_start_controller,
)

__all__ = [
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch",
    "tft_register_mindx_callback",
]
