"""A state goes from rank to rank over real gloo groups in real processes."""

from __future__ import annotations

import datetime
import json
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from evertrain.torch import codec, repair

BIG = 100_000  # elements: 400 kB, beyond what travels in a batch


def state(seed: int) -> dict[str, Any]:
    """Something of everything, equal for equal seeds: big, small, odd dtypes, views, empties, scalars, no tensors."""
    make = torch.Generator().manual_seed(seed)
    tree: dict[str, Any] = {
        "model": {f"layer{i}": torch.randn(BIG + i, generator=make) for i in range(3)},
        "huge": torch.randn(3_000_000, generator=make),
        "small": [torch.randn(1 + 31 * i, generator=make) for i in range(200)],
        "medium": [torch.randn(60_000, generator=make) for _ in range(40)],  # several batches
        "turned": torch.randn(700, 500, generator=make).t(),
        "turned small": torch.randn(7, 5, generator=make).t(),
        "half": torch.randn(BIG * 2, generator=make).bfloat16(),
        "flags": torch.rand(BIG * 4, generator=make) > 0.5,
        "bytes": torch.randint(0, 256, (33,), generator=make, dtype=torch.uint8),
        "complex": torch.randn(9, dtype=torch.complex64, generator=make),
        "eighth": torch.randn(5, generator=make).to(torch.float8_e4m3fn),
        "scalar": torch.randn((), generator=make),
        "empty": torch.ones(0, 4),
        "array": np.random.RandomState(seed).standard_normal((50, 1000)),
        "rng": random.Random(seed).getstate(),
        "lr": seed / 3,
        5: {"betas": (0.9, 0.999)},
    }
    return tree


def run(directory: Path, size: int, *scenarios: Callable[..., Any]) -> dict[str, list[Any]]:
    """What each rank answers in each scenario. All in the same processes, because they take seconds to import torch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    names = ",".join(scenario.__name__ for scenario in scenarios)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(size), str(directory), names],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    try:
        answers = [json.loads(process.communicate(timeout=90)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {scenario.__name__: [answer[scenario.__name__] for answer in answers] for scenario in scenarios}


def main(rank: int, size: int, directory: str, names: str) -> None:
    """One rank. A group for each scenario, so that one that fails doesn't spoil the next."""
    torch.set_num_threads(1)
    answers = {}
    for name in names.split(","):
        try:
            store = dist.FileStore(f"{directory}/{name}", size)
            group = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=20))
            answers[name] = globals()[name](group, rank)
            group.barrier().wait()  # nobody leaves while another still reads from it
        except BaseException:
            answers[name] = traceback.format_exc()
    print(json.dumps(answers))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, list[Any]]:
    return run(tmp_path_factory.mktemp("pair"), 2, fresh, in_place, other_shape, announce_nonsense)


def fresh(group, rank):
    if rank == 0:
        repair.send_state(group, codec.pack(state(1)), [1])
        return "sent"
    received = repair.receive_state(group, 0)
    tree, expected = codec.unpack(received.skeleton, received.tensors), state(1)
    assert codec.digest(received) == codec.digest(codec.pack(expected))
    for key in ("turned", "half", "flags", "complex", "eighth", "scalar", "empty", "bytes"):
        assert tree[key].dtype == expected[key].dtype and tree[key].shape == expected[key].shape, key
        assert bytes(codec.view_bytes(tree[key])) == bytes(codec.view_bytes(expected[key])), key
    assert (tree["array"] == expected["array"]).all() and tree["rng"] == expected["rng"] and tree[5] == expected[5]
    return "equal"


def test_a_newcomer_without_anything_receives_all_of_it(pair):
    assert pair["fresh"] == ["sent", "equal"]


def in_place(group, rank):
    if rank == 0:
        repair.send_state(group, codec.pack(state(1)), [1])
        return "sent"
    mine = state(2)
    own = codec.pack(mine)
    received = repair.receive_state(group, 0, own)
    assert codec.digest(received) == codec.digest(codec.pack(state(1)))
    for index, (tensor, before) in enumerate(zip(received.tensors, own.tensors, strict=True)):
        assert (tensor.data_ptr() == before.data_ptr()) is before.is_contiguous(), index
    assert torch.equal(mine["huge"], state(1)["huge"]), "the model's own memory holds the new weights"
    assert (mine["array"] == state(1)["array"]).all()
    assert not mine["turned"].is_contiguous() and torch.equal(mine["turned"], state(2)["turned"])
    return "equal"


def test_tensors_are_received_where_they_belong(pair):
    assert pair["in_place"] == ["sent", "equal"]


def other_shape(group, rank):
    """The receiver's optimizer has no moments, one weight has another shape, one is tied, one lies elsewhere."""
    full = {"m": {"a": torch.full((BIG,), 1.0), "b": torch.full((BIG,), 2.0), "c": torch.full((9,), 3.0)}}
    full |= {"tied": torch.full((BIG,), 4.0), "moments": [torch.full((BIG,), 5.0), torch.full((BIG,), 6.0)]}
    if rank == 0:
        repair.send_state(group, codec.pack(full), [1])
        return "sent"
    shared = torch.zeros(BIG)
    mine = {"moments": [], "tied": shared, "m": {"a": shared, "b": torch.zeros(BIG + 1), "c": torch.zeros(9)}}
    received = repair.receive_state(group, 0, codec.pack(mine))
    assert codec.digest(received) == codec.digest(codec.pack(full)), "tied memory isn't written twice"
    tree = codec.unpack(received.skeleton, received.tensors)
    assert tree["m"]["c"].data_ptr() == mine["m"]["c"].data_ptr()
    assert [tree["m"]["a"].data_ptr(), tree["tied"].data_ptr()].count(shared.data_ptr()) == 1
    assert not mine["m"]["b"].any(), "what doesn't fit isn't touched"
    return "equal"


def test_a_receiver_of_another_shape_gets_new_memory_where_needed(pair):
    assert pair["other_shape"] == ["sent", "equal"]


def two_pairs(group, rank):
    """0 sends to 1 and 3 at once while 2 sends to 4, in one group; then 4 passes it on, with the same tags."""
    if rank in (0, 2):
        repair.send_state(group, codec.pack(state(rank)), {0: [1, 3], 2: [4]}[rank])
        received = codec.pack(state(rank))
    else:
        received = repair.receive_state(group, 2 if rank == 4 else 0, codec.pack(state(9)) if rank == 3 else None)
    if rank == 4:
        repair.send_state(group, received, [0])
    if rank == 0:
        received = repair.receive_state(group, 4, received)
    return codec.digest(received)


@pytest.mark.matrix
def test_several_targets_and_several_sources(tmp_path):
    zero, two = codec.digest(codec.pack(state(0))), codec.digest(codec.pack(state(2)))
    assert run(tmp_path, 5, two_pairs)["two_pairs"] == [two, zero, two, zero, two]


def announce_nonsense(group, rank):
    for size, total, text in ((1 << 40, 0, "can't be one"), (None, 5, "announces 5 bytes")):
        skeleton = codec.pack([torch.ones(2)]).skeleton
        if rank == 0:
            sizes = repair.SIZES.pack(size or len(skeleton), total)
            group.send([repair._bytes_tensor(sizes)], 1, repair.SIZES_TAG).wait()
            if size is None:
                group.send([repair._bytes_tensor(skeleton)], 1, repair.SKELETON_TAG).wait()
        else:
            with pytest.raises(ValueError, match=text):
                repair.receive_state(group, 0)
    return "refused"


def test_nonsense_is_refused_before_room_is_made_for_it(pair):
    assert pair["announce_nonsense"] == ["refused", "refused"]


class Interrupted(Exception):
    pass


class Recorder:
    """A group in memory that fails where it is told to."""

    def __init__(self, fail_at: int) -> None:
        self.calls: list[tuple[int, int]] = []
        self.fail_at = fail_at

    def send(self, tensors, rank, tag):
        assert all(tensor.is_contiguous() for tensor in tensors)
        self.calls.append((rank, tag))
        return Outcome(len(self.calls) == self.fail_at)

    recv = send


class Outcome:
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def wait(self) -> None:
        if self.fails:
            raise Interrupted


@pytest.mark.parametrize("message", [1, 2, 3, 30, 45])
def test_an_interrupted_wait_gets_out(message):
    group = Recorder(message)
    with pytest.raises(Interrupted):
        repair.send_state(group, codec.pack(state(1)), [1, 2])
    assert len(set(group.calls)) == len(group.calls), "no tag is used twice between two ranks"


def test_messages_stay_few_and_tags_unique():
    group = Recorder(0)
    packed = codec.pack(state(1))
    repair.send_state(group, packed, [7])
    tags = [tag for _, tag in group.calls]
    assert len(packed.tensors) > 250 and len(tags) == len(set(tags)) < 40


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
