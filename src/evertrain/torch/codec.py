"""A training state as data: a small description in msgpack and a list of tensors.

A state tree (the nested dicts and lists that `state_dict()` gives) has a few kilobytes of structure and gigabytes of
numbers. `pack` parts the two: the *skeleton* says what the tree looks like, with a numbered slot for each tensor, and
the tensors are handed out by reference, so that a repair can send each one from where it lies and a checkpoint can
write it from there. `unpack` puts both together again with exact types.

Nothing is pickled, so that neither a peer nor a file can make this process run code; the price is that the tree may
hold data only. What it can't hold is refused by `pack` with the place in the tree, before a fault makes it matter.

In the skeleton a node is a plain value (None, bool, 64-bit int, float, str, bytes) or an array `[code, ...]`; `Code`
lists the codes.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import re
import struct
import types
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import torch
from torch import Tensor

try:
    import numpy
except ImportError:  # torch works without it, and so do we
    numpy = None  # type: ignore[assignment]

VERSION = 1
MAX_DEPTH = 100


class Code(IntEnum):
    """First element of an array node. The numbers are in checkpoint files: never reuse one."""

    TENSOR = 0
    LIST = 1
    TUPLE = 2
    DICT = 3
    ORDERED_DICT = 4
    SET = 5
    FROZENSET = 6
    DEFAULT_DICT = 7
    COUNTER = 8
    BIG_INT = 9
    SIZE = 10
    DTYPE = 11
    DEVICE = 12
    ARRAY = 13
    SCALAR = 14
    COMPLEX = 15
    BYTEARRAY = 16
    DEQUE = 17
    ODD_STR = 18


PLAIN = frozenset((type(None), bool, float, bytes))
SEQUENCES: dict[type, Code] = {list: Code.LIST, tuple: Code.TUPLE}
SETS: dict[type, Code] = {set: Code.SET, frozenset: Code.FROZENSET}
MAPPINGS: dict[type, Code] = {dict: Code.DICT, OrderedDict: Code.ORDERED_DICT, Counter: Code.COUNTER}
BUILDERS = {code: kind for kind, code in (SEQUENCES | SETS | MAPPINGS).items()}
FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, bytes, list, tuple, dict, set, frozenset)}
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
        *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    )
}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
# Without objects, fields and subarrays: only dtypes for which any bytes are valid data.
ARRAY_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9A-Za-zμ]{1,12}\])?")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a receiver must know to make room for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Packed:
    """A state tree in two parts. The tensors are the tree's own (detached), not copies."""

    skeleton: bytes
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        return nbytes(self.tensors)


def nbytes(items: Iterable[Tensor | TensorSpec]) -> int:
    """Bytes of all tensors (or of tensors with these specs) as they are sent or written: contiguous, without gaps."""
    return sum(item.nbytes for item in items)


def pack(tree: Any) -> Packed:
    """Part a state tree into skeleton and tensors. Raises TypeError, with the place, for what isn't data."""
    packer = _Packer()
    root = packer.node(tree, "", 0)
    return Packed(msgspec.msgpack.encode([VERSION, packer.specs, root]), packer.tensors)


class _Packer:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.specs: list[tuple[str, tuple[int, ...]]] = []

    def node(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**64 else [Code.BIG_INT, _int_bytes(value)]
        if kind is str:
            return _text(value)
        if depth >= MAX_DEPTH:
            raise TypeError(
                f"{_shorten(path)}: the training state is nested deeper than {MAX_DEPTH} levels, or contains itself"
            )
        if kind in MAPPINGS:
            return self.mapping([MAPPINGS[kind]], value, path, depth)
        if kind in SEQUENCES:
            return self.sequence([SEQUENCES[kind]], value, path, depth)
        if isinstance(value, Tensor):
            return self.tensor(value, path)
        return self.rare(value, kind, path, depth)

    def rare(self, value: Any, kind: type, path: str, depth: int) -> Any:
        if kind in SETS:
            # Their order depends on the process (hash seeds): without sorting, equal states would have unequal digests.
            items = [self.key(item, f"{path}{{{item!r}}}", depth) for item in value]
            return [SETS[kind], *sorted(items, key=msgspec.msgpack.encode)]
        if kind is defaultdict:
            factory = value.default_factory
            name = None if factory is None else getattr(factory, "__name__", "")
            if name is not None and FACTORIES.get(name) is not factory:
                raise _unsupported(factory, f"{path}.default_factory" if path else "default_factory")
            return self.mapping([Code.DEFAULT_DICT, name], value, path, depth)
        if kind is deque:
            return self.sequence([Code.DEQUE, value.maxlen], value, path, depth)
        if kind is complex:
            return [Code.COMPLEX, value.real, value.imag]
        if kind is bytearray:
            return [Code.BYTEARRAY, bytes(value)]
        if kind is torch.Size:
            return [Code.SIZE, *value]
        if kind is torch.dtype and value in NAME_OF_DTYPE:
            return [Code.DTYPE, NAME_OF_DTYPE[value]]
        if kind is torch.device:
            return [Code.DEVICE, str(value)]
        if numpy is not None and kind is numpy.ndarray:
            return self.array(value, path)
        if numpy is not None and isinstance(value, numpy.generic) and ARRAY_DTYPE.fullmatch(value.dtype.str):
            return [Code.SCALAR, value.dtype.str, value.tobytes()]
        raise _unsupported(value, path)

    def mapping(self, head: list[Any], value: dict[Any, Any], path: str, depth: int) -> list[Any]:
        for key, item in value.items():
            below = f"{path}[{key!r}]" if type(key) is not str else f"{path}.{key}" if path else key
            head.append(self.key(key, below, depth))
            head.append(self.node(item, below, depth + 1))
        return head

    def sequence(self, head: list[Any], value: Iterable[Any], path: str, depth: int) -> list[Any]:
        for index, item in enumerate(value):
            # The state of Python's RNG is 625 ints: no path for them.
            head.append(item if type(item) in PLAIN else self.node(item, f"{path}[{index}]", depth + 1))
        return head

    def key(self, key: Any, path: str, depth: int) -> Any:
        before = len(self.tensors)
        node = self.node(key, path, depth + 1)
        if len(self.tensors) != before:
            raise TypeError(f"{path}: a tensor can't be a key or a member of a set in the training state")
        return node

    def tensor(self, value: Tensor, path: str) -> list[Any]:
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise _unsupported(value, path)
        if value.layout is not torch.strided or value.is_quantized or value.dtype not in NAME_OF_DTYPE or value.is_meta:
            what = "on the meta device" if value.is_meta else f"of layout {value.layout} and dtype {value.dtype}"
            raise TypeError(
                f"{path or 'the state'}: a tensor {what} can't be part of the training state; make it dense and real"
            )
        # A lazy conjugate or negation is a flag on the tensor object and not in its bytes.
        return [Code.TENSOR, self.slot(value.detach().resolve_conj().resolve_neg())]

    def array(self, value: Any, path: str) -> list[Any]:
        if not ARRAY_DTYPE.fullmatch(value.dtype.str) or value.dtype.itemsize == 0:
            raise TypeError(
                f"{path or 'the state'}: a numpy array of {value.dtype!r} can't be part of the training state; "
                "arrays of plain numbers, text and dates can"
            )
        flat = value.reshape(-1)  # a copy if it isn't contiguous
        if not (flat.flags.c_contiguous and flat.flags.writeable):
            flat = flat.copy()
        slot = self.slot(torch.from_numpy(flat.view(numpy.uint8)))
        return [Code.ARRAY, slot, value.dtype.str, list(value.shape)]

    def slot(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        self.specs.append((NAME_OF_DTYPE[tensor.dtype], tuple(tensor.shape)))
        return len(self.tensors) - 1


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _text(value: str) -> Any:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # file names can hold lone surrogates
        return [Code.ODD_STR, value.encode("utf-8", "surrogatepass")]
    return value


def _shorten(path: str) -> str:
    return path if len(path) <= 120 else f"{path[:80]}...{path[-20:]}"


def _unsupported(value: Any, path: str) -> TypeError:
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        what = "a function"
    elif isinstance(value, type):
        what = f"a class ({value.__qualname__})"
    else:
        what = f"an object of type {type(value).__module__}.{type(value).__qualname__}"
    return TypeError(
        f"{_shorten(path) or 'the state'}: {what} can't be part of the training state; it is kept as plain data and "
        "tensors and never pickled: store the values needed to rebuild it, for example its state_dict()"
    )


def unpack(skeleton: bytes, tensors: list[Tensor]) -> Any:
    """The tree again, with these tensors in its slots. Raises ValueError if the skeleton is damaged or doesn't fit."""
    wanted, root = _open(skeleton)
    if len(wanted) != len(tensors):
        raise ValueError(f"the state has {len(wanted)} tensors, but {len(tensors)} were given")
    for index, (spec, tensor) in enumerate(zip(wanted, tensors, strict=True)):
        if spec.dtype != tensor.dtype or spec.shape != tuple(tensor.shape):
            raise ValueError(f"tensor {index} should be {spec}, but is {TensorSpec(tuple(tensor.shape), tensor.dtype)}")
    try:
        return _build(root, tensors, 0)
    except (TypeError, IndexError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"the description of the training state is damaged: {error}") from error


def specs(skeleton: bytes) -> list[TensorSpec]:
    """Shape and dtype of each tensor, for a receiver to make room."""
    return _open(skeleton)[0]


def allocate(wanted: Iterable[TensorSpec]) -> list[Tensor]:
    """Uninitialised tensors in host memory."""
    return [torch.empty(spec.shape, dtype=spec.dtype) for spec in wanted]


def places(skeleton: bytes) -> list[str]:
    """For each tensor its place in the tree, as text that is equal in two trees only for the same place."""
    wanted, root = _open(skeleton)
    found = [""] * len(wanted)
    try:
        for slot, place in _walk(root, "", 0) if type(root) is list else ():
            found[slot] = place
    except (TypeError, IndexError, ValueError) as error:
        raise ValueError(f"the description of the training state is damaged: {error}") from error
    return found


def _open(skeleton: bytes) -> tuple[list[TensorSpec], Any]:
    try:
        version, table, root = msgspec.msgpack.decode(skeleton)
        if version != VERSION:
            raise ValueError(f"its version is {version!r}, this program knows {VERSION}")
        wanted = []
        for name, shape in table:
            if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) >= 2**56:
                raise ValueError(f"{shape!r} isn't the shape of a tensor")
            wanted.append(TensorSpec(tuple(shape), DTYPES[name]))
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"the description of the training state is damaged: {error}") from error
    return wanted, root


def _build(node: Any, tensors: list[Tensor], depth: int) -> Any:
    kind = type(node)
    if kind in PLAIN or kind is int or kind is str:
        return node
    if kind is not list or not node or depth > MAX_DEPTH:
        raise ValueError(f"{'nested too deep' if kind is list and node else repr(node)}")
    code = Code(node[0])
    if code in (Code.LIST, Code.TUPLE, Code.SET, Code.FROZENSET):
        return BUILDERS[code](_build(item, tensors, depth + 1) for item in node[1:])
    if code in (Code.DICT, Code.ORDERED_DICT, Code.COUNTER):
        return _fill(BUILDERS[code](), node[1:], tensors, depth)
    if code is Code.DEFAULT_DICT:
        return _fill(defaultdict(None if node[1] is None else FACTORIES[node[1]]), node[2:], tensors, depth)
    if code is Code.DEQUE:
        return deque((_build(item, tensors, depth + 1) for item in node[2:]), maxlen=node[1])
    if code is Code.SIZE:
        return torch.Size(node[1:])
    if code is Code.COMPLEX:
        _, real, imag = node
        return complex(real, imag)
    _, first, *rest = node
    if code is Code.TENSOR and not rest:
        return tensors[_slot(first)]
    if code is Code.ARRAY:
        return _array(tensors[_slot(first)], *rest)
    if code is Code.SCALAR:
        (data,) = rest
        dtype = _array_dtype(first)
        return numpy.frombuffer(data, dtype=dtype)[0]
    if code is Code.DTYPE:
        return DTYPES[first]
    if code is Code.DEVICE and type(first) is str:
        return torch.device(first)
    if code is Code.BIG_INT:
        return int.from_bytes(first, "little", signed=True)
    if code is Code.ODD_STR:
        return first.decode("utf-8", "surrogatepass")
    if code is Code.BYTEARRAY and type(first) is bytes:
        return bytearray(first)
    raise ValueError(f"{node[:2]!r}")


def _fill(mapping: dict[Any, Any], pairs: list[Any], tensors: list[Tensor], depth: int) -> dict[Any, Any]:
    for key, item in zip(pairs[::2], pairs[1::2], strict=True):
        mapping[_build(key, tensors, depth + 1)] = _build(item, tensors, depth + 1)
    return mapping


def _slot(index: Any) -> int:
    if type(index) is not int or index < 0:
        raise ValueError(f"{index!r} isn't the number of a tensor")
    return index


def _array_dtype(name: str) -> Any:
    if numpy is None:
        raise ValueError("it holds numpy data, and numpy isn't installed here")
    if not ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} isn't a dtype of plain data")
    return numpy.dtype(name)


def _array(tensor: Tensor, name: str, shape: list[int]) -> Any:
    dtype = _array_dtype(name)
    # A copy: the tensor may be a piece of a larger buffer without the alignment that the dtype wants.
    return numpy.frombuffer(bytearray(view_bytes(tensor)), dtype=dtype).reshape(shape)


def _walk(node: list[Any], place: str, depth: int) -> Iterator[tuple[int, str]]:
    if not node:
        return
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    code = node[0]
    if code in (Code.TENSOR, Code.ARRAY):
        yield _slot(node[1]), place
    elif code in (Code.LIST, Code.TUPLE, Code.DEQUE):
        for index, item in enumerate(node):
            if type(item) is list:
                yield from _walk(item, f"{place}/{index}", depth + 1)
    elif code in (Code.DICT, Code.ORDERED_DICT, Code.COUNTER, Code.DEFAULT_DICT):
        start = 2 if code == Code.DEFAULT_DICT else 1
        for key, item in zip(node[start::2], node[start + 1 :: 2], strict=True):
            if type(item) is list:
                yield from _walk(item, f"{place}/{key!r}", depth + 1)


def host(tensor: Tensor) -> Tensor:
    """The tensor itself if its bytes lie in host memory in order, else a copy for which that is so."""
    return tensor.detach().cpu().contiguous()


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a flat uint8 tensor on the same memory."""
    return tensor.view(-1).view(torch.uint8)


def view_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes (of a host copy, if they aren't in host memory in order), writable if they are its own."""
    tensor = host(tensor)
    if tensor.numel() == 0:
        return memoryview(b"")
    if numpy is not None:
        return memoryview(flat_bytes(tensor).numpy())
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # the view keeps the array alive, and the array the memory
    return memoryview(array).cast("B")


def digest(packed: Packed) -> str:
    """A fingerprint of the state, equal on ranks that hold the same bits.

    It finds accidents, not attacks: CRC-32 of each tensor (4 GB/s; any single flipped bit changes it), joined by
    SHA-256. One thread: all ranks of a node compute it at the same moment, so a pool would compete with itself.
    """
    whole = hashlib.sha256(packed.skeleton)
    for tensor in packed.tensors:
        whole.update(struct.pack("<Q", tensor.nbytes))
        whole.update(struct.pack("<I", zlib.crc32(view_bytes(tensor))))
    return whole.hexdigest()
