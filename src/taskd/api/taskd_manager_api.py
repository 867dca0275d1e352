"""The manager's functions. They live in `evertrain.taskd.manager.api`."""

from evertrain.taskd.manager import api
from evertrain.taskd.manager.api import init_taskd_manager, start_taskd_manager

__all__ = ["init_taskd_manager", "start_taskd_manager"]


def __getattr__(name: str) -> object:
    """`taskd_manager`: what there is of it now."""
    if name == "taskd_manager":
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
