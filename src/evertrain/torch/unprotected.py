"""The same training function without the launcher: plain `python`, plain `torchrun`.

It trains normally, with the same reducer and the same random numbers, and therefore to the same bits; only nobody is
there to notice a fault and to lead a recovery. It says so once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from evertrain.mindio.board import Board
from evertrain.torch import backends
from evertrain.torch.default_group import replace_init_process_group
from evertrain.torch.fsdp import StepAside
from evertrain.torch.reducer import Reducer
from evertrain.torch.state import TrainingState

T = TypeVar("T")

_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def patch_init_process_group() -> Callable[[], None]:
    """Under plain `python` a script's own `init_process_group()` makes a group of one; returns a function that takes
    the patch back. Whoever says anything about the other processes, with arguments or variables, is taken at their
    word."""
    original = c10d.init_process_group

    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: dist.Store | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        told = init_method not in (None, "env://") or (world_size, rank, store) != (-1, -1, None)
        if not told and not any(name in os.environ for name in _PLACE):
            init_method, world_size, rank, store = None, 1, 0, dist.HashStore()
            print(
                "evertrain: there is no RANK in the environment: init_process_group made a group of this process alone",
                file=sys.stderr,
                flush=True,
            )
        original(backend, init_method, timeout, world_size, rank, store, *args, **options)

    return replace_init_process_group(init_process_group)


class Unprotected:
    def __init__(
        self, rank: int, world_size: int, state: TrainingState, reducer: Reducer | StepAside, board: Board
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._state, self._reducer, self._board = state, reducer, board
        self.update_open = False
        self.shares: tuple[int, ...] = (rank,)
        self.rounds = 1
        self.dealt: dict[int, tuple[int, ...]] = {each: (each,) for each in range(world_size)}
        self.is_first = rank == 0

    def begin_update(self) -> None:
        self.update_open = True

    def end_step(self, advance: Callable[[], None]) -> None:
        self.update_open = False
        advance()
        self._board.progress(self._state.step)

    def log(self, name: str, **fields: Any) -> None:
        """There is no timeline without the launcher."""

    def run(self, function: Callable[[], T], finish_step: Callable[[], None]) -> T:
        if self._rank == 0:
            print(
                "evertrain: this run is not protected: start it with `evertrain launch` instead of python or torchrun",
                file=sys.stderr,
                flush=True,
            )
        if self._world_size > 1:
            self._join()
        result = function()
        if self.update_open:
            finish_step()
        return result

    def _join(self) -> None:
        device = next(self._state.model.parameters()).device
        if not dist.is_initialized():
            name = backends.pick(device.type).name
            dist.init_process_group(name if device.type == "cpu" else f"cpu:gloo,{device.type}:{name}")
        told = torch.tensor([self._state.seed, int(self._state.run or "0", 16)], dtype=torch.uint64).view(torch.int64)
        dist.broadcast(told := told.to(device), src=0)
        self._state.seed, run = told.cpu().view(torch.uint64).tolist()
        self._state.run = f"{run:016x}" if self._state.run else ""
        for tensor in [*self._state.weights(), *self._state.model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self._reducer.attach(dist.group.WORLD)
        if self._state.sharding is not None:
            self._state.sharding.attach(dist.group.WORLD)
