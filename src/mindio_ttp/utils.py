"""Times of the optimizer's update on the device."""

from evertrain.mindio.tft.update_time import (
    get_l2_hbm_error_time as get_l2_hbm_error_time,
)
from evertrain.mindio.tft.update_time import (
    tft_can_do_uce_repair,
    tft_set_update_end_time,
    tft_set_update_start_time,
)

__all__ = ["tft_can_do_uce_repair", "tft_set_update_end_time", "tft_set_update_start_time"]
