"""A step in several rounds: how a rank does the work of missing ones without the script noticing.

While ranks are missing, the data of each is gone through by another rank, so that a step still consists of the same
samples. A rank with two shares is handed two batches for one step, and the script's loop body runs for each as usual:
forward, backward, update. Only the last round completes the step. In the ones before it

- gradients are kept aside (`Reducer.collect`) and `optimizer.step()` does nothing,
- and at its end scheduler, scaler, buffers and extra objects go back to where the step began: whatever the body did
  to them it will do again in the last round.

Every rank runs the same number of rounds, because the body may contain collectives: a rank with fewer shares than the
busiest one goes through one of them twice, and the first time does not count. It would have to wait anyway.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evertrain.torch import rng, settings
from evertrain.torch.data import Feed
from evertrain.torch.data_shares import can_be_shared, of_rank
from evertrain.torch.errors import UsageError
from evertrain.torch.fsdp import StepAside
from evertrain.torch.reducer import Reducer
from evertrain.torch.state import TrainingState


class Shares(Protocol):
    """What a rank has to do in each step, as its generation wants it."""

    shares: tuple[int, ...]
    rounds: int
    dealt: dict[int, tuple[int, ...]]
    """The shares of all ranks that are there."""


class Rounds:
    def __init__(self, state: TrainingState, reducer: Reducer | StepAside) -> None:
        self._state, self._reducer = state, reducer
        self._patched = False
        self._suppressed = False
        self._kept: list[list[torch.Tensor]] = []
        self._calls = 0
        self._counts = True

    def reset(self) -> None:
        """A generation begins; a round that was left in the middle is over."""
        self._suppressed, self._counts = False, True
        self._calls = 0
        self._kept.clear()

    @property
    def completes_step(self) -> bool:
        return not self._suppressed

    @contextlib.contextmanager
    def partial(self, counts: bool) -> Iterator[None]:
        """A round that does not complete the step; if it doesn't count, it only keeps the other ranks company."""
        self._patch()
        self._suppressed, self._counts, self._calls = True, counts, 0
        before = settings.of(self._state.groups())
        with self._reducer.collect(counts):
            yield
        if not self._state.rollback():
            raise UsageError(
                "an extra object holds a large tensor that changes within the step; it can't be put back, so this "
                "script can't do the work of missing ranks: launch it without --ft-elastic, or keep the tensor out of "
                "`extra`"
            )
        settings.put_back(self._state.groups(), before)  # what the function may have set before the loop
        self._suppressed, self._counts, self._calls = False, True, 0

    def end_step(self) -> None:
        self._kept.clear()
        self._calls = 0

    def gather(self, tensor: torch.Tensor, work: Shares, world_size: int) -> torch.Tensor | None:
        number, self._calls = self._calls, self._calls + 1
        if len(self._kept) <= number:
            self._kept.append([])
        if self._counts:
            self._kept[number].append(tensor.detach().clone())
        if self._suppressed:
            return None
        mine = self._kept[number]
        if len(mine) != len(work.shares):
            raise UsageError("call gather() in every pass through the loop's body, and equally often in each")
        if world_size == 1 or not dist.is_initialized():
            return torch.stack(mine)
        rows = torch.stack([*mine, *(mine[:1] * (work.rounds - len(mine)))])  # equally many on all ranks
        gathered = [torch.empty_like(rows) for _ in work.dealt]
        dist.all_gather(gathered, rows)
        found = {
            share: row
            for part, carried in zip(gathered, work.dealt.values(), strict=True)
            for row, share in zip(part, carried, strict=False)
        }
        return torch.stack([found[share] for share in range(world_size)])

    def _patch(self) -> None:
        if self._patched:
            return
        self._patched = True
        for optimizer in self._state.optimizers:
            optimizer.step = self._guarded(optimizer, optimizer.step)

    def _guarded(self, optimizer: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        # As an attribute of the object: the hooks of a step are called by the method, and a shield goes up in one.
        @functools.wraps(step)
        def guarded(*args: Any, **options: Any) -> Any:
            if self._suppressed:
                optimizer._opt_called = True  # or a scheduler warns that it was called too early
                return None
            return step(*args, **options)

        return guarded


class Feeds:
    """The batches of all shares that this rank goes through, for every loader of the script."""

    def __init__(self, state: TrainingState, sampler: Any, rank: int, world_size: int) -> None:
        self._state, self._sampler = state, sampler
        self._rank, self._world_size = rank, world_size
        self._feeds: dict[str, dict[int, Feed]] = {}
        self._loaders: dict[str, Iterable[Any]] = {}

    def open(self, name: str, loader: Iterable[Any], shares: tuple[int, ...]) -> dict[int, Feed]:
        """A feed for each share, at the place where the state is."""
        if self._loaders.get(name) is not loader:
            self._close(name, ())
            self._loaders[name] = loader
        self._close(name, shares)
        feeds = self._feeds.setdefault(name, {})
        for share in shares:
            if share not in feeds:
                feeds[share] = self._make(loader, share)
            feeds[share].seek(*self._state.positions.get(name, (0, 0)))
        return feeds

    def commit(self) -> None:
        for name, feeds in self._feeds.items():
            for feed in feeds.values():
                feed.commit()
            if self._rank in feeds:
                self._state.positions[name] = feeds[self._rank].position

    @property
    def can_be_shared(self) -> bool:
        return bool(self._loaders) and all(can_be_shared(each, self._world_size) for each in self._loaders.values())

    def _make(self, loader: Any, share: int) -> Feed:
        sampler = self._sampler
        try:
            if share != self._rank:
                loader, sampler = of_rank(loader, sampler, share, self._world_size)
            return Feed(
                loader,
                sampler,
                world_size=self._world_size,
                reseed_epoch=lambda epoch: rng.reseed(self._state.seed, rng.EPOCH, share, epoch),
            )
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from None

    def _close(self, name: str, but: tuple[int, ...]) -> None:
        feeds = self._feeds.get(name, {})
        for share in [share for share in feeds if share not in but]:
            feeds.pop(share).close()


def passes(work: Shares) -> list[tuple[int, bool]]:
    """The rounds of a step: whose share, and does it count? The last one completes the step."""
    last = work.shares[-1]
    return [(last, False)] * (work.rounds - len(work.shares)) + [(share, True) for share in work.shares]
