"""`init_taskd_worker`, `start_taskd_worker` and `destroy_taskd_worker`, as training scripts call them."""

from __future__ import annotations

import atexit
import logging
import os

from evertrain.taskd import log as logs
from evertrain.taskd.answers import answered
from evertrain.taskd.worker.worker import Worker

log = logging.getLogger(__name__)

taskd_worker: Worker | None = None


@answered("init taskd worker")
def init_taskd_worker(rank_id: int, upper_limit_of_disk_in_mb: int = 5000, framework: str = "pt") -> bool:
    """Prepare the worker of this training process. False, with the reason in the log, if something is wrong."""
    global taskd_worker
    for name, value in (("rank_id", rank_id), ("upper_limit_of_disk_in_mb", upper_limit_of_disk_in_mb)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name}: a number from 0 is needed, not {value!r}")
    node = _node(framework)
    logs.open_part(f"taskd-worker-{rank_id}")
    worker = Worker(rank_id, node, framework, upper_limit_of_disk_in_mb)
    if taskd_worker is not None:
        _close(taskd_worker)
    taskd_worker = worker
    atexit.register(worker.close)
    log.info("Successfully register callback func: links can be switched and chips tested")
    return True


def _node(framework: str) -> int:
    if framework not in ("pt", "ms"):
        raise ValueError(f"framework {framework!r}: pt or ms is needed")
    names = ("RANK", "LOCAL_WORLD_SIZE") if framework == "pt" else ("MS_NODE_RANK",)
    values = []
    for name in names:
        text = os.environ.get(name, "")
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name}={text!r}: a number from 0 is needed in the environment")
        values.append(int(text))
    if framework == "ms":
        return values[0]
    if values[1] == 0:
        raise ValueError("LOCAL_WORLD_SIZE=0: a node has at least one process")
    return values[0] // values[1]


@answered("start taskd worker")
def start_taskd_worker() -> bool:
    """Begin to listen to the manager. Returns at once."""
    _initialized().start()
    return True


@answered("destroy taskd worker")
def destroy_taskd_worker() -> bool:
    global taskd_worker
    worker, taskd_worker = _initialized(), None
    _close(worker)
    return True


def _initialized() -> Worker:
    if taskd_worker is None:
        raise RuntimeError("Worker is not initialized. Please call init_worker first.")
    return taskd_worker


def _close(worker: Worker) -> None:
    atexit.unregister(worker.close)
    worker.close()
