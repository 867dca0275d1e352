"""Names of torch's process groups that differ from recovery to recovery, and are the same on all ranks.

torch numbers its groups by a counter of the process. A process that joins later counts from the beginning; and a group
that is built again must not find the keys of its predecessor in the store. So the number of recoveries becomes part of
every name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as c10d

_original: Any = None


def apply(repair_id: Callable[[], int]) -> None:
    """Replace torch's naming. Once; torch versions without the function keep their own."""
    global _original
    if _original is not None or not hasattr(c10d, "_process_group_name"):
        return
    _original = c10d._process_group_name

    def named(ranks: list[int], use_hashed_name: bool) -> Any:
        return _wrap(_name(ranks, use_hashed_name, repair_id()))

    c10d._process_group_name = named


def restore() -> None:
    global _original
    if _original is not None:
        c10d._process_group_name = _original
        _original = None


def _wrap(name: str) -> Any:
    return c10d.GroupName(name) if hasattr(c10d, "GroupName") else name


def _name(ranks: list[int], use_hashed_name: bool, repair_id: int) -> str:
    world = c10d._world
    if use_hashed_name:
        digest = _digest("_".join(map(str, ranks)))
        while f"{digest}_{repair_id}" in world.pg_names.values():  # another group of the same ranks
            digest = _digest(digest)
        return f"{digest}_{repair_id}"
    if world.default_pg is None:
        world.group_count = 1
        return f"{repair_id}__"
    name = f"{world.group_count}_{repair_id}"
    world.group_count += 1
    return name


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
