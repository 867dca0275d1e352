"""The state as data: what goes in comes out with the same types and bits, and nothing else gets in."""

from __future__ import annotations

import collections
import math
import random
import struct

import msgspec
import pytest
import torch

from evertrain.torch import codec

np = pytest.importorskip("numpy")


def through(tree):
    packed = codec.pack(tree)
    return codec.unpack(packed.skeleton, [tensor.clone() for tensor in packed.tensors])


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes(codec.view_bytes(a)) == bytes(codec.view_bytes(b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return factory and len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple | collections.deque):
        return getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return a == b


SIGNALLING_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000001))[0]
COUNTS: collections.defaultdict = collections.defaultdict(int, {1: 2})

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63),
    -(2**63) - 1,
    3**500,
    -(3**500),
    1.5,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    SIGNALLING_NAN,
    "",
    "é\U0001f600",
    "\ud800 alone",
    b"",
    b"\x00\xff",
    bytearray(b"ab"),
    1 - 2j,
    [],
    (),
    {},
    set(),
    frozenset(),
    [1, [2, (3,)]],
    {1: "a", "1": "b", (1, 2): None, None: 0, 2.5: 1, frozenset({1}): 2, True and "t": 3},
    {"z": 1, "a": 2},
    {1, "a", (2, 3)},
    frozenset({"x", b"x"}),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter({5: 2, "k": 1}),
    COUNTS,
    collections.defaultdict(list, a=[1]),
    collections.defaultdict(None, a=1),
    collections.deque([1, 2], maxlen=7),
    torch.Size([2, 3]),
    torch.Size([]),
    torch.bfloat16,
    torch.device("cuda:1"),
    torch.device("cpu"),
    random.Random(1).getstate(),
    np.random.RandomState(1).get_state(),
    np.random.PCG64(1).state,
    np.arange(6.0).reshape(2, 3),
    np.array(3),
    np.zeros((0, 4), np.int16),
    np.arange(10)[::3],
    np.array(["ab", "c"]),
    np.array([b"x"]),
    np.array(["2026-01-02"], "M8[D]"),
    np.array([1, 2], ">i4"),
    np.asfortranarray(np.ones((2, 3))),
    np.broadcast_to(np.float32(2), (3,)),
    np.float32(1.1),
    np.float64(-0.0),
    np.int64(5),
    np.bool_(True),
    np.uint8(3),
    np.datetime64("2026-01-02"),
    np.str_("é"),
    np.float16(2),
    np.complex64(1j),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_with_its_type_and_bits(value):
    assert same(through(value), value)
    assert same(through({"deep": [(value,)]}), {"deep": [(value,)]})


@pytest.mark.parametrize("dtype", codec.DTYPES.values(), ids=str)
def test_a_tensor_of_every_dtype_comes_back_bit_for_bit(dtype):
    raw = torch.arange(96, dtype=torch.uint8) % 2 if dtype is torch.bool else torch.arange(96, dtype=torch.uint8) * 37
    tensor = raw.view(dtype).reshape(2, -1)
    for case in (tensor, tensor.t(), tensor[:, ::2], tensor[0, 0], tensor[:0], tensor[:, :0]):
        assert same(through([case])[0], case)


def test_tensors_are_references_without_gradient():
    weight = torch.nn.Parameter(torch.ones(3))
    packed = codec.pack({"w": weight})
    assert packed.tensors[0].data_ptr() == weight.data_ptr()
    assert not packed.tensors[0].requires_grad
    assert packed.nbytes == 12
    array = np.zeros(4)
    codec.pack(array).tensors[0].fill_(1)
    assert array.view(np.uint8).all(), "a contiguous array is handed out by reference too"


def test_a_lazy_conjugate_keeps_its_value():
    lazy = torch.tensor([1 + 2j]).conj()
    assert lazy.is_conj() and through(lazy).resolve_conj()[0] == 1 - 2j
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg() and through(negative)[0] == -2


def test_shared_storage_gives_separate_equal_tensors():
    base = torch.arange(6.0)
    back = through([base[:4], base[2:]])
    assert same(back[0], base[:4]) and same(back[1], base[2:])


def test_optimizer_and_scheduler_states_pass_whole():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    tree["model"] = collections.OrderedDict(tree["model"])
    assert same(through(tree), tree)


def test_specs_say_how_to_make_room():
    packed = codec.pack([torch.zeros(2, 3, dtype=torch.bfloat16), torch.tensor(1)])
    specs = codec.specs(packed.skeleton)
    assert specs == [codec.TensorSpec((2, 3), torch.bfloat16), codec.TensorSpec((), torch.int64)]
    room = codec.allocate(specs)
    assert [(tuple(t.shape), t.dtype) for t in room] == [(s.shape, s.dtype) for s in specs]
    assert codec.nbytes(specs) == codec.nbytes(room) == packed.nbytes == 20


def test_places_tell_tensors_apart_by_where_they_are():
    small = codec.places(codec.pack({"model": {"b": torch.ones(1)}, "opt": [torch.ones(1)]}).skeleton)
    large = codec.places(
        codec.pack({"model": {"a": torch.ones(1), "b": torch.ones(1)}, "opt": (0, np.ones(1))}).skeleton
    )
    assert small[0] == large[1] and len(set(large)) == 3 and small[1] not in large
    assert codec.places(codec.pack({1: torch.ones(1)}).skeleton) != codec.places(
        codec.pack({"1": torch.ones(1)}).skeleton
    )


class Custom:
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"extra": {"ema": {"fn": print}}}, r"^extra\.ema\.fn: a function can't be part of the training state"),
        ({"extra": [0, {7: lambda: 0}]}, r"^extra\[1\]\[7\]: a function can't"),
        ({"a": Custom}, r"^a: a class \(Custom\)"),
        ({"a": Custom()}, r"^a: an object of type .*\.Custom can't.*state_dict\(\)"),
        ({"a": Point(1, 2)}, r"^a: an object of type .*\.Point"),
        ({"a": torch.Generator()}, r"^a: an object of type torch.*Generator"),
        (collections.defaultdict(lambda: 1), r"^default_factory: a function"),
        ({"a": collections.defaultdict(Custom)}, r"^a\.default_factory: a class"),
        ({"a": np.array([None])}, r"^a: a numpy array of dtype\('O'\)"),
        ({"a": np.zeros(1, [("x", "i4")])}, r"^a: a numpy array of"),
        ({"a": torch.ones(2).to_sparse()}, r"^a: a tensor of layout torch.sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, r"^a: a tensor on the meta device"),
        ({torch.ones(1): 1}, "a tensor can't be a key"),
        ({"a": {torch.ones(1)}}, "a tensor can't be a key"),
        (object(), "^the state: an object of type builtins.object"),
    ],
    ids=lambda value: None if isinstance(value, str) else "tree",
)
def test_what_is_not_data_is_refused_with_its_place(tree, text):
    with pytest.raises(TypeError, match=text):
        codec.pack(tree)


def test_a_tree_that_contains_itself_is_refused():
    tree: dict = {}
    tree["me"] = [tree]
    with pytest.raises(TypeError, match="contains itself"):
        codec.pack(tree)


def hostile(root, table=()):
    return msgspec.msgpack.encode([codec.VERSION, list(table), root])


def nested(depth):
    node: list = [1]
    for _ in range(depth):
        node = [1, node]
    return node


@pytest.mark.parametrize(
    "skeleton",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"cos\nsystem\n(S'true'\ntR.",
        msgspec.msgpack.encode([99, [], None]),
        msgspec.msgpack.encode([1, [["float32", [-1]]], None]),
        msgspec.msgpack.encode([1, [["float32", [2**40, 2**40]]], None]),
        msgspec.msgpack.encode([1, [["load", [1]]], None]),
        msgspec.msgpack.encode([1, [["float32", "ab"]], None]),
        msgspec.msgpack.encode([1, 5, None]),
        hostile([]),
        hostile({"a": 1}),
        hostile([77, 1]),
        hostile(["eval", "1"]),
        hostile([0, 0]),
        hostile([0, -1]),
        hostile([0, "0"]),
        hostile([0]),
        hostile([3, 1]),
        hostile([3, [1], 2]),
        hostile([5, [1, 2]]),
        hostile([7, "open", 1, 2]),
        hostile([7, "__import__"]),
        hostile([7]),
        hostile([9, "text"]),
        hostile([10, "a"]),
        hostile([11, "load"]),
        hostile([12, "nowhere:x"]),
        hostile([12, 0]),
        hostile([13, 0, "O", [1]]),
        hostile([14, "|O8", b"\0" * 8]),
        hostile([14, "<f8", b"123"]),
        hostile([14, "<f8", b""]),
        hostile([15, "a", "b"]),
        hostile([16, 2**40]),
        hostile([17, -3]),
        hostile([17, "x", 1]),
        hostile([18, b"\xff"]),
        hostile([18, 3]),
        hostile(nested(codec.MAX_DEPTH + 2)),
        hostile(nested(700)),
    ],
)
def test_a_damaged_description_is_a_value_error(skeleton):
    with pytest.raises(ValueError):
        codec.unpack(skeleton, [])


def test_an_array_with_objects_cannot_be_smuggled_in():
    room = [torch.zeros(8, dtype=torch.uint8)]
    for dtype in ("|O8", "O", "i4,O", "|V8", "<f8\n", "object"):
        with pytest.raises(ValueError, match="dtype"):
            codec.unpack(hostile([13, 0, dtype, [1]], [["uint8", [8]]]), room)
    assert codec.unpack(hostile([13, 0, "<f8", [1]], [["uint8", [8]]]), room)[0] == 0
    with pytest.raises(ValueError):
        codec.unpack(hostile([13, 0, "<f8", [5]], [["uint8", [8]]]), room)


def test_any_flipped_byte_gives_a_tree_or_a_value_error():
    packed = codec.pack(
        {"a": [1, 2.5, {"b": {3, 4}}], "t": torch.ones(2), "n": np.ones(2), "c": collections.Counter("aab")}
    )
    for index in range(len(packed.skeleton)):
        for flip in (1, 0x80, 0xFF):
            damaged = bytearray(packed.skeleton)
            damaged[index] ^= flip
            try:
                codec.places(bytes(damaged))
                codec.unpack(bytes(damaged), packed.tensors)
            except ValueError:
                pass


def test_tensors_that_do_not_fit_are_refused():
    packed = codec.pack([torch.ones(2)])
    for tensors in ([], [torch.ones(3)], [torch.ones(2, dtype=torch.float64)], [torch.ones(2)] * 2):
        with pytest.raises(ValueError):
            codec.unpack(packed.skeleton, tensors)


def test_the_digest_sees_every_bit():
    packed = codec.pack(
        {
            "w": torch.randn(5, 3),
            "b": torch.zeros(3, dtype=torch.bfloat16),
            "n": np.arange(3),
            "s": torch.tensor(1),
            "lr": 0.1,
        }
    )
    seen = {codec.digest(packed)}
    for tensor in packed.tensors:
        view = codec.view_bytes(tensor)
        for index in range(len(view)):
            for bit in range(8):
                view[index] ^= 1 << bit
                seen.add(codec.digest(packed))
                view[index] ^= 1 << bit
    assert len(seen) == 1 + 8 * packed.nbytes
    assert codec.digest(packed) in seen, "and nothing was left changed"


def test_the_digest_depends_on_structure_and_not_on_memory_layout():
    tensor = torch.arange(12.0).reshape(3, 4)
    base = codec.digest(codec.pack({"a": tensor}))
    assert base == codec.digest(codec.pack({"a": tensor.t().contiguous().t()}))
    assert base != codec.digest(codec.pack({"b": tensor}))
    assert base != codec.digest(codec.pack({"a": tensor.reshape(4, 3)}))
    assert base != codec.digest(codec.pack({"a": tensor.view(torch.int32)}))
    assert codec.digest(codec.pack([torch.ones(1), torch.zeros(1)])) != codec.digest(
        codec.pack([torch.zeros(1), torch.ones(1)])
    )


def test_the_digest_of_a_set_does_not_depend_on_its_order_in_memory():
    one, other = set([0, 8, 16]), set([16, 8, 0])
    assert one == other and list(one) != list(other), "they collide, like texts under another hash seed"
    assert codec.pack(one) == codec.pack(other)
    assert codec.pack(frozenset(one)) == codec.pack(frozenset(other))


def test_everything_but_arrays_works_without_numpy(monkeypatch):
    tree = {
        "w": torch.randn(7).bfloat16(),
        "empty": torch.ones(0),
        "s": torch.tensor(2.0),
        "t": torch.arange(6).reshape(2, 3).t(),
    }
    with_numpy = codec.pack({**tree, "n": np.ones(2)})
    expected, views = codec.digest(codec.pack(tree)), [bytes(codec.view_bytes(t)) for t in tree.values()]
    monkeypatch.setattr(codec, "numpy", None)
    packed = codec.pack(tree)
    assert codec.digest(packed) == expected
    assert [bytes(codec.view_bytes(t)) for t in packed.tensors] == views
    view = codec.view_bytes(torch.tensor([1, 2], dtype=torch.uint8))  # nothing else holds the tensor
    assert bytes(view) == b"\1\2"
    assert same(codec.unpack(packed.skeleton, packed.tensors), tree)
    with pytest.raises(ValueError, match="numpy isn't installed"):
        codec.unpack(with_numpy.skeleton, with_numpy.tensors)
    with pytest.raises(TypeError, match="numpy"):
        codec.pack(np.ones(1))
