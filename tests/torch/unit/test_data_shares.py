"""Whoever is missing, a step consists of the same samples, made with the same random numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from evertrain.mindio import shares
from evertrain.torch.data_shares import can_be_shared, of_rank
from evertrain.torch.errors import UsageError
from evertrain.torch.rounds import Feeds, passes
from evertrain.torch.state import TrainingState


class Noisy(Dataset):
    """Samples with random augmentation."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def make_loader(rank: int, world_size: int, *, size: int = 37, batch: int = 3, drop_last: bool = True) -> DataLoader:
    sampler = DistributedSampler(Noisy(size), world_size, rank, shuffle=True, seed=5, drop_last=drop_last)
    return DataLoader(sampler.dataset, batch, sampler=sampler, drop_last=drop_last)


class Rank:
    """What a rank's loop does to its feeds."""

    def __init__(self, rank: int, world_size: int, **options: int | bool) -> None:
        self.rank, self.world_size = rank, world_size
        model = torch.nn.Linear(1, 1)
        self.state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=11)
        self.loader = make_loader(rank, world_size, **options)
        self.feeds = Feeds(self.state, self.loader.sampler, rank, world_size)

    def step(self, members: list[int]) -> dict[int, list]:
        """One step with these members; what this rank read, by share."""
        carried = shares.deal(self.world_size, members)[self.rank]
        feeds = self.feeds.open("0", self.loader, carried)
        read = {share: [t.tolist() for t in feeds[share].take(1)[0]] for share in carried}
        self.state.step += 1
        self.feeds.commit()
        return read


def everything(job: dict[int, Rank], members: list[int]) -> dict[int, list]:
    parts = [job[rank].step(members) for rank in members]
    assert len({share for part in parts for share in part}) == sum(map(len, parts)), "a share was read twice"
    return {share: read for part in parts for share, read in part.items()}


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_the_same_samples_with_every_subset_in_every_order(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(2, 5))
    options = {"batch": data.draw(st.integers(1, 4)), "drop_last": data.draw(st.booleans())}
    full = {rank: Rank(rank, world_size, **options) for rank in range(world_size)}
    shrinking = {rank: Rank(rank, world_size, **options) for rank in range(world_size)}
    members = list(range(world_size))
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.sets(st.sampled_from(range(world_size)), min_size=1))
        for newcomer in chosen.difference(members):
            # A replacement: nothing in memory, the state of those who stayed.
            fresh = shrinking[newcomer] = Rank(newcomer, world_size, **options)
            source = shrinking[members[0]].state
            fresh.state.step, fresh.state.positions = source.step, dict(source.positions)
        members = sorted(chosen)
        assert everything(shrinking, members) == everything(full, list(range(world_size)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_subset_of_four_reads_the_whole_step(count: int) -> None:
    expected = everything({rank: Rank(rank, 4) for rank in range(4)}, [0, 1, 2, 3])
    for members in itertools.combinations(range(4), count):
        assert everything({rank: Rank(rank, 4) for rank in members}, list(members)) == expected


def test_a_rank_with_little_to_do_keeps_the_others_company() -> None:
    class Work:
        dealt = shares.deal(4, [0, 1, 3])
        shares = dealt[3]
        rounds = 2

    assert passes(Work()) == [(3, False), (3, True)]
    Work.shares = Work.dealt[0]
    assert passes(Work()) == [(2, True), (0, True)], "share 0 comes last: its buffers are everybody's"


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Own:
    """A sampler that deals out blocks."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_replicas = rank, 2

    def __iter__(self):
        return iter(range(self.rank * 8, self.rank * 8 + 8))

    def __len__(self) -> int:
        return 8


class Willing(Own):
    def for_rank(self, rank: int) -> Willing:
        return Willing(rank)


def test_what_can_be_shared() -> None:
    data = Noisy(16)
    assert can_be_shared(make_loader(0, 2), 2)
    assert can_be_shared(DataLoader(data, 4, sampler=Willing(0)), 2)
    assert can_be_shared(DataLoader(data, batch_size=None, sampler=Willing(0)), 2)
    assert can_be_shared([1, 2, 3], 1), "with one rank nobody can be missing"
    assert not can_be_shared(make_loader(0, 3), 2), "the sampler counts other ranks"
    assert not can_be_shared(DataLoader(data, 4, sampler=Own(0)), 2), "its rank may be used up in its constructor"
    assert not can_be_shared(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)), 2)
    assert not can_be_shared(DataLoader(Stream(), 2), 2)
    assert not can_be_shared([1, 2, 3], 2)


def test_a_sampler_of_ones_own_says_what_another_rank_reads() -> None:
    loader = DataLoader(Noisy(16), 4, sampler=Willing(0))
    theirs, sampler = of_rank(loader, loader.sampler, 1, 2)
    assert [ids.tolist() for ids, _ in theirs] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert sampler is theirs.sampler
    assert [ids.tolist() for ids, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]], "the own loader is as it was"


def test_a_loader_that_can_not_be_shared_says_so() -> None:
    rank = Rank(0, 2)
    rank.loader = DataLoader(Noisy(16), 4, sampler=Own(0))
    rank.feeds = Feeds(rank.state, rank.loader.sampler, 0, 2)
    with pytest.raises(UsageError, match="rank 1 can't be read"):
        rank.step([0])
