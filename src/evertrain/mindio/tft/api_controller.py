"""The functions of the controller, with the names, defaults, return codes and errors that callers depend on.

The platform's own process calls them, or rank 0's. There is one controller in a process.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from evertrain.mindio import tls
from evertrain.mindio.tft import environment
from evertrain.mindio.tft import log as logs
from evertrain.mindio.tft.controller import Controller, Platform
from evertrain.mindio.tft.numbers import MAX_PARAM, MAX_WORLD, RET_ERROR, RET_K8S, RET_OK, FaultType, is_int
from evertrain.mindio.tft.requests import Signal
from evertrain.mindio.tft.runtime import runtime
from evertrain.mindio.tft.settings import Settings

log = logging.getLogger(__name__)

REPORTS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
STRATEGIES = ("retry", "recover", "downgrade", "upgrade", "dump", "exit", "migration", "continue")
_RESOLVE_TRIES = 3

_lock = threading.RLock()
_settings: Settings | None = None
_controller: Controller | None = None
_callbacks: dict[str, Callable[..., object]] = {}


# --- life ------------------------------------------------------------------------------------------------------------


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Prepare the controller, in the process of this rank or, with -1, in the platform's own."""
    global _settings
    if not (is_int(rank) and is_int(world_size) and -1 <= rank < world_size <= MAX_WORLD and world_size >= 1):
        raise Exception(
            f"rank {rank!r} and world_size {world_size!r}: -1 <= rank < world_size <= {MAX_WORLD} is needed"
        )
    mindspore = environment.mindspore()
    if mindspore and (enable_local_copy or enable_zit):
        raise Exception("with MindSpore there is neither a local copy nor elastic training")
    logs.start()
    with _lock:
        if _settings is None:
            _settings = _with_environment(
                Settings(
                    world_size=world_size,
                    rank=rank,
                    local_copy=bool(enable_local_copy),
                    arf=bool(enable_arf),
                    zit=bool(enable_zit),
                )
            )


def _with_environment(settings: Settings) -> Settings:
    return dataclasses.replace(
        settings,
        mindspore=environment.mindspore(),
        x1=environment.framework_type() == 1,
        action_limit=float(environment.action_limit()),
        platform_limit=float(environment.platform_limit()),
        replacement_limit=max(600.0, float(environment.action_limit())),
    )


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Listen for the processors. What hinders it ends the process: no job may run that is only thought protected."""
    global _controller
    with _lock:
        if _controller is not None:
            return
        try:
            if _settings is None:
                raise ValueError("call tft_init_controller first")
            if not is_int(port) or not 1024 <= port <= 65535:
                raise ValueError(f"port {port!r}: a number from 1024 to 65535 is needed")
            host = _resolve(bind_ip)
            certificates = tls.parse_tls_info(tls_info) if enable_tls else None
            controller = Controller(
                _settings,
                host,
                port,
                context=tls.server_context(certificates, runtime.decrypt) if certificates is not None else None,
                certificates=certificates,
                token=environment.token(),
                platform=_platform(),
            )
            controller.start()
        except Exception as error:
            log.error("tft_start_controller: %s", error)
            print(f"mindio_ttp: the controller could not be started: {error}", flush=True)
            raise SystemExit(RET_K8S) from error
        _controller = controller


def _resolve(name: str) -> str:
    """An address to listen on. A name may take a moment to be known when a pod has just started."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"bind_ip {name!r}: an address or a host name is needed")
    for left in reversed(range(_RESOLVE_TRIES)):
        try:
            address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
            break
        except OSError as error:
            if not left:
                raise ValueError(f"bind_ip {name!r} is not known: {error}") from None
            time.sleep(1.0)
    if ipaddress.ip_address(str(address).partition("%")[0]).is_unspecified:
        raise ValueError(f"bind_ip {name!r}: the controller does not listen on all addresses; name one")
    return str(address)


def _platform() -> Platform | None:
    """All four callbacks are needed; with fewer there is no platform."""
    with _lock:
        callbacks = dict(_callbacks)
    if any(name not in callbacks for name in REPORTS):
        return None
    return lambda name, *args: callbacks[name](*args)


def tft_destroy_controller() -> None:
    """Let the processors go. They neither reconnect nor look for another controller."""
    global _controller, _settings
    with _lock:
        controller, _controller, _settings = _controller, None, None
    if controller is not None:
        controller.destroy()
    if runtime.processor is None:
        logs.stop()


# --- standbys --------------------------------------------------------------------------------------------------------


def standby(settings: Settings, host: str, port: int, context: ssl.SSLContext | None = None) -> Controller:
    """A passive controller in a training process, which leads once half of the ranks have come to it."""
    settings = dataclasses.replace(_with_environment(settings), passive=True)
    controller = Controller(settings, host, port, context=context, token=environment.token(), platform=_platform())
    controller.start()
    return controller


# --- the platform ----------------------------------------------------------------------------------------------------


def tft_register_mindx_callback(action: str, func: Callable[..., object]) -> int:
    """Before `tft_start_controller`. Only with all four is the platform taken into account."""
    if action not in REPORTS or not callable(func):
        return RET_ERROR
    with _lock:
        _callbacks[action] = func
    return RET_OK


def _notify(signal: Signal) -> int:
    controller = _controller
    if controller is None or not controller.notify(signal):
        log.error("%s: there is no controller", signal.kind)
        return RET_ERROR
    return RET_OK


def _faults(fault_ranks: object) -> dict[int, int] | None:
    """The faulty ranks with their types, or None if this is no such thing."""
    controller = _controller
    if controller is None or not isinstance(fault_ranks, dict):
        return None
    for rank, kind in fault_ranks.items():
        if not (is_int(rank) and is_int(kind) and kind in FaultType._value2member_map_):
            return None
        if not (0 <= rank < controller.machine.settings.world_size and controller.machine.known(rank)):
            return None
    return dict(fault_ranks)


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    faults = _faults(fault_ranks)
    if faults is None:
        return RET_ERROR
    if stop_type == "stop":
        return _notify(Signal("stop", faults=faults))
    if stop_type == "pause" and timeout is not None and is_int(timeout) and timeout >= 0:
        return _notify(Signal("pause", faults=faults, limit=float(timeout)))
    return RET_ERROR


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    faults = _faults(fault_ranks)
    if faults is None or not is_int(time) or not 1 <= time <= 3600:
        return RET_ERROR
    return _notify(Signal("global", faults=faults, limit=float(time)))


def tft_notify_controller_prepare_action(action: str, fault_ranks: dict[int, int] | None = None) -> int:
    if action == "stop switch":
        return _notify(Signal("stop switch"))
    faults = _faults(fault_ranks)
    if action != "hot switch" or not faults:
        return RET_ERROR
    return _notify(Signal("hot switch", faults=faults))


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    controller = _controller
    if controller is None:
        return RET_ERROR
    offered = controller.machine.offered
    if strategy not in STRATEGIES or (offered and strategy not in offered):
        log.error("the strategy %r was not offered; there are %s", strategy, ", ".join(offered or STRATEGIES))
        _notify(Signal("invalid", text=str(strategy)))
        return RET_ERROR
    described = isinstance(params, str) and 1 <= len(params.encode()) <= MAX_PARAM
    if strategy in ("downgrade", "upgrade") and not described:
        log.error("%s needs parameters of 1 to %d bytes", strategy, MAX_PARAM)
        return RET_ERROR
    return _notify(Signal("strategy", text=strategy, param=params if isinstance(params, str) else ""))


def tft_notify_controller_dump() -> int:
    return _notify(Signal("dump"))


def tft_notify_controller_process_ended(ranks: list[int]) -> int:
    """The processes of these ranks have ended, as whoever started them saw: nobody need wait for them to come back.

    Not part of the original interface; a platform that says nothing loses only the time that a broken link is given.
    """
    if not isinstance(ranks, list) or not all(is_int(rank) for rank in ranks):
        return RET_ERROR
    return _notify(Signal("ended", faults=dict.fromkeys(ranks, int(FaultType.PROCESS))))


def tft_notify_controller_not_replaced(ranks: list[int]) -> int:
    """Nobody comes in the place of these ranks: whoever was to start their new processes has not heard of it.

    Not part of the original interface; a platform that says nothing has the others wait until their patience ends.
    """
    if not isinstance(ranks, list) or not all(is_int(rank) for rank in ranks):
        return RET_ERROR
    return _notify(Signal("not replaced", faults=dict.fromkeys(ranks, int(FaultType.PROCESS))))


def tft_query_progress() -> dict[str, Any]:
    """How far the training is, for a platform that decides by itself. Not part of the original interface.

    `step`: the newest that a rank has finished, 0 if none has. `known`: ranks whose process has registered here.
    `raised`: by rank whose process lives and has left the training function by an exception, that exception.
    """
    controller = _controller
    if controller is None:
        return {"step": 0, "known": [], "raised": {}}
    return controller.machine.progress()


def tft_query_high_availability_switch() -> bool:
    """Whether at least one processor is connected."""
    controller = _controller
    return controller is not None and controller.linked > 0
