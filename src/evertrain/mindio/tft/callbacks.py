"""The framework's callbacks: how they are registered and how each is called.

A callback that raises has failed; what it returns is ignored, except by clean. They run in the processor's worker
thread, one after the other, on the device that the process had at `tft_init_processor`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from evertrain.mindio.tft import environment, garbage
from evertrain.mindio.tft.log import logger
from evertrain.mindio.tft.messages import RepairUnit, SaveGroup
from evertrain.mindio.tft.numbers import RET_ERROR, RET_EXCEPTION, RET_OK, RepairType

NAMES = (
    "save_ckpt", "rename", "exit", "stop", "clean", "rebuild_group", "repair", "rollback", "stream_sync",
    "zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback",
)  # fmt: skip
_REBUILDS = (RepairType.RT_UCE_HIGHLEVEL.value, RepairType.RT_LOAD_REBUILD.value)


class Callbacks:
    def __init__(self) -> None:
        self._registered: dict[str, tuple[Callable[..., Any], Any]] = {}
        self.args: Any = None
        """What callbacks get as `args`: the object of tft_set_step_args, or the decorator's list of arguments."""
        self.use_device: Callable[[], None] = lambda: None

    def register(self, name: str, func: Callable[..., Any], ctx: Any = None) -> None:
        """The last registration wins."""
        if not callable(func):
            raise TypeError(f"the {name} handler must be callable, not {type(func).__name__}")
        self._registered[name] = (func, ctx)

    def has(self, name: str) -> bool:
        return name in self._registered

    # One method for each, in the order of the table that frameworks are written against.

    def save_ckpt(self, step: int, groups: Iterable[SaveGroup]) -> int:
        if not self.has("save_ckpt"):
            logger.error("no save handler is registered: the checkpoint can't be written")
            return RET_ERROR
        info = [{"type": group.kind, "ranks": list(group.ranks)} for group in groups]
        return self._call("save_ckpt", lambda ctx: (step, info, self.args, ctx))

    def rename(self, step: int) -> int:
        return self._call("rename", lambda ctx: (step, ctx if environment.mindspore() else self.args))

    def exit(self) -> int:
        return self._call("exit", lambda ctx: (ctx,), device=False)

    def stop(self) -> int:
        if not self.has("stop"):
            logger.error("no stop handler is registered: the device can't be stopped")
            return RET_ERROR
        return self._call("stop", lambda ctx: (self.args, ctx))

    def clean(self, is_uce_error: bool) -> int:
        """0 cleaned; 1 failed; 2 memory error, but nothing has to be rebuilt; 4 raised or not registered."""
        if not self.has("clean"):
            logger.error("no clean handler is registered: the device can't be cleaned")
            return RET_EXCEPTION
        return self._call("clean", lambda ctx: (is_uce_error, self.args, ctx), returns=True)

    def rebuild_group(self, fault_ranks: list[int]) -> int:
        return self._call("rebuild_group", lambda ctx: (list(fault_ranks), self.args, ctx))

    def repair(self, step: int, units: list[RepairUnit], rank_list: list[int]) -> int:
        _let_go(units)
        return self._call("repair", lambda ctx: (*_repair_arguments(step, units, rank_list), self.args, ctx))

    def rollback(self, step: int) -> int:
        return self._call("rollback", lambda ctx: (step, self.args, ctx))

    def stream_sync(self) -> int:
        return self._call("stream_sync", lambda ctx: ())

    def zit_downgrade_rebuild(self, groups: list[list[int]], world_ranks: list[int], param: str) -> int:
        """Frameworks want the dense data-parallel group as one list; the others follow from the world."""
        dp_ranks = list(groups[0]) if groups else []
        return self._call(
            "zit_downgrade_rebuild", lambda ctx: (dp_ranks, list(world_ranks), self.args, param), device=False
        )

    def zit_upgrade_rebuild(self, ranks: list[int], param: str) -> int:
        return self._call("zit_upgrade_rebuild", lambda ctx: (list(ranks), self.args, param), device=False)

    def zit_upgrade_repair(self, step: int, units: list[RepairUnit], rank_list: list[int], param: str) -> int:
        _let_go(units)
        return self._call(
            "zit_upgrade_repair",
            lambda ctx: (*_repair_arguments(step, units, rank_list), self.args, param),
            device=False,
        )

    def zit_upgrade_rollback(self, step: int, param: str) -> int:
        return self._call("zit_upgrade_rollback", lambda ctx: (step, self.args, param), device=False)

    def _call(self, name: str, arguments: Callable[[Any], tuple], device: bool = True, returns: bool = False) -> int:
        registered = self._registered.get(name)
        if registered is None:
            return RET_OK
        func, ctx = registered
        began = time.monotonic()
        try:
            if device:
                self.use_device()
            result = func(*arguments(ctx))
        except BaseException:  # a way out of a collective may be no Exception; for the controller it is a failure
            logger.exception("the %s handler failed", name)
            return RET_EXCEPTION if returns else RET_ERROR
        logger.info("the %s handler took %.3f s", name, time.monotonic() - began)
        if not returns:
            return RET_OK
        if not isinstance(result, int):
            logger.error("the %s handler must return 0, 1 or 2, not %r", name, result)
            return RET_EXCEPTION
        return int(result)


def _let_go(units: list[RepairUnit]) -> None:
    """A handler that builds the model anew replaces one that was there when training began."""
    if any(unit.repair_type in _REBUILDS for unit in units):
        garbage.look_at_everything()


def _repair_arguments(step: int, units: list[RepairUnit], rank_list: list[int]) -> tuple:
    """step, need_rebuild, error_ranks, repair_info."""
    repair_type = units[0].repair_type if units else RepairType.RT_ROLLBACK.value
    targets = [unit.dst for unit in units]
    info = {
        "type": [unit.kind for unit in units],
        "repair_type": repair_type,
        "src": [unit.src for unit in units],
        "dst": targets,
        "rank_list": list(rank_list),
    }
    return step, repair_type in _REBUILDS, list(targets), info
