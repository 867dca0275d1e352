"""The agent's functions. They live in `evertrain.taskd.agent.api`."""

from evertrain.taskd.agent import api
from evertrain.taskd.agent.api import init_taskd_agent, register_func, start_taskd_agent

__all__ = ["init_taskd_agent", "register_func", "start_taskd_agent"]


def __getattr__(name: str) -> object:
    """`taskd_agent` and `framework`: what there is of them now."""
    if name in ("taskd_agent", "framework"):
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
