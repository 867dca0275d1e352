"""Which process is in which group of the training, written beside its timings, for tools that look for slow nodes."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from evertrain.taskd import environment
from evertrain.taskd.worker.traces import BASE, VARIABLE

log = logging.getLogger(__name__)

FILE = "parallel_group.json"
DEFAULT_GROUP = "default_group"
_UNNAMED = ("", "undefined")


def get_save_path(rank: int) -> str:
    """The folder of a rank; empty, with the reason in the log, if there is none."""
    job = environment.job_id()
    if not job or "/" in job or job in (".", ".."):
        log.error("the groups of the training can't be written: MINDX_TASK_ID is %r", job)
        return ""
    base = os.environ.get("GROUP_BASE_DIR") or os.environ.get(VARIABLE) or str(BASE)
    return os.path.join(base, job, str(rank))


def get_group_info(rank: int) -> dict[str, dict[str, Any]]:
    """The groups that this process is in, by the names of their communicators.

    Those of HCCL; where there is none, those of any other backend.
    """
    from evertrain.taskd.agent import torch_private  # it loads torch

    found: dict[bool, dict[str, dict[str, Any]]] = {True: {}, False: {}}
    for each in torch_private.process_groups():
        if rank not in each.ranks:
            continue
        communicator = torch_private.hccl_name(each.group, rank)
        found[communicator is not None][communicator or each.name] = {
            "group_name": DEFAULT_GROUP if each.is_default else _given_name(each.group) or each.name,
            "group_rank": each.ranks.index(rank),
            "global_ranks": each.ranks,
        }
    return found[True] or found[False]


def _given_name(group: Any) -> str:
    """What the training calls it."""
    name = str(getattr(group, "group_desc", ""))
    return "" if name in _UNNAMED else name


def dump_group_info() -> bool:
    """Write the groups of this process. False, with the reason in the log, if that can't be; the training goes on."""
    try:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("there are none yet")
        rank = dist.get_rank()
        folder = get_save_path(rank)
        if folder:
            _write(Path(folder), json.dumps(get_group_info(rank)))
    except Exception as error:  # whatever it is, the training is worth more
        log.error("the groups of the training can't be written: %s", str(error) or repr(error))
        return False
    return bool(folder)


def _write(folder: Path, text: str) -> None:
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for each in (folder, folder.parent):
        if each.is_symlink():
            raise OSError(f"{each} is a symbolic link")
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{FILE}")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, folder / FILE)
    except OSError:
        os.unlink(name)
        raise
