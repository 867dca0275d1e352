"""The loader that another rank would have: how a rank reads the data of one that is missing.

With torch's `DistributedSampler` all ranks draw the same order and each takes every n-th sample, so a copy of the
sampler with another rank in it reads another rank's samples. A sampler of the user's own may do anything with its rank;
it can join in with a method `for_rank(rank)` that returns the sampler of that rank. All other loaders, streams above
all, can't be read for somebody else.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from evertrain.torch.data_source import iterates_as_usual


def can_be_shared(loader: Any, world_size: int) -> bool:
    """Can any rank read what is meant for any other?"""
    return world_size == 1 or _find(loader, world_size) is not None


def of_rank(loader: DataLoader, sampler: Any, rank: int, world_size: int) -> tuple[DataLoader, Any]:
    """The loader, and the sampler that goes with it, of another rank."""
    mine = _find(loader, world_size)
    if mine is None:
        raise TypeError(f"the data of rank {rank} can't be read here: {type(loader).__name__} can't be shared out anew")
    theirs = mine.for_rank(rank) if hasattr(mine, "for_rank") else _with_rank(mine, rank)
    batches: Any = loader.batch_sampler
    clone = copy.copy(loader)
    if batches is mine:
        changes: dict[str, Any] = {"batch_sampler": theirs}
    elif batches is None:
        changes = {"sampler": theirs}
    else:
        batches = copy.copy(batches)
        batches.sampler = theirs
        changes = {"sampler": theirs, "batch_sampler": batches}
    # DataLoader refuses assignments once it is made, because its iterators would not notice; this one has none yet.
    clone.__dict__.update(changes, _iterator=None)
    replaced = {id(mine): theirs, id(loader.batch_sampler): clone.batch_sampler}
    return clone, replaced.get(id(sampler), sampler)


def _find(loader: Any, world_size: int) -> Any:
    """The sampler in which the rank is."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if not iterates_as_usual(loader):
        return None
    batches = loader.batch_sampler
    candidate = loader.sampler if batches is None or type(batches) is BatchSampler else batches
    if hasattr(candidate, "for_rank"):
        return candidate
    plain = type(candidate) is DistributedSampler and candidate.num_replicas == world_size
    return candidate if plain else None


def _with_rank(sampler: DistributedSampler, rank: int) -> DistributedSampler:
    twin = copy.copy(sampler)
    twin.rank = rank
    return twin
