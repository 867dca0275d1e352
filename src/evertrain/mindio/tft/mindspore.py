"""An optimizer update announced by return codes: MindSpore calls from C++, where exceptions don't reach."""

from __future__ import annotations

from evertrain.mindio.tft import api_framework
from evertrain.mindio.tft.log import logger
from evertrain.mindio.tft.numbers import RET_ERROR, RET_OK


def set_updating(backup_step: int = -1) -> int:
    try:
        api_framework.tft_start_updating_os(backup_step)
    except Exception as error:
        logger.error("the update could not begin: %s", error)
        return RET_ERROR
    return RET_OK


def set_finished(step: int) -> int:
    try:
        api_framework.tft_end_updating_os(step)
    except Exception as error:
        logger.error("the update could not end: %s", error)
        return RET_ERROR
    return RET_OK
