"""`init_taskd_proxy` and `destroy_taskd_proxy`, for launchers that are not ours."""

from __future__ import annotations

import threading
from typing import Any

from evertrain.taskd import environment
from evertrain.taskd import log as logs
from evertrain.taskd.agent import common
from evertrain.taskd.answers import answered, needed
from evertrain.taskd.codes import LOCAL_HOST
from evertrain.taskd.ip import port, pre_handle_ip
from evertrain.taskd.proxy import Proxy

_LOOK = 1.0
_starting = threading.Lock()


@answered("init taskd proxy")
def init_taskd_proxy(config: dict[str, Any]) -> bool:
    """Start the proxy of this pod, and return when it has joined the manager. False if it can't be started.

    Where this process has one already, True.
    """
    with _starting:
        if Proxy.current is not None:
            return True
        proxy = _prepared(needed(config))
        logs.open_part(f"taskd-proxy-{proxy.own.server}-{proxy.own.process}")
        proxy.start()
    while not proxy.wait_joined(_LOOK):
        if Proxy.current is not proxy:
            raise ConnectionError("it was closed before it had joined the manager")
    return True


def _prepared(config: dict[str, Any]) -> Proxy:
    above = pre_handle_ip(str(config.get("UpstreamAddr", LOCAL_HOST)))
    if environment.through_local_proxy():
        above = LOCAL_HOST
    below = pre_handle_ip(str(config.get("ListenAddr") or environment.proxy_host()))
    return Proxy(
        common.server_rank("RANK", "MS_NODE_RANK", given=config.get("ServerRank")),
        f"{below}:{port(config.get('ListenPort'), environment.proxy_port())}",
        f"{above}:{port(config.get('UpstreamPort'), environment.manager_port())}",
        security=environment.security(),
    )


@answered("destroy taskd proxy")
def destroy_taskd_proxy() -> bool:
    proxy = Proxy.current
    if proxy is not None:
        proxy.close()
    return True
