"""Random numbers as a function of where training is, not of how it got there.

The generators of a process that died are in no other process, survivors of a fault may be a step apart, and a step that
is run again must draw what it drew the first time. Saving and sending generator states would solve each of these
separately; seeding the generators anew at each step from (seed, rank, step) makes all three disappear, because there is
no state left to save. It costs a few microseconds. The price: a run draws other numbers than the same script without
this library.

The words of a seed are hashed, so that neighbouring steps and ranks get unrelated streams, and with blake2b rather than
`hash()`, so that every process, on every machine, gets the same ones.
"""

from __future__ import annotations

import random
import sys
from hashlib import blake2b

import torch

# What a stream is for: the first word after the seed, so that streams for different purposes never coincide.
STEP, EPOCH, BATCH, DRAW, GENERATOR = range(1, 6)
"""STEP: one training step; EPOCH: drawing an epoch's order; BATCH: loading one batch; DRAW: the later draws of a
sampler that draws as it goes; GENERATOR: a generator object that the user gave to a sampler."""


def mix(seed: int, *words: int) -> int:
    """A 64-bit value that depends on all the words, the same in every process."""
    text = ",".join(map(str, (seed, *words)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def reseed(seed: int, *words: int) -> None:
    """Seed every generator that training code draws from by default: torch's on the host and on the accelerators that
    are in use, Python's and NumPy's."""
    value = mix(seed, *words)
    _seed_host(value)
    # Not torch.manual_seed: it visits every kind of device there could be, which takes a hundred times as long.
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(value)
    if "torch_npu" in sys.modules and torch.npu.is_initialized():
        for generator in torch.npu.default_generators:
            generator.manual_seed(value)


def reseed_host(seed: int, *words: int) -> None:
    """`reseed` without the accelerators: for code that runs on the host only, such as loading data."""
    _seed_host(mix(seed, *words))


def _seed_host(value: int) -> None:
    torch.default_generator.manual_seed(value)
    random.seed(value)
    # NumPy may be absent; but once it is loaded, its `random` must not wait for its first use to be loaded with a seed
    # from the operating system.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # Torch and NumPy run the same algorithm, and torch seeds it with the lower half: the same half here would give
        # both the same stream.
        numpy.random.seed(value >> 32)
