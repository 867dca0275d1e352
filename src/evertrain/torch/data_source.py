"""Reading one epoch of a loader from any batch on, the same each time.

An epoch is opened at a batch number. What must not depend on the past is the order of the samples, the random numbers
drawn while a batch is made, and whatever a sampler keeps in itself:

- Opening epoch e always does the same: `set_epoch(e)` on what has it, generators that the user gave to samplers seeded
  from their own seed and e, the process's generators seeded for e, then one draw for the epoch's key, then the sampler.
  That is the order of draws of `iter(DataLoader)`, so the samples come as in a plain loop that is seeded alike.
- Every batch is made under a seed of its own, from the epoch's key and the batch's number. A batch is always made whole
  and in one process, so this is enough for random augmentation and random collation to give the same bits after any
  recovery, with any number of workers; seeding for each sample would cost more and give no more.
- A sampler that draws from the process's generators as it goes (torch's own draw everything at the start) gets a seed
  for each draw likewise.

`IndexedSource` skips at the level of indices and never loads what is skipped. `StreamSource` has no indices and
consumes what it skips.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from evertrain.torch.data_workers import Workers, rebuilt
from evertrain.torch.rng import BATCH, DRAW, GENERATOR, mix, reseed_host

_END = object()
_NOTHING = object()

_DRAW_AT_START = (
    SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler, list, tuple, range
)  # fmt: skip
"""Exactly these, not their subclasses, draw nothing from the process's generators after their first element."""

_first_seeds: weakref.WeakKeyDictionary[torch.Generator, int] = weakref.WeakKeyDictionary()
"""The seed the user gave each generator; we seed it anew for each epoch, and a second feed must not build on that."""


def iterates_as_usual(loader: DataLoader) -> bool:
    """False for subclasses that bring an iteration of their own, which a loader built by us would not have."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def samplers_of(loader: Any) -> list[Any]:
    """The samplers that decide a loader's order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [batch_sampler, getattr(batch_sampler, "sampler", None)]
    if batch_sampler is None or getattr(loader, "batch_size", None) is not None:
        found.append(getattr(loader, "sampler", None))  # beside a custom batch sampler it is a dummy
    return _distinct(found)


def _distinct(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things if thing is not None}.values())


class Epochs:
    """Brings everything that an epoch's order depends on into a state that depends on the epoch's number only."""

    def __init__(self, loader: Any, sampler: Any, reseed_epoch: Callable[[int], None]) -> None:
        holders = _distinct([sampler, *samplers_of(loader)])
        numbered = _distinct([*holders, loader, getattr(loader, "dataset", None)])
        self._set_epoch = [thing.set_epoch for thing in numbered if callable(getattr(thing, "set_epoch", None))]
        self._generators = _distinct(
            value
            for holder in [*holders, loader]
            for value in getattr(holder, "__dict__", {}).values()
            if isinstance(value, torch.Generator) and value is not torch.default_generator
        )
        for generator in self._generators:
            _first_seeds.setdefault(generator, generator.initial_seed())
        self._reseed_epoch = reseed_epoch

    def begin(self, epoch: int) -> int:
        """Begin drawing this epoch; returns its key."""
        for set_epoch in self._set_epoch:
            set_epoch(epoch)
        for generator in self._generators:
            # Without the rank: ranks that share a generator's seed do so in order to draw the same.
            generator.manual_seed(mix(_first_seeds[generator], GENERATOR, epoch))
        self._reseed_epoch(epoch)
        return int(torch.empty((), dtype=torch.int64).random_().item())


class IndexedSource:
    """A DataLoader over a map-style dataset."""

    def __init__(self, loader: DataLoader, epochs: Epochs) -> None:
        self._loader = loader
        self._epochs = epochs
        self._order: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        basis = self._order.sampler if type(self._order) is BatchSampler else self._order
        self._draws_late = type(basis) not in _DRAW_AT_START
        # The dataset of a persistent worker is a copy which set_epoch doesn't reach: it would stay at the epoch in
        # which the worker was started, and that is another one after a recovery.
        self._persistent = loader.persistent_workers and not hasattr(loader.dataset, "set_epoch")
        self._current = _Current()
        self._workers = Workers()

    def open(self, epoch: int, index: int) -> Iterator[Any]:
        key = self._epochs.begin(epoch)
        replay = _Replay(self._order, key, self._draws_late, in_process=self._loader.num_workers == 0)
        if not replay.skip(index):
            _no_such_batch(epoch, index)
        if replay.exhausted:
            return iter(())  # no workers are started to find that out
        self._current.replay = replay
        return self._workers.start(self._build, key)

    def _build(self) -> DataLoader:
        if self._loader.batch_sampler is not None:
            order: dict[str, Any] = {"batch_sampler": self._current}
        else:
            order = {"batch_size": None, "sampler": self._current}
        return rebuilt(self._loader, self._workers.generator, persistent=self._persistent, **order)

    def drop(self) -> None:
        self._workers.drop()

    def close(self) -> None:
        self._workers.close()


class StreamSource:
    """Anything that can be iterated again and again: a list of batches, a DataLoader over an IterableDataset."""

    def __init__(self, loader: Any, epochs: Epochs) -> None:
        self._loader = loader
        self._epochs = epochs
        self._workers = Workers()
        # Workers draw from generators of their own, seeded when they start; nothing of ours reaches them later.
        self._seeded = not (isinstance(loader, DataLoader) and loader.num_workers > 0)

    def open(self, epoch: int, index: int) -> Iterator[Any]:
        self._workers.drop()  # persistent workers would go on with the random numbers of the epoch before
        key = self._epochs.begin(epoch)
        inner = self._workers.start(self._build, key)
        batches = _seeded(inner, key) if self._seeded else inner
        for _ in range(index):
            if next(batches, _END) is _END:
                _no_such_batch(epoch, index)
        return batches

    def _build(self) -> Any:
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return loader
        if iterates_as_usual(loader) and isinstance(loader.dataset, IterableDataset):
            order = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            return rebuilt(loader, self._workers.generator, persistent=False, **order)
        loader._iterator = None  # that of persistent workers, which has been dropped
        return loader

    def drop(self) -> None:
        self._workers.drop()

    def close(self) -> None:
        self._workers.close()


def _no_such_batch(epoch: int, index: int) -> None:
    raise ValueError(
        f"epoch {epoch} has no {index} batches to skip: the loader is shorter than the one this position comes from; "
        "dataset, batch size, sampler and world size must be the same"
    )


def _seeded(inner: Iterator[Any], key: int) -> Iterator[Any]:
    # The first batch is made under the epoch's own seed, under which a dataset shuffles itself.
    for number in itertools.count():
        if number:
            reseed_host(key, BATCH, number)
        batch = next(inner, _END)
        if batch is _END:
            return
        yield batch


class _Replay:
    """The indices of an epoch's batches from a position on, each with the seed under which its batch is to be made."""

    def __init__(self, order: Iterable[Any], key: int, draws_late: bool, in_process: bool) -> None:
        self._key = key
        self._draws_late = draws_late
        self._in_process = in_process
        self._number = 0
        self._draws = iter(order)
        # Samplers draw when their first element is asked for, not before: ask now, while the seed is the epoch's.
        self._ahead = next(self._draws, _END)

    @property
    def exhausted(self) -> bool:
        """Asked before the first batch is handed out: there is none."""
        return self._ahead is _END

    def skip(self, count: int) -> bool:
        """Go past this many batches; False if there are fewer."""
        for _ in range(count):
            if self.exhausted:
                return False
            self._number += 1
            self._ahead = self._draw()
        return True

    def _draw(self) -> Any:
        if self._draws_late:
            reseed_host(self._key, DRAW, self._number)
        return next(self._draws, _END)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # Never ahead of what is asked for: some batch samplers fill the same list again and again.
        index = self._draw() if self._ahead is _NOTHING else self._ahead
        if index is _END:
            raise StopIteration
        number = self._number
        self._ahead = _NOTHING
        self._number = number + 1
        if self._in_process:
            return _seed_and_pass(self._key, number, index)  # the loader makes the batch as its next action
        return _Ticket(self._key, number, index)


class _Ticket:
    """A batch's indices on their way to a worker: unpickling seeds the worker and leaves nothing but the indices.

    The worker unpickles an order immediately before it carries it out, so this seeds it at the right moment, and
    neither dataset nor collate function nor `get_worker_info().dataset` is a wrapper of ours.
    """

    __slots__ = ("_contents",)

    def __init__(self, key: int, number: int, index: Any) -> None:
        self._contents = (key, number, index)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _seed_and_pass, self._contents


def _seed_and_pass(key: int, number: int, index: Any) -> Any:
    reseed_host(key, BATCH, number)
    return index


class _Current:
    """The sampler of a loader that outlives an epoch: hands out the current replay."""

    replay: _Replay

    def __iter__(self) -> Iterator[Any]:
        return self.replay
