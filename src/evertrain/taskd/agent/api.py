"""`init_taskd_agent`, `start_taskd_agent` and `register_func`, as frameworks call them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from evertrain.taskd import environment
from evertrain.taskd import log as logs
from evertrain.taskd.agent import common
from evertrain.taskd.agent.mindspore import MsAgent
from evertrain.taskd.answers import answered, needed
from evertrain.taskd.codes import LOCAL_HOST
from evertrain.taskd.ip import port, pre_handle_ip
from evertrain.taskd.proxy import Proxy

log = logging.getLogger(__name__)

PYTORCH, MINDSPORE = "PyTorch", "MindSpore"

taskd_agent: Any = None
framework = ""


@answered("init taskd agent")
def init_taskd_agent(config: dict[str, Any] | None = None, cls: Any = None) -> bool:
    """Prepare the agent of this pod. False, with the reason in the log, if the configuration can't be used.

    `Framework` is "PyTorch", with torchrun's agent as `cls`, or "MindSpore"; `UpstreamAddr` and `UpstreamPort` lead to
    the pod's proxy, `ServerRank` is the rank of the node.
    """
    global taskd_agent, framework
    config = needed(config or {})
    kind = config.get("Framework")
    if kind not in (PYTORCH, MINDSPORE):
        raise ValueError(f"Framework {kind!r}: {PYTORCH} or {MINDSPORE} is needed")
    rank = common.server_rank("RANK" if kind == PYTORCH else "MS_NODE_RANK", given=config.get("ServerRank"))
    upstream = _upstream(config)
    logs.open_part(f"agent-{rank}")
    if kind == PYTORCH:
        taskd_agent = _for_torchrun(cls, rank, upstream)
    else:
        if Proxy.current is None:
            common.start_proxy(rank, os.environ.get("MS_SCHED_HOST") or LOCAL_HOST)
        taskd_agent = MsAgent(rank, upstream)
    framework = kind
    return True


def _for_torchrun(agent: Any, rank: str, upstream: str) -> Any:
    from evertrain.taskd.agent import torch_private  # it loads torch
    from evertrain.taskd.agent.pytorch import PtAgent

    if not torch_private.is_agent(agent):
        raise TypeError(f"PyTorch needs torchrun's agent as the second argument, not {repr(agent)[:100]}")
    return PtAgent(agent, rank, upstream)


def _upstream(config: dict[str, Any]) -> str:
    host = pre_handle_ip(str(config.get("UpstreamAddr") or environment.proxy_host()))
    return f"{host}:{port(config.get('UpstreamPort'), environment.proxy_port())}"


def start_taskd_agent() -> Any:
    """Do the agent's work. PyTorch: torchrun's result. MindSpore: ends the process."""
    logs.open_run()
    if taskd_agent is None:
        log.error("taskd_agent is None")
        return None
    log.info("start taskd agent")
    return taskd_agent.run() if framework == PYTORCH else taskd_agent.start()


@answered("register func")
def register_func(operator: str, func: Callable[..., Any]) -> bool:
    """Hand over a callback of the framework. False if there is no agent yet."""
    if taskd_agent is None:
        log.error("taskd_agent is None")
        return False
    return bool(taskd_agent.register_func(operator, func))
