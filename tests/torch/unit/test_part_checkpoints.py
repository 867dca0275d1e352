"""Checkpoints in parts: there when all parts are, and only then."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from evertrain.torch import codec
from evertrain.torch.checkpoint import CheckpointError
from evertrain.torch.part_checkpoints import PartCheckpoints

EVERY = ("state", "shard:0", "shard:1")


def part(name: str, step: int) -> codec.Packed:
    return codec.pack({"name": name, "w": torch.full((100,), float(step))})


def write(store: PartCheckpoints, step: int, *names: str, mark: str = "m") -> Path | None:
    return store.save_parts(step, {name: part(name, step) for name in names}, EVERY, "2x1", mark, "periodic")


def own(available: Any, cut: str) -> list[str]:
    assert sorted(available) == sorted(EVERY) and cut == "2x1"
    return ["state", "shard:1"]


def parts_of(folder: Path, step: int) -> list[Path]:
    return sorted((folder / f"step-{step:012d}.parts").iterdir())


@pytest.mark.parametrize("order", list(itertools.permutations(EVERY)))
def test_the_last_part_makes_it_a_checkpoint(tmp_path: Path, order: tuple[str, ...]) -> None:
    stores = {name: PartCheckpoints(tmp_path) for name in EVERY}
    for name in order[:-1]:
        assert write(stores[name], 5, name) is None
        assert stores[name].newest_step() is None and stores[name].load_newest_parts(own) is None
    assert write(stores[order[-1]], 5, order[-1]) == tmp_path / "step-000000000005.ckpt"
    found = stores["state"].load_newest_parts(own)
    assert found is not None
    step, trees = found
    assert step == 5 and list(trees) == ["state", "shard:1"]
    assert all(tree["name"] == name and (tree["w"] == 5).all() for name, tree in trees.items())


def test_in_the_background(tmp_path: Path) -> None:
    results: list[Any] = []
    store = PartCheckpoints(tmp_path, on_result=lambda *result: results.append(result))
    tensor = torch.ones(50)
    parts = {name: codec.pack({"w": tensor, "x": torch.zeros(3)}) for name in EVERY}
    store.save_parts_async(1, parts, EVERY, "2x1", "m")
    tensor.zero_()
    store.wait()
    assert results == [(1, tmp_path / "step-000000000001.ckpt", None)]
    trees = store.load_parts(1, own)
    assert (trees["shard:1"]["w"] == 1).all(), "what was written is the state at the time of the call"


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "other", "exchanged"])
def test_a_bad_part_makes_it_unusable_and_the_next_older_is_taken(tmp_path: Path, damage: str) -> None:
    store = PartCheckpoints(tmp_path)
    write(store, 5, *EVERY)
    write(store, 10, *EVERY)
    (victim,) = (path for path in parts_of(tmp_path, 10) if path.name.startswith("shard-1"))
    raw = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(raw[:-40])
    elif damage == "changed":
        victim.write_bytes(raw[:200] + bytes([raw[200] ^ 1]) + raw[201:])
    elif damage == "exchanged":  # whole, of this step, and yet another file than was written with the rest
        PartCheckpoints(tmp_path).save_parts(10, {"shard:1": part("another", 9)}, EVERY, "2x1", "x", "periodic")
        (another,) = (path for path in parts_of(tmp_path, 10) if path.name.endswith(".x.part"))
        another.replace(victim)
    else:  # of another step
        victim.write_bytes((parts_of(tmp_path, 5)[1]).read_bytes())
    if damage in ("missing", "cut", "other"):
        assert store.newest_step() == 5
    with pytest.raises(CheckpointError):
        store.load_parts(10, own)
    assert store.newest_step() == 5, "what turned out to be damaged is not offered again"
    found = PartCheckpoints(tmp_path).load_newest_parts(own)
    assert found is not None and found[0] == 5
    assert PartCheckpoints(tmp_path).load_newest_parts(lambda names, cut: ["shard:0"]) is not None


def test_what_another_run_left_is_not_taken_for_a_part(tmp_path: Path) -> None:
    store = PartCheckpoints(tmp_path)
    write(store, 5, "state", "shard:1", mark="old")
    assert write(store, 5, "state", "shard:0", mark="new") is None
    assert store.newest_step() is None
    assert write(store, 5, "shard:1", mark="new") is not None
    assert store.load_parts(5, own)["shard:1"]["name"] == "shard:1"


def test_old_ones_go_with_all_their_parts(tmp_path: Path) -> None:
    store = PartCheckpoints(tmp_path, keep=2)
    write(store, 1, "state")  # never completed
    for step in (2, 3, 4):
        write(store, step, *EVERY)
    write(store, 5, "state")  # under way
    assert store.steps() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        f"step-{step:012d}.parts" for step in (3, 4, 5)
    ]


def test_a_checkpoint_in_one_piece_has_one_part(tmp_path: Path) -> None:
    store = PartCheckpoints(tmp_path)
    path = store.save_parts(3, {"state": part("state", 3)}, ("state",), "", "", "periodic")
    assert path == tmp_path / "step-000000000003.ckpt" and not list(tmp_path.glob("*.parts"))
    found = store.load_newest_parts(lambda names, cut: pytest.fail("there is nothing to choose from"))
    assert found is not None and list(found[1]) == ["state"]


def test_a_damaged_part_is_written_again(tmp_path: Path) -> None:
    store = PartCheckpoints(tmp_path)
    write(store, 5, *EVERY)
    victim = next(path for path in parts_of(tmp_path, 5) if path.name.startswith("shard-1"))
    raw = victim.read_bytes()
    victim.write_bytes(raw[:200] + bytes([raw[200] ^ 1]) + raw[201:])
    assert store.load_newest_parts(own) is None and store.steps() == []
    write(store, 5, "shard:1")
    assert store.load_parts(5, own)["shard:1"]["name"] == "shard:1" and store.newest_step() == 5
