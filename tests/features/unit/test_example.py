"""The example's own proof is worth something only if it notices what it claims to."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "pytorch" / "train.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_train", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(*ranks: list[list[int]]) -> torch.Tensor:
    """One step: for each rank its micro-batches of sample ids."""
    return torch.tensor(ranks)


def test_text_is_the_same_for_the_same_seed_and_covers_every_sample(example) -> None:
    one, other, different = (example.Sentences(64, seed) for seed in (1, 1, 2))
    assert torch.equal(one.codes, other.codes) and not torch.equal(one.codes, different.codes)
    last = one[63]
    assert last["index"] == 63 and len(last["x"]) == len(last["y"]) == example.CONTEXT
    assert torch.equal(one[0]["x"][1:], one[0]["y"][:-1])


def test_the_log_depends_on_step_samples_and_rank_but_not_on_the_order_within_a_batch(example) -> None:
    def digest(number: int, ids: torch.Tensor) -> str:
        log = example.SampleLog(8, batches_per_epoch=2)
        log.append(number, ids)
        return log.digest

    base = digest(0, step([[0, 1]], [[2, 3]]))
    assert base == digest(0, step([[1, 0]], [[3, 2]]))
    another_step = digest(1, step([[0, 1]], [[2, 3]]))
    swapped_ranks = digest(0, step([[2, 3]], [[0, 1]]))
    another_sample = digest(0, step([[0, 1]], [[2, 4]]))
    assert len({base, another_step, swapped_ranks, another_sample}) == 4


def test_a_sample_consumed_twice_in_an_epoch_is_an_error(example) -> None:
    log = example.SampleLog(8, batches_per_epoch=2)
    log.append(0, step([[0, 1]], [[2, 3]]))
    with pytest.raises(RuntimeError, match="second time"):
        log.append(1, step([[4, 5]], [[6, 3]]))
    with pytest.raises(RuntimeError, match="second time"):
        example.SampleLog(8, 2).append(0, step([[0, 1]], [[1, 2]]))


def test_a_new_epoch_may_begin_in_the_middle_of_an_accumulated_step(example) -> None:
    log = example.SampleLog(6, batches_per_epoch=3)
    log.append(0, step([[0], [1]], [[2], [3]]))
    log.append(1, step([[4], [0]], [[5], [2]]))  # the third batch of the first epoch, the first one of the second
    with pytest.raises(RuntimeError, match="second time"):
        log.append(2, step([[0], [1]], [[3], [4]]))


def test_the_log_rolls_back(example) -> None:
    log, other = example.SampleLog(8, 2), example.SampleLog(8, 2)
    log.append(0, step([[0, 1]], [[2, 3]]))
    saved = copy.deepcopy(log.state_dict())
    log.append(1, step([[4, 5]], [[6, 7]]))
    after = log.digest
    for restored in (log, other):
        restored.load_state_dict(saved)
        restored.append(1, step([[4, 5]], [[6, 7]]))
        assert restored.digest == after


def test_one_bit_changes_the_fingerprint(example) -> None:
    model = example.Speller(64, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, example.CONTEXT, dtype=torch.long)).sum().backward()
    optimizer.step()
    base = example.fingerprint(model.state_dict(), optimizer.state_dict())
    assert base == example.fingerprint(model.state_dict(), optimizer.state_dict())
    moment = next(iter(optimizer.state.values()))["exp_avg"]
    moment.view(torch.int32).view(-1)[0] ^= 1
    assert base != example.fingerprint(model.state_dict(), optimizer.state_dict())
    moment.view(torch.int32).view(-1)[0] ^= 1
    next(model.parameters()).data.view(torch.int32).view(-1)[-1] ^= 1
    assert base != example.fingerprint(model.state_dict(), optimizer.state_dict())
