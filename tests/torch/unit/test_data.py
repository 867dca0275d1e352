"""A feed serves the batches of a plain loop, from every position, after every kind of disturbance."""

from __future__ import annotations

import itertools
import random
import threading
import time

import numpy
import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from evertrain.torch import rng
from evertrain.torch.data import Feed
from evertrain.torch.interrupt import Interrupted, Interrupter

SIZE = 14


def reseed_epoch(epoch: int) -> None:
    rng.reseed(42, rng.EPOCH, 0, epoch)


class Squares(Dataset):
    """The index and its square; counts what is loaded in this process."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        self.loaded.append(index)
        return torch.tensor([index, index * index] if isinstance(index, int) else index)


class Noisy(Squares):
    """Augments with all three generators."""

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), float(numpy.random.rand()), torch.rand(()).item()])


class NoisyInBulk(Noisy):
    def __getitems__(self, indices):
        return list(torch.stack([torch.tensor(indices).float(), torch.rand(len(indices))], 1))


class Stream(IterableDataset):
    """Shards itself over workers, shuffles and augments."""

    def __iter__(self):
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        order = list(range(first, SIZE, stride))
        random.shuffle(order)
        for index in order:
            yield torch.tensor([index, torch.rand(()).item()])


class Buckets:
    """A batch sampler that draws as it goes."""

    def __iter__(self):
        for _ in range(5):
            yield random.sample(range(SIZE), random.randint(1, 4))


class Reusing:
    """A batch sampler that fills the same list again and again; with workers torch itself can't cope with it."""

    def __iter__(self):
        batch: list[int] = []
        for indices in Buckets():
            batch[:] = indices
            yield batch


class Alternating:
    """A batch sampler with set_epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(SIZE))[:: -1 if self.epoch % 2 else 1]
        return iter([order[i : i + 3] for i in range(0, SIZE, 3)])


def random_mix(samples):
    """A collate function that draws."""
    return torch.stack(samples) * random.random()


LOADERS = {
    "sequential": lambda **kw: DataLoader(Squares(), batch_size=3, **kw),
    "shuffle": lambda **kw: DataLoader(Squares(), batch_size=3, shuffle=True, **kw),
    "drop_last": lambda **kw: DataLoader(Squares(), batch_size=3, shuffle=True, drop_last=True, **kw),
    "replacement": lambda **kw: DataLoader(
        Squares(), batch_size=9, sampler=RandomSampler(range(SIZE), replacement=True, num_samples=70), **kw
    ),
    "weighted": lambda **kw: DataLoader(
        Squares(), batch_size=3, sampler=WeightedRandomSampler([1.0 + i for i in range(SIZE)], SIZE), **kw
    ),
    "distributed": lambda **kw: DataLoader(
        Squares(30), batch_size=3, sampler=DistributedSampler(range(30), num_replicas=2, rank=1, shuffle=True), **kw
    ),
    "single": lambda **kw: DataLoader(Squares(6), batch_size=None, shuffle=True, **kw),
    "bulk": lambda **kw: DataLoader(
        Squares(), batch_size=None, sampler=BatchSampler(RandomSampler(range(SIZE)), 4, True), **kw
    ),
    "batch sampler": lambda **kw: DataLoader(Squares(), batch_sampler=Alternating(), **kw),
}
RANDOM_LOADERS = {
    "augmented": lambda **kw: DataLoader(Noisy(), batch_size=3, shuffle=True, **kw),
    "augmented in bulk": lambda **kw: DataLoader(NoisyInBulk(), batch_size=3, shuffle=True, **kw),
    "augmented single": lambda **kw: DataLoader(Noisy(6), batch_size=None, shuffle=True, **kw),
    "random collate": lambda **kw: DataLoader(Squares(), batch_size=3, collate_fn=random_mix, **kw),
    "generator": lambda **kw: DataLoader(
        Noisy(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5), **kw
    ),
    "replacement, generator": lambda **kw: DataLoader(
        Noisy(),
        batch_size=9,
        sampler=RandomSampler(range(SIZE), True, 70, generator=torch.Generator().manual_seed(5)),
        **kw,
    ),
    "late draws": lambda **kw: DataLoader(Noisy(), batch_sampler=Buckets(), **kw),
    "stream": lambda **kw: DataLoader(Stream(), batch_size=3, **kw),
}
WORKERS = {
    "in process": {},
    "2 workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.fixture
def feed_of():
    feeds = []
    before = set(psutil.Process().children())

    def make(loader, *args, **kwargs) -> Feed:
        feeds.append(Feed(loader, *args, reseed_epoch=reseed_epoch, **kwargs))
        return feeds[-1]

    yield make
    for feed in feeds:
        feed.close()
    assert not set(psutil.Process().children()) - before, "a loader's worker was left behind"


def plain_loop(loader, epochs: int) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """(position before it, batch) of every batch, read as a script without a feed would."""
    result = []
    for epoch in range(epochs):
        for candidate in (loader.sampler, loader.batch_sampler):
            if hasattr(candidate, "set_epoch"):
                candidate.set_epoch(epoch)
        reseed_epoch(epoch)
        result += [((epoch, index), batch) for index, batch in enumerate(loader)]
    return result


def disturb() -> None:
    """What a training step does to the process's generators, different each time."""
    random.seed()
    torch.default_generator.seed()
    numpy.random.seed()


def serve(feed: Feed, count: int) -> list[torch.Tensor]:
    batches = []
    for _ in range(count):
        batches += feed.take()
        disturb()
        feed.commit()
    return batches


def assert_same(ours, expected) -> None:
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", LOADERS)
def test_serves_what_a_plain_loop_reads(name, workers, feed_of):
    # Persistent workers have the plain loop leave out a draw at the start of later epochs; the feed doesn't differ.
    expected = plain_loop(LOADERS[name](num_workers=WORKERS[workers].get("num_workers", 0)), epochs=3)
    feed = feed_of(LOADERS[name](**WORKERS[workers]))
    assert_same(serve(feed, len(expected)), [batch for _, batch in expected])


@pytest.mark.parametrize("name", LOADERS)
def test_from_every_position_in_any_order(name, feed_of):
    expected = plain_loop(LOADERS[name](), epochs=3)
    feed = feed_of(LOADERS[name]())
    order = list(range(len(expected)))
    random.Random(1).shuffle(order)
    for start in order:
        disturb()
        feed.seek(*expected[start][0])
        assert feed.position == expected[start][0]
        assert_same(serve(feed, min(3, len(expected) - start)), [batch for _, batch in expected[start : start + 3]])


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", RANDOM_LOADERS)
def test_random_draws_are_the_same_from_every_position(name, workers, feed_of):
    make = RANDOM_LOADERS[name]
    undisturbed = feed_of(make(**WORKERS[workers]))
    starts, expected = [], []
    while undisturbed.position[0] < 2:
        starts.append(undisturbed.position)
        expected += serve(undisturbed, 1)
    assert any(not torch.equal(expected[0], other) for other in expected[1:])
    feed = feed_of(make(**WORKERS[workers]))
    positions = range(len(starts)) if workers == "in process" else [len(starts) - 2, 1, 3]
    for start in positions:
        disturb()
        feed.seek(*starts[start])
        count = min(3, len(expected) - start)
        assert_same(serve(feed, count), expected[start : start + count])


def test_a_batch_sampler_may_use_its_list_again(feed_of):
    reusing = serve(feed_of(DataLoader(Squares(), batch_sampler=Reusing())), 8)
    assert_same(reusing, serve(feed_of(DataLoader(Squares(), batch_sampler=Buckets())), 8))


def test_augmentation_does_not_depend_on_the_number_of_workers(feed_of):
    make = RANDOM_LOADERS["augmented"]
    assert_same(serve(feed_of(make(num_workers=2)), 7), serve(feed_of(make()), 7))


def test_epochs_and_batches_are_augmented_differently(feed_of):
    feed = feed_of(DataLoader(Noisy(2), batch_size=1))
    noise = [batch[0, 1:] for batch in serve(feed, 6)]
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(noise, 2))


def test_a_second_feed_on_the_same_loader_serves_the_same(feed_of):
    loader = RANDOM_LOADERS["generator"]()
    assert_same(serve(feed_of(loader), 8), serve(feed_of(loader), 8))


def test_skipped_batches_are_not_loaded(feed_of):
    data = Squares(1000)
    feed = feed_of(DataLoader(data, batch_size=2, shuffle=True))
    feed.seek(3, 400)
    feed.take(2)
    assert len(data.loaded) == 4


def test_a_step_that_is_run_again_reads_nothing(feed_of):
    data = Squares()
    feed = feed_of(DataLoader(data, batch_size=2))
    serve(feed, 2)
    first = feed.take(2)
    for _ in range(2):
        feed.seek(*feed.position)
        assert all(one is other for one, other in zip(feed.take(2), first, strict=True))
    assert len(data.loaded) == 8
    feed.commit()
    assert feed.position == (0, 4)


def test_lifted_by_a_step_goes_on_without_reading_again(feed_of):
    data = Squares()
    feed = feed_of(DataLoader(data, batch_size=2))
    feed.take(2)
    feed.seek(0, 2)
    assert feed.position == (0, 2)
    assert feed.take()[0][:, 0].tolist() == [4, 5]
    assert data.loaded == [0, 1, 2, 3, 4, 5]


def test_lifted_into_the_middle_keeps_the_rest(feed_of):
    data = Squares()
    feed = feed_of(DataLoader(data, batch_size=2))
    feed.take(3)
    feed.seek(0, 1)
    assert [batch[0, 0].item() for batch in feed.take(3)] == [2, 4, 6]
    assert len(data.loaded) == 8


def test_taking_goes_over_the_end_of_an_epoch(feed_of):
    feed = feed_of(DataLoader(Squares(3), batch_size=1))
    first = [batch[0, 0].item() for batch in feed.take(8)]
    assert first == [0, 1, 2, 0, 1, 2, 0, 1]
    feed.commit()
    assert feed.position == (2, 2)
    feed.seek(0, 3)
    assert feed.take()[0][0, 0].item() == 0
    feed.commit()
    assert feed.position == (1, 1)


def test_take_may_change_its_mind_about_the_number(feed_of):
    feed = feed_of(DataLoader(Squares(), batch_size=1))
    feed.take(3)
    feed.take(1)
    feed.commit()
    assert feed.position == (0, 1)
    assert [batch[0, 0].item() for batch in feed.take(3)] == [1, 2, 3]


# --- changed batches -------------------------------------------------------------------------------------------------


class Bag:
    def __init__(self, tensor):
        self.tensor = tensor


def in_bag(samples):
    return Bag(torch.stack(samples))


def in_dict(samples):
    return {
        "x": torch.stack(samples),
        "nested": [torch.stack(samples), {"y": torch.stack(samples)}],
        "names": ["a", "b"],
    }


def as_array(samples):
    return torch.stack(samples).numpy()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tensor_changed_in_place_is_loaded_again(workers, feed_of):
    feed = feed_of(DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers, collate_fn=in_dict))
    for _ in range(2):
        feed.take()
        feed.commit()
    (batch,) = feed.take()
    original = batch["nested"][1]["y"].clone()
    batch["nested"][1]["y"].mul_(2)
    feed.seek(*feed.position)
    (again,) = feed.take()
    assert again is not batch
    assert torch.equal(again["nested"][1]["y"], original)


def test_a_changed_container_is_put_back_without_loading(feed_of):
    data = Squares()
    feed = feed_of(DataLoader(data, batch_size=2, collate_fn=in_dict))
    (batch,) = feed.take()
    x = batch.pop("x")
    batch["nested"][1]["y"] = None
    batch["nested"].clear()
    batch["extra"] = 1
    feed.seek(0, 0)
    (again,) = feed.take()
    assert sorted(again) == ["names", "nested", "x"] and again["x"] is x
    assert torch.equal(again["nested"][1]["y"], x)
    assert len(data.loaded) == 2


def test_objects_are_looked_into(feed_of):
    data = Squares()
    feed = feed_of(DataLoader(data, batch_size=2, collate_fn=in_bag))
    (bag,) = feed.take()
    tensor, bag.tensor = bag.tensor, None
    feed.seek(0, 0)
    assert feed.take()[0].tensor is tensor and len(data.loaded) == 2
    tensor.zero_()
    feed.seek(0, 0)
    assert feed.take()[0].tensor.tolist() == [[0, 0], [1, 1]]


def test_gradients_of_a_batch_do_not_add_up(feed_of):
    feed = feed_of(DataLoader(Noisy(), batch_size=2))
    (batch,) = feed.take()
    batch.requires_grad_(True).sum().backward()
    feed.seek(0, 0)
    assert feed.take()[0].grad is None


def test_what_nobody_counts_writes_to_is_loaded_again(feed_of):
    feed = feed_of(DataLoader(Squares(), batch_size=2, collate_fn=as_array))
    (batch,) = feed.take()
    batch[:] = -1
    feed.seek(0, 0)
    assert feed.take()[0].tolist() == [[0, 0], [1, 1]]


# --- interrupts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupter():
    """The real one: an interrupt can get lost in a destructor, so it is repeated until it is acknowledged."""
    interrupter = Interrupter()
    interrupter.install()
    yield interrupter
    interrupter.acknowledge()
    interrupter.uninstall()


def interrupt_after(seconds: float, interrupter: Interrupter, code) -> None:
    """Call `code` again and again until it is interrupted."""
    timer = threading.Timer(seconds, interrupter.request)
    timer.start()
    with pytest.raises(Interrupted):
        interrupter.arm()
        while True:
            code()
    timer.join()
    interrupter.acknowledge()


class Slow(Noisy):
    seconds = 0.1

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Stuck(Slow):
    seconds = 900


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_inside_the_loader_loses_and_repeats_nothing(workers, feed_of, interrupter):
    expected = serve(feed_of(DataLoader(Slow(6), batch_size=2, shuffle=True, num_workers=workers)), 4)
    feed = feed_of(DataLoader(Slow(6), batch_size=2, shuffle=True, num_workers=workers))
    served = serve(feed, 1)

    def code():
        feed.take(2)
        feed.seek(0, 0)

    interrupt_after(0.05, interrupter, code)
    feed.seek(0, 1)
    disturb()
    assert_same(served + serve(feed, 3), expected)


def test_leaving_a_busy_loader_does_not_wait_for_its_workers(feed_of, interrupter):
    others = psutil.Process().children()
    feed = feed_of(DataLoader(Stuck(40), batch_size=10, num_workers=1))
    interrupt_after(0.3, interrupter, feed.take)
    feed.seek(0, 0)
    feed.close()
    assert psutil.Process().children() == others


def test_interrupts_at_any_moment(feed_of, interrupter):
    make = RANDOM_LOADERS["augmented"]
    expected = serve(feed_of(make()), 12)
    feed = feed_of(make(num_workers=1))
    noted = (0, (0, 0))  # batches consumed, and the position; one object, so that an interrupt can't part them

    def step():
        nonlocal noted
        completed, position = noted
        feed.seek(*position)
        assert torch.equal(feed.take()[0], expected[completed])
        feed.commit()
        # An interrupt before this line leaves the rank a step behind its feed.
        noted = (completed + 1, feed.position) if completed < 11 else (0, (0, 0))

    for number in range(40):
        interrupt_after(number * 0.003, interrupter, step)
        completed, position = noted
        feed.seek(*position)
        if number % 3 == 0:
            assert torch.equal(feed.take()[0], expected[completed])


def test_an_error_in_the_dataset_can_be_tried_again(feed_of):
    class Flaky(Squares):
        fails = True

        def __getitem__(self, index):
            if index == 5 and self.fails:
                self.fails = False
                raise OSError("the file system is away")
            return super().__getitem__(index)

    feed = feed_of(DataLoader(Flaky(), batch_size=2))
    serve(feed, 2)
    with pytest.raises(OSError):
        feed.take()
    assert feed.take()[0][:, 0].tolist() == [4, 5]


def test_seeking_ends_the_workers_it_leaves(feed_of):
    others = {child.pid for child in psutil.Process().children()}
    feed = feed_of(DataLoader(Squares(), batch_size=2, num_workers=2, persistent_workers=True))
    feed.take()
    before = {child.pid for child in psutil.Process().children()} - others
    assert before
    feed.seek(1, 2)
    feed.take()
    deadline = time.monotonic() + 10
    while before & {child.pid for child in psutil.Process().children()}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_persistent_workers_stay_over_epochs(feed_of):
    feed = feed_of(DataLoader(Squares(4), batch_size=2, num_workers=1, persistent_workers=True))
    feed.take()
    before = {child.pid for child in psutil.Process().children()}
    serve(feed, 5)
    assert {child.pid for child in psutil.Process().children()} == before


# --- other loaders ---------------------------------------------------------------------------------------------------


def test_a_list_of_batches(feed_of):
    batches = [torch.tensor([i]) for i in range(3)]
    feed = feed_of(batches)
    assert [batch.item() for batch in serve(feed, 7)] == [0, 1, 2, 0, 1, 2, 0]
    feed.seek(5, 2)
    assert [batch.item() for batch in serve(feed, 2)] == [2, 0]


def test_an_object_that_draws_while_it_is_read(feed_of):
    class Source:
        def __iter__(self):
            for _ in range(4):
                yield torch.rand(2) + random.random()

    expected = serve(feed_of(Source()), 10)
    feed = feed_of(Source())
    feed.seek(1, 2)
    assert_same(serve(feed, 4), expected[6:])


def test_a_loader_class_with_its_own_iteration_keeps_it(feed_of):
    class Doubling(DataLoader):
        def __iter__(self):
            return (batch * 2 for batch in super().__iter__())

    feed = feed_of(Doubling(Squares(), batch_size=2))
    feed.seek(0, 2)
    assert feed.take()[0][:, 0].tolist() == [8, 10]


def test_settings_of_the_loader_are_kept(feed_of):
    def init(worker_id):
        get_worker_info().dataset.size = -worker_id

    class Telling(Squares):
        def __getitem__(self, index):
            return torch.tensor([index, self.size, get_worker_info().num_workers])

    feed = feed_of(DataLoader(Telling(), batch_size=1, num_workers=2, worker_init_fn=init, prefetch_factor=1))
    assert [batch[0].tolist() for batch in serve(feed, 4)] == [[0, 0, 2], [1, -1, 2], [2, 0, 2], [3, -1, 2]]


def test_set_epoch_reaches_the_dataset(feed_of):
    class Numbered(Squares):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, index):
            return torch.tensor([self.epoch])

    feed = feed_of(DataLoader(Numbered(2), batch_size=2, num_workers=1, persistent_workers=True))
    assert [batch[0].item() for batch in serve(feed, 3)] == [0, 1, 2]


@pytest.mark.parametrize("loader", [iter([1]), (i for i in range(3)), map(str, []), enumerate([])])
def test_what_can_be_read_only_once_is_refused(loader):
    with pytest.raises(TypeError, match="can be read only once.*Pass the object it was made from"):
        Feed(loader, reseed_epoch=reseed_epoch)


def test_what_can_not_be_iterated_is_refused():
    with pytest.raises(TypeError, match="int, which can't be iterated"):
        Feed(3, reseed_epoch=reseed_epoch)


@pytest.mark.parametrize("loader", [[], DataLoader(Squares(2), batch_size=3, drop_last=True), DataLoader(Squares(0))])
def test_an_empty_loader_is_refused(loader, feed_of):
    with pytest.raises(ValueError, match="no batch in epoch 0"):
        feed_of(loader).take()


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(Squares(2))])
def test_a_position_behind_the_end_is_refused(loader, feed_of):
    feed = feed_of(loader)
    feed.seek(0, 3)
    with pytest.raises(ValueError, match="epoch 0 has no 3 batches"):
        feed.take()


def test_ranks_that_would_read_the_same_are_refused():
    def check(loader, sampler=None):
        Feed(loader, sampler, world_size=2, reseed_epoch=reseed_epoch)

    for loader in (DataLoader(Squares(), shuffle=True), DataLoader(Squares(), batch_size=None)):
        with pytest.raises(ValueError, match="2 ranks would read the same samples.*DistributedSampler.*sampler="):
            check(loader)
        check(loader, loader.sampler)
    own_batches = DataLoader(Squares(), batch_sampler=Alternating())
    with pytest.raises(ValueError, match="Alternating doesn't share them out"):
        check(own_batches)
    check(own_batches, own_batches.batch_sampler)
    shared = DistributedSampler(range(SIZE), 2, 0)
    check(DataLoader(Squares(), sampler=shared))
    check(DataLoader(Squares(), batch_sampler=BatchSampler(shared, 2, False)))
    check(DataLoader(Stream()))
    check([1, 2])


def test_a_sampler_that_is_not_the_loaders_is_refused():
    stranger = DistributedSampler(range(SIZE), 2, 0)
    with pytest.raises(ValueError, match="DistributedSampler.*is not the loader's.*RandomSampler"):
        Feed(DataLoader(Squares(), shuffle=True), stranger, world_size=2, reseed_epoch=reseed_epoch)


def test_overhead_of_a_step():
    batches = [[torch.zeros(4), torch.zeros(4)] for _ in range(3000)]
    feed = Feed(batches, reseed_epoch=reseed_epoch)
    feed.take()
    costs = []
    for _ in range(2500):
        start = time.perf_counter()
        feed.take()
        feed.commit()
        costs.append(time.perf_counter() - start)

    def seeding():
        start = time.perf_counter()
        rng.reseed_host(1, rng.BATCH, 3)
        return time.perf_counter() - start

    assert min(costs) - min(seeding() for _ in range(2500)) < 20e-6
