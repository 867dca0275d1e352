"""A state from the rank that holds it to the ranks that lost it, as fast as the wire allows.

Flattening the state into one buffer costs half of the bandwidth and more (fresh pages and two copies), so a big tensor
is sent from where it lies and received where it belongs, all of them under way at once. It goes in pieces: while one is
copied out of the socket the next is copied in, which is a third faster than one message for all. For a small tensor
the fixed price of a message outweighs a copy, so small ones travel together in batches.

Both sides derive the messages from the skeleton: 16 bytes of sizes, the skeleton, then batches and pieces, each with a
tag of its own, so that none waits for another. The first batches are posted before the pieces: they are put together
while the receiver still reads the skeleton and taken apart while the pieces arrive. `group` is anything with the
`send` and `recv` of a torch ProcessGroup; with one whose `wait` can be interrupted, an exception leaves at once.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from evertrain.torch.codec import Packed, TensorSpec, allocate, flat_bytes, host, nbytes, places, specs, view_bytes

MIB = 1 << 20
BIG = MIB // 4
BATCH = 4 * MIB
BATCHES_UNDER_WAY = 4
SIZES = struct.Struct("<QQ")
SKELETON_LIMIT = 1 << 31
SIZES_TAG = 0x5E0000  # far from the small numbers that users' own sends have
SKELETON_TAG = SIZES_TAG + 1
FIRST_TAG = SIZES_TAG + 2


class Work(Protocol):
    def wait(self) -> Any: ...


class Group(Protocol):
    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Work: ...


def send_state(group: Group, packed: Packed, targets: list[int]) -> None:
    """Send the state to all targets at once; returns when the group has taken all of it."""

    def post(tensor: Tensor, tag: int) -> list[Work]:
        return [group.send([tensor], target, tag) for target in targets]

    total = packed.nbytes
    works = post(_bytes_tensor(SIZES.pack(len(packed.skeleton), total)), SIZES_TAG)
    works += post(_bytes_tensor(packed.skeleton), SKELETON_TAG)
    big, batches = _plan(packed.tensors)
    under_way: deque[list[Work]] = deque()

    def post_batch(number: int) -> None:
        if len(under_way) == BATCHES_UNDER_WAY:
            _wait(under_way.popleft())
        small = [flat_bytes(host(packed.tensors[index])) for index in batches[number]]
        under_way.append(post(torch.cat(small), FIRST_TAG + number))

    for number in range(len(batches))[:BATCHES_UNDER_WAY]:
        post_batch(number)
    tags = itertools.count(FIRST_TAG + len(batches))
    for index in big:
        for piece in _pieces(host(packed.tensors[index]), total):
            works += post(piece, next(tags))
    for number in range(len(batches))[BATCHES_UNDER_WAY:]:
        post_batch(number)
    while under_way:
        _wait(under_way.popleft())
    _wait(works)


def receive_state(group: Group, source: int, own: Packed | None = None) -> Packed:
    """Receive a state, into the tensors of `own` wherever they fit: same place in the tree, same shape and dtype.

    If it raises, those tensors may be half written. Whether the bits are right the caller checks with `codec.digest`.
    """

    def post(tensor: Tensor, tag: int) -> Work:
        return group.recv([tensor], source, tag)

    sizes = torch.empty(SIZES.size, dtype=torch.uint8)
    announced = post(sizes, SIZES_TAG)
    reusable = _reusable(own)
    announced.wait()
    skeleton_size, total = SIZES.unpack(view_bytes(sizes))
    if skeleton_size > SKELETON_LIMIT:
        raise ValueError(f"rank {source} announces a state description of {skeleton_size} bytes: that can't be one")
    description = torch.empty(skeleton_size, dtype=torch.uint8)
    post(description, SKELETON_TAG).wait()
    skeleton = bytes(view_bytes(description))
    table = specs(skeleton)
    if nbytes(table) != total:
        raise ValueError(f"rank {source} announces {total} bytes of state and describes {nbytes(table)}")
    tensors = [
        reusable[place, spec] if (place, spec) in reusable else allocate([spec])[0]
        for place, spec in zip(places(skeleton), table, strict=True)
    ]
    big, batches = _plan(table)
    under_way: deque[tuple[Work, Tensor, list[int]]] = deque()

    def post_batch(number: int) -> None:
        if len(under_way) == BATCHES_UNDER_WAY:
            take_apart()
        buffer = torch.empty(nbytes(table[index] for index in batches[number]), dtype=torch.uint8)
        under_way.append((post(buffer, FIRST_TAG + number), buffer, batches[number]))

    def take_apart() -> None:
        work, buffer, batch = under_way.popleft()
        work.wait()
        for index, part in zip(batch, buffer.split([table[index].nbytes for index in batch]), strict=True):
            flat_bytes(tensors[index]).copy_(part)

    for number in range(len(batches))[:BATCHES_UNDER_WAY]:
        post_batch(number)
    tags = itertools.count(FIRST_TAG + len(batches))
    works = [post(piece, next(tags)) for index in big for piece in _pieces(tensors[index], total)]
    for number in range(len(batches))[BATCHES_UNDER_WAY:]:
        post_batch(number)
    while under_way:
        take_apart()
    _wait(works)
    return Packed(skeleton, tensors)


def _plan(tensors: Sequence[Tensor | TensorSpec]) -> tuple[list[int], list[list[int]]]:
    """Which tensors travel alone and which in what batch: the same answer on both sides."""
    big: list[int] = []
    batches: list[list[int]] = []
    room = 0
    for index, tensor in enumerate(tensors):
        size = tensor.nbytes
        if size >= BIG:
            big.append(index)
        elif size:
            if size > room:
                batches.append([])
                room = BATCH
            batches[-1].append(index)
            room -= size
    return big, batches


def _pieces(tensor: Tensor, total: int) -> tuple[Tensor, ...]:
    """A big tensor cut up: small enough to overlap, large enough that the number of messages stays small."""
    return flat_bytes(tensor).split(max(1, min(16, total // (32 * MIB))) * MIB)


def _reusable(own: Packed | None) -> dict[tuple[str, TensorSpec], Tensor]:
    """The own tensors that can be received into, by place and kind.

    By place and not by number: a newcomer's optimizer has no moments yet, so the numbers differ, and a weight that
    lands in the memory of another would be overwritten when that other one is loaded. For the same reason
    tensors that overlap (tied weights, an average that still is the model itself) are used once only.
    """
    if own is None:
        return {}
    candidates = [
        (tensor.data_ptr(), place, tensor)
        for place, tensor in zip(places(own.skeleton), own.tensors, strict=True)
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel()
    ]
    found: dict[tuple[str, TensorSpec], Tensor] = {}
    end = 0
    for start, place, tensor in sorted(candidates, key=lambda candidate: candidate[:2]):
        if start >= end:
            found[place, TensorSpec(tuple(tensor.shape), tensor.dtype)] = tensor
            end = start + tensor.nbytes
    return found


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _wait(works: list[Work]) -> None:
    """Wait for the last one first: when it is done the others are too, and each of them wakes nobody any more."""
    for work in reversed(works):
        work.wait()
