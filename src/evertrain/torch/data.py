"""Serving a loader's batches to steps that may have to be run again.

A `Feed` stands between the user's loader and the training loop. Its position (epoch, index) counts the batches of
committed steps. `take` gives the batches after the position and keeps them until `commit`, so a step that is run again
gets the same ones from memory, without a word to the loader. `seek` goes anywhere else, in a process that has never
read a batch as well as in one that has.

What holds, for a loader whose samples depend on nothing but their index and the default generators of torch, `random`
and NumPy: the batch at a position is the same bits whenever and wherever it is served. It does not matter how many
times the process was interrupted, whether it is a replacement, and, for map-style datasets, how many workers there
are. Random augmentation and random collation are included, because every batch is made under a seed of its own. For an
IterableDataset they are included too, since what is skipped is made and thrown away.

Not included are generators that a dataset or a transform keeps in itself: their state depends on how many samples that
worker has made. Nor is a sampler that counts epochs in itself instead of having `set_epoch`; torch's samplers with a
`generator` are taken care of.

Taking batches uses the process's generators: seed them for the step after `take`, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from evertrain.torch.data_record import Record
from evertrain.torch.data_source import Epochs, IndexedSource, StreamSource, iterates_as_usual, samplers_of


class _Served(NamedTuple):
    """One batch in memory."""

    batch: Any
    record: Record
    end: tuple[int, int]
    """The position after it."""


class _Held(NamedTuple):
    """Position and batches change together, by one assignment: an interrupt can come between any two."""

    position: tuple[int, int]
    served: list[_Served]


class Feed:
    """The batches of `loader`, from any position, again if needed.

    `sampler` is needed only to say that this rank's data is its own although the sampler doesn't look like it.
    `reseed_epoch(epoch)` seeds the process's generators for drawing an epoch's order.

    After the last batch of an epoch the position is (epoch, length); the next batch is that of (epoch + 1, 0).
    """

    def __init__(
        self, loader: Any, sampler: Any = None, *, world_size: int = 1, reseed_epoch: Callable[[int], None]
    ) -> None:
        _check(loader, sampler, world_size)
        epochs = Epochs(loader, sampler, reseed_epoch)
        self._source: IndexedSource | StreamSource
        if _is_indexed(loader) and iterates_as_usual(loader):
            self._source = IndexedSource(loader, epochs)
        else:
            self._source = StreamSource(loader, epochs)
        self._held = _Held((0, 0), [])
        self._taken = 0
        self._batches: Iterator[Any] | None = None
        """What comes after the batches in memory."""
        self._inside = False
        """In the loader's code, or thrown out of it: its iterator can't be used any more."""

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, index): the batches consumed by committed steps."""
        return self._held.position

    def take(self, n: int = 1) -> list[Any]:
        """The `n` batches after the position, over the end of an epoch if need be; the same ones until `commit`."""
        if n < 1:
            raise ValueError(f"a step takes at least one batch, not {n}")
        served = self._held.served
        if len(served) < n:
            self._fetch(served, n)
        self._taken = n
        return [each.batch for each in served[:n]]

    def commit(self) -> None:
        """The step is done: the position moves past the batches that it took."""
        self._pass(self._taken)

    def seek(self, epoch: int, index: int) -> None:
        """Make (epoch, index) the position.

        If the step is to be run again, or was completed with a peer's state, the batches in memory do; unless user
        code wrote into them. Then, and for any other position, the loader is read anew from there.
        """
        if epoch < 0 or index < 0:
            raise ValueError(f"there is no position ({epoch}, {index})")
        target = (epoch, index)
        ends = [each.end for each in self._held.served]
        if target != self._held.position and target in ends:
            self._pass(ends.index(target) + 1)
        position, served = self._held
        if position != target or not all(each.record.restore() for each in served):
            self._drop()
            self._held = _Held(target, [])
        self._taken = 0

    def close(self) -> None:
        """End the loader's workers and wait until they are gone. A later `take` starts them again."""
        self._drop()
        self._held = _Held(self._held.position, [])
        self._taken = 0
        self._source.close()

    def _pass(self, count: int) -> None:
        if count:
            served = self._held.served
            self._held = _Held(served[count - 1].end, served[count:])
            self._taken = 0

    def _fetch(self, served: list[_Served], n: int) -> None:
        if self._inside:  # a second interrupt came while the first one was dealt with
            self._drop()
        self._inside = True
        try:
            while len(served) < n:
                served.append(self._next(served[-1].end if served else self._held.position))
        except BaseException:
            self._drop()
            raise
        self._inside = False

    def _next(self, position: tuple[int, int]) -> _Served:
        epoch, index = position
        if self._batches is None:
            self._batches = self._source.open(epoch, index)
        while True:
            try:
                batch = next(self._batches)
            except StopIteration:
                if index == 0:
                    raise ValueError(
                        f"the loader has no batch in epoch {epoch}: the dataset is empty, or smaller than a batch with "
                        "drop_last, or the loader can be read only once"
                    ) from None
                epoch, index = epoch + 1, 0
                self._batches = self._source.open(epoch, index)
            else:
                return _Served(batch, Record(batch), (epoch, index + 1))

    def _drop(self) -> None:
        self._batches = None
        self._source.drop()
        self._inside = False


def _is_indexed(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _check(loader: Any, sampler: Any, world_size: int) -> None:
    """Refuse what could not be served again, and what would silently train on the wrong data."""
    if hasattr(loader, "__next__"):
        raise TypeError(
            f"the loader is a {type(loader).__name__}, which can be read only once; a step that is run again needs its "
            "batches a second time. Pass the object it was made from: a DataLoader, a list, or an object whose "
            "__iter__ starts from the beginning"
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"the loader is a {type(loader).__name__}, which can't be iterated")
    own = samplers_of(loader)
    if sampler is not None:
        candidates = [*own, getattr(loader, "sampler", None)]
        if isinstance(loader, DataLoader) and not any(sampler is candidate for candidate in candidates):
            raise ValueError(
                f"the sampler ({type(sampler).__name__}) is not the loader's ({type(loader.sampler).__name__}): it "
                "would be told the epochs, and the loader would repeat the order of its first epoch"
            )
    elif world_size > 1 and _is_indexed(loader) and not any(hasattr(each, "num_replicas") for each in own):
        raise ValueError(
            f"every one of the {world_size} ranks would read the same samples: {type(own[-1]).__name__} doesn't share "
            "them out. Give the DataLoader a torch.utils.data.distributed.DistributedSampler, or pass "
            "sampler=loader.sampler if each rank already has data of its own"
        )
