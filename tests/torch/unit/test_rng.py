"""Seeds are a function of their words: in every process, for every generator, with streams that don't meet."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import numpy
import pytest
import torch

from evertrain.torch import rng


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def test_same_words_give_the_same_draws_whatever_was_drawn_before():
    rng.reseed(7, rng.STEP, 2, 100)
    first = draws()
    draws()
    rng.reseed(7, rng.STEP, 2, 100)
    assert draws() == first


@pytest.mark.parametrize(
    "other", [(8, 1, 2, 100), (7, 2, 2, 100), (7, 1, 3, 100), (7, 1, 2, 101), (7, 1, 2), (7, 12, 100)]
)
def test_any_other_word_gives_other_draws(other):
    rng.reseed(7, 1, 2, 100)
    first = draws()
    rng.reseed(*other)
    assert all(mine != theirs for mine, theirs in zip(draws(), first, strict=True))


def test_other_processes_get_the_same_value():
    code = "from evertrain.torch import rng; print(rng.mix(7, rng.EPOCH, -1, 2**70))"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(result.stdout) == rng.mix(7, rng.EPOCH, -1, 2**70)


def test_the_generators_of_torch_and_numpy_do_not_run_the_same_stream():
    rng.reseed(3, rng.STEP, 0, 0)
    ours = torch.randint(0, 2**31, (8,)).tolist()
    assert not set(ours) & set(numpy.random.randint(0, 2**31, 64).tolist())


def test_generators_of_an_accelerator_in_use_are_seeded(monkeypatch):
    device = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (device,))
    rng.reseed(1, rng.STEP, 0, 5)
    assert device.initial_seed() == rng.mix(1, rng.STEP, 0, 5)
    rng.reseed_host(1, rng.STEP, 0, 6)
    assert device.initial_seed() == rng.mix(1, rng.STEP, 0, 5)


def test_it_costs_little_more_than_the_seeding_itself():
    def best(action):
        times = []
        for _ in range(2000):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return min(times)

    def bare():
        torch.default_generator.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)

    assert best(lambda: rng.reseed(1, rng.STEP, 3, 1000)) < best(bare) + 15e-6
