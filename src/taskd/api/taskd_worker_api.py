"""The worker's functions. They live in `evertrain.taskd.worker.api`."""

from evertrain.taskd.worker import api
from evertrain.taskd.worker.api import destroy_taskd_worker, init_taskd_worker, start_taskd_worker

__all__ = ["destroy_taskd_worker", "init_taskd_worker", "start_taskd_worker"]


def __getattr__(name: str) -> object:
    """`taskd_worker`: what there is of it now."""
    if name == "taskd_worker":
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
