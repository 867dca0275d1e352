"""Controllers that live in a training process: rank 0's, or a standby."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from evertrain.mindio.tft.processor import Settings

_lock = threading.Lock()
_standby: Any = None


def destroy_controller() -> None:
    """The one that `tft_start_controller` started here, if any. Loading the module for nothing takes time at exit."""
    api = sys.modules.get("evertrain.mindio.tft.api_controller")
    if api is not None:
        api.tft_destroy_controller()


def leading() -> bool:
    """Whether a controller in this process leads the job and has not come to an end."""
    api = sys.modules.get("evertrain.mindio.tft.api_controller")
    hosted = (_standby, api._controller if api is not None else None)
    return any(each is not None and each.machine.active and each.machine.ended is None for each in hosted)


def stand_by(
    settings: Settings, server_context: Callable[[], Any]
) -> Callable[[str, int, int], tuple[str, int] | None]:
    """Says how a standby is started when this rank is named: at this address, port 0 for any, and with this epoch."""

    def start(ip: str, port: int, epoch: int) -> tuple[str, int] | None:
        from evertrain.mindio.tft import api_controller
        from evertrain.mindio.tft.settings import Settings as ControllerSettings

        global _standby
        with _lock:
            if _standby is not None and _standby.machine.ended is None:
                return _standby.address if port == 0 else None
            _standby = api_controller.standby(
                ControllerSettings(
                    world_size=settings.world_size,
                    rank=settings.rank,
                    local_copy=settings.local_copy,
                    arf=settings.arf,
                    zit=settings.zit,
                    epoch=epoch,
                ),
                ip,
                port,
                server_context(),
            )
            return _standby.address

    return start


def close_standby() -> None:
    global _standby
    with _lock:
        standby, _standby = _standby, None
    if standby is not None:
        standby.destroy()
