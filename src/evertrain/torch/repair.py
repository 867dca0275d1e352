"""A state from the rank that holds it to the ranks that lost it, as fast as the wire allows.

Flattening the state into one buffer costs half of the bandwidth and more (fresh pages and two copies), so a big tensor
is sent from where it lies and received where it belongs, all of them under way at once. It goes in pieces: while one is
copied out of the socket the next is copied in, which is a third faster than one message for all. For a small tensor
the fixed price of a message outweighs a copy, so small ones travel together in batches.

The order of messages, the same on both sides: 16 bytes of sizes, the skeleton, the pieces of big tensors, the batches
of small ones. Each has a tag of its own, so that none waits for another. `group` is anything with the `send` and `recv`
of a torch ProcessGroup; with one whose `wait` can be interrupted, an exception leaves these functions at once.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from evertrain.torch.codec import Packed, TensorSpec, allocate, flat_bytes, host, nbytes, places, specs, view_bytes

MIB = 1 << 20
BIG = MIB // 4
BATCH = 4 * MIB
BATCHES_UNDER_WAY = 4
ALIGNMENT = 16
SIZES = struct.Struct("<QQ")
SKELETON_LIMIT = 1 << 31
FIRST_TAG = 0x5E0000  # far from the small numbers that users' own sends have


class Work(Protocol):
    def wait(self) -> Any: ...


class Group(Protocol):
    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Work: ...


def send_state(group: Group, packed: Packed, targets: list[int]) -> None:
    """Send the state to all targets at once; returns when the group has taken all of it."""
    tags = iter(range(FIRST_TAG, 1 << 31))

    def post(tensor: Tensor) -> list[Work]:
        tag = next(tags)
        return [group.send([tensor], target, tag) for target in targets]

    total = packed.nbytes
    works = post(_bytes_tensor(SIZES.pack(len(packed.skeleton), total)))
    works += post(_bytes_tensor(packed.skeleton))
    table = [TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in packed.tensors]
    big, batches = _plan(table)
    for index in big:
        for piece in _pieces(host(packed.tensors[index]), total):
            works += post(piece)
    under_way: deque[list[Work]] = deque()
    for batch, size in batches:
        if len(under_way) == BATCHES_UNDER_WAY:
            _wait(under_way.popleft())
        buffer = torch.empty(size, dtype=torch.uint8)
        for index, part in _parts(batch, table, buffer):
            part.copy_(flat_bytes(host(packed.tensors[index])))
        under_way.append(post(buffer))
    _wait(works)
    for batch_works in under_way:
        _wait(batch_works)


def receive_state(group: Group, source: int, own: Packed | None = None) -> Packed:
    """Receive a state, into the tensors of `own` wherever they fit: same place in the tree, same shape and dtype.

    If it raises, those tensors may be half written. Whether the bits are right the caller checks with `codec.digest`.
    """
    tags = iter(range(FIRST_TAG, 1 << 31))

    def post(tensor: Tensor) -> Work:
        return group.recv([tensor], source, next(tags))

    sizes = torch.empty(SIZES.size, dtype=torch.uint8)
    announced = post(sizes)
    reusable = _reusable(own)
    announced.wait()
    skeleton_size, total = SIZES.unpack(view_bytes(sizes))
    if skeleton_size > SKELETON_LIMIT:
        raise ValueError(f"rank {source} announces a state description of {skeleton_size} bytes: that can't be one")
    description = torch.empty(skeleton_size, dtype=torch.uint8)
    post(description).wait()
    skeleton = bytes(view_bytes(description))
    table = specs(skeleton)
    if nbytes(table) != total:
        raise ValueError(f"rank {source} announces {total} bytes of state and describes {nbytes(table)}")
    tensors = [
        reusable[place, spec] if (place, spec) in reusable else allocate([spec])[0]
        for place, spec in zip(places(skeleton), table, strict=True)
    ]
    big, batches = _plan(table)
    works = [post(piece) for index in big for piece in _pieces(tensors[index], total)]
    under_way: deque[tuple[Work, list[int], Tensor]] = deque()

    def scatter(work: Work, batch: list[int], buffer: Tensor) -> None:
        work.wait()
        for index, part in _parts(batch, table, buffer):
            flat_bytes(tensors[index]).copy_(part)

    for batch, size in batches:
        if len(under_way) == BATCHES_UNDER_WAY:
            scatter(*under_way.popleft())
        buffer = torch.empty(size, dtype=torch.uint8)
        under_way.append((post(buffer), batch, buffer))
    _wait(works)
    for entry in under_way:
        scatter(*entry)
    return Packed(skeleton, tensors)


def _plan(table: list[TensorSpec]) -> tuple[list[int], list[tuple[list[int], int]]]:
    """Which tensors travel alone, and the batches of the others with their sizes: the same answer on both sides."""
    big: list[int] = []
    batches: list[tuple[list[int], int]] = []
    batch: list[int] = []
    size = 0
    for index, spec in enumerate(table):
        if spec.nbytes >= BIG:
            big.append(index)
        elif spec.nbytes:
            if size + spec.nbytes > BATCH:
                batches.append((batch, size))
                batch, size = [], 0
            batch.append(index)
            size += _aligned(spec.nbytes)
    if batch:
        batches.append((batch, size))
    return big, batches


def _pieces(tensor: Tensor, total: int) -> tuple[Tensor, ...]:
    """A big tensor cut up: small enough to overlap, large enough that the number of messages stays small."""
    return flat_bytes(tensor).split(max(1, min(16, total // (32 * MIB))) * MIB)


def _parts(batch: list[int], table: list[TensorSpec], buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Where in the batch's buffer each of its tensors lies."""
    start = 0
    for index in batch:
        size = table[index].nbytes
        yield index, buffer[start : start + size]
        start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


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
    for work in works:
        work.wait()
