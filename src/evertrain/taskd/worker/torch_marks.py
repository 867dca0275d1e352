"""Marks of a PyTorch training that knows nothing of them: put in when profiling is switched on, taken out when off.

A step lasts from one end of an optimizer's update to the next. A forward pass is that of the outermost module. What DDP
exchanges is told by `ddp_times`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

from evertrain.mindio.tft.numbers import DataStatus
from evertrain.mindio.tft.runtime import runtime
from evertrain.taskd.worker.ddp_times import DdpTimes
from evertrain.taskd.worker.marks import COMMUNICATION, marks

_COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "send", "recv",
)  # fmt: skip


class TorchMarks:
    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._steps = 0
        self._step: int | None = None
        self._depth = threading.local()
        self._inside = threading.local()
        self._ddp: DdpTimes | None = None

    def put_in(self) -> None:
        if self._undo:
            return
        optimizer = importlib.import_module("torch.optim.optimizer")
        module = importlib.import_module("torch.nn.modules.module")
        torch = importlib.import_module("torch")
        private = importlib.import_module("evertrain.taskd.agent.torch_private")  # it loads torch
        c10d = importlib.import_module("torch.distributed")
        self._ddp = DdpTimes()
        hooks = [
            optimizer.register_optimizer_step_post_hook(self._updated),
            module.register_module_forward_pre_hook(self._forward_begins),
            module.register_module_forward_hook(self._forward_ends, always_call=True),
        ]
        self._undo = [hook.remove for hook in hooks]
        self._wrap(private.data_iterator(), "__next__", "dataloader")
        self._wrap(torch, "save", "save_checkpoint")
        for name in _COLLECTIVES:
            if hasattr(c10d, name):
                self._wrap(c10d, name, name, COMMUNICATION)
        if (checkpoints := sys.modules.get("evertrain.torch.part_checkpoints")) is not None:
            self._wrap(checkpoints.PartCheckpoints, "save_parts", "save_checkpoint")
        if (groups := sys.modules.get("evertrain.torch.groups")) is not None:
            self._wrap_guarded(groups)

    def take_out(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self._step = None
        if self._ddp is not None:
            self._ddp.end()

    def _wrap(self, owner: Any, name: str, mark: str, domain: str = "default") -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not marks.on(domain) or self._is_inside(domain):
                return original(*args, **kwargs)
            setattr(self._inside, domain, True)
            try:
                with marks.span(mark, domain):
                    return original(*args, **kwargs)
            finally:
                setattr(self._inside, domain, False)

        self._put(owner, name, original, marked)

    def _put(self, owner: Any, name: str, original: Any, instead: Any) -> None:
        setattr(owner, name, instead)
        self._undo.append(lambda: setattr(owner, name, original))

    def _is_inside(self, domain: str) -> bool:
        """One operation may be made of others, which are not counted again."""
        return getattr(self._inside, domain, False)

    def _wrap_guarded(self, groups: Any) -> None:
        """Operations of groups that can be left last until somebody has waited for them."""
        begin, wait = groups.GuardedGroup._start, groups.GuardedWork.wait

        @functools.wraps(begin)
        def marked_begin(group: Any, name: str, *args: Any) -> Any:
            if not marks.communication or self._is_inside(COMMUNICATION):
                return begin(group, name, *args)
            number = marks.begin(name, COMMUNICATION)
            try:
                work = begin(group, name, *args)
            except BaseException:
                marks.end(number, name, COMMUNICATION)
                raise
            work.mark = (number, name)
            return work

        @functools.wraps(wait)
        def marked_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return wait(work, *args, **kwargs)
            finally:
                mark, work.mark = getattr(work, "mark", None), None
                if mark is not None:
                    number, name = mark
                    marks.end(number, name, COMMUNICATION)

        self._put(groups.GuardedGroup, "_start", begin, marked_begin)
        self._put(groups.GuardedWork, "wait", wait, marked_wait)

    def _updated(self, *_: Any) -> None:
        if not marks.default:
            return
        if self._step is not None:
            marks.end(self._step, f"step {self._steps}")
        self._steps += 1
        self._step = marks.begin(f"step {self._steps}")

    def _forward_begins(self, *_: Any) -> None:
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth == 0 and marks.default:
            self._depth.number = marks.begin("forward")

    def _forward_ends(self, module: Any, *_: Any) -> None:
        if self._ddp is not None:
            self._ddp.forward_ended(module)
        self._depth.value = depth = max(getattr(self._depth, "value", 1) - 1, 0)
        if depth == 0 and getattr(self._depth, "number", None) is not None:
            marks.end(self._depth.number, "forward")
            self._depth.number = None


def tell_steps(step_setter: Callable[[int], None]) -> Callable[[], None]:
    """Call it with the training's step at each update of an optimizer, for crash reports. Returns what ends that."""
    optimizer = importlib.import_module("torch.optim.optimizer")
    updates = itertools.count(1)
    hook = optimizer.register_optimizer_step_post_hook(lambda *_: step_setter(_step(next(updates))))
    remove: Callable[[], None] = hook.remove
    return remove


def _step(updates: int) -> int:
    """As MindIO was told it. Without MindIO, or before its first step here, nobody knows more than how many updates
    this process has done."""
    processor = runtime.processor
    if processor is None or not processor.steps.step:
        return updates
    return processor.steps.step + int(processor.steps.data_status == DataStatus.UPDATING)
