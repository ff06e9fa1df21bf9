"""Any state comes back as it was; what cannot be stored is named; what a file says is distrusted."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.checkpoint.format.tree import flatten, unflatten
from trimtab.core.errors import CheckpointError


def round_trip(state: Any) -> Any:
    tree, stored = flatten(state)
    return unflatten(json.loads(json.dumps(tree, allow_nan=False)), stored)


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        if a.layout is not torch.strided:
            return a.layout is b.layout and a.shape == b.shape and same(a.to_dense(), b.to_dense())
        bits = [t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8) for t in (a, b)]
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        alike = len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
        return alike and getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
    if isinstance(a, (list, tuple, deque)):
        limits = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return limits and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


PLAIN = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    -(2**63),
    2**20000,
    0.1,
    -0.0,
    math.nan,
    -math.inf,
    5e-324,
    struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    complex(-0.0, math.inf),
    "",
    "é\x00\n\u2028",
    "\ud800",
    "\ud83d\ude00",
    b"",
    b"\x00\xff" * 4000,
    [],
    (),
    ((),),
    {},
    {"$": "tensor", "key": "x"},
    {"": {"$": 1}},
    {7: "a", 2.5: "b", None: "c", True: "d", (1, "x"): "e", "s": "f"},
    {"b": 1, "a": 2},
    OrderedDict(b=1, a=2),
    Counter({30: 1, 80: 2}),
    defaultdict(list, a=[1]),
    defaultdict(dict),
    defaultdict(int, {1: 2}),
    defaultdict(float),
    defaultdict(None, a=1),
    {1, "a", (2, 3)},
    frozenset({2.5, None}),
    deque([1, [2]], maxlen=5),
    deque(),
    range(3, 100, 7),
    slice(None, 5, 2),
    torch.Size([2, 3]),
    torch.float8_e5m2,
    torch.device("cuda:3"),
    [1, 2.5, "x", None],
    [math.nan, 1.0],
    [2**80, 1],
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: type(v).__name__)
def test_plain_data_comes_back(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"a": [value, (value,)]}), {"a": [value, (value,)]})


ARRAYS = [
    np.float32(1.5),
    np.float64("nan"),
    np.bool_(True),
    np.int8(-3),
    np.str_("é"),
    np.str_(""),
    np.bytes_(b"ab"),
    np.datetime64("2026-01-02T03:04"),
    np.timedelta64(5, "ms"),
    np.longdouble("1.1"),
    np.zeros(()),
    np.zeros((0, 3), dtype=np.int16),
    np.arange(12, dtype=">i4").reshape(3, 4),
    np.arange(12.0).reshape(3, 4).T[::2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(["a", "long"]),
    np.array([(1, "x", [1, 2])], dtype=[("n", "<i4"), ("s", "U3"), ("v", "<f4", (2,))]),
    np.array([], dtype="U0"),
    np.array([True, False]),
    np.array([1 + 2j], dtype=np.complex64),
    np.array([1, 2], dtype=np.uint64),
    np.frombuffer(b"abcd", dtype=np.uint8),  # read-only
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda v: f"{v.dtype}-{v.shape}"[:40])
def test_numpy_comes_back(value: Any) -> None:
    assert same(round_trip([value])[0], value)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SMALL = [
    getattr(torch, n)
    for n in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu")
    if hasattr(torch, n)
]
OTHERS = [torch.bool, torch.complex64, torch.complex128, torch.complex32]
INTS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [*FLOATS, *SMALL, *INTS, *OTHERS], ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * 4 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(6, 4)
    for value in (tensor, tensor[0, 0], tensor[:0], tensor.t(), tensor[::2, 1:3]):
        assert same(round_trip({"a": value})["a"], value)


def test_nonfinite_values_and_signs_of_zero_stay() -> None:
    value = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    assert same(round_trip(value), value)


def test_parameters_become_tensors_without_their_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    back = round_trip({"p": parameter, "y": parameter * 2})
    assert type(back["p"]) is torch.Tensor
    assert not back["p"].requires_grad
    assert back["y"].grad_fn is None


def test_conjugated_and_negated_views_are_resolved() -> None:
    value = torch.tensor([1 + 2j])
    assert same(round_trip(value.conj()), value.conj().resolve_conj())
    assert same(round_trip(value.conj().imag), torch.tensor([-2.0]))


def test_channels_last_stays() -> None:
    value = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree, stored = flatten({"w": value})
    assert stored["w"].shape == value.shape, "for other readers of the file"
    back = unflatten(tree, stored)["w"]
    assert back.stride() == value.stride()
    assert same(back, value)


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    w = torch.randn(3, 4)
    tree, stored = flatten({"embedding": w, "head": w, "same": w.view(3, 4), "transposed": w.t(), "row": w[1]})
    assert list(stored) == ["embedding"]
    back = unflatten(tree, {"embedding": stored["embedding"].clone()})
    assert back["embedding"].shape == (3, 4)
    back["embedding"][1, 2] = 7.0
    assert back["head"][1, 2] == back["same"][1, 2] == back["transposed"][2, 1] == back["row"][2] == 7.0


def test_overlapping_views_share_memory_again() -> None:
    base = torch.arange(20.0)
    tree, stored = flatten([base[2:8], base[5:11].view(2, 3), base[6:7].view(torch.int32), base[15:]])
    assert sum(t.nbytes for t in stored.values()) <= 16 * 4
    back = unflatten(tree, {key: t.clone() for key, t in stored.items()})
    assert same(back[0], base[2:8].clone())
    assert same(back[1], base[5:11].view(2, 3).clone())
    back[0][4] = 1.0
    assert back[1][0, 1] == 1.0
    assert back[2][0] == torch.tensor(1.0).view(torch.int32)


def test_a_slice_is_stored_without_the_rest_of_its_storage() -> None:
    _, stored = flatten({"a": torch.zeros(1_000_000)[5:8], "b": torch.zeros(1).expand(5)})
    assert stored["a"].untyped_storage().nbytes() >= 12  # memory is shared, not copied
    assert [t.nbytes for t in stored.values()] == [12, 20]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_come_back_in_parts() -> None:
    dense = torch.tensor([[0.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 3.0]])
    twice = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 4))
    layouts = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((1, 2)), twice]
    layouts.append(dense.to_sparse_bsc((2, 2)))
    for value in layouts:
        back = round_trip({"s": value})["s"]
        assert same(back, value)
        if value.layout is torch.sparse_coo:
            assert back.is_coalesced() == value.is_coalesced()


def test_real_states_come_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for part in (model, optimizer, steps, cycle):
        state = part.state_dict()
        plain = OrderedDict(state.items()) if isinstance(state, OrderedDict) else state
        assert same(round_trip(state), plain)


def test_two_paths_that_read_the_same_are_two_tensors() -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "__metadata__": torch.ones(2), "": torch.ones(3)}
    assert same(round_trip(state), state)
    assert "__metadata__" not in flatten(state)[1]


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.binary(max_size=8)
    | st.lists(st.floats(width=32), max_size=4).map(torch.tensor)
    | st.lists(st.integers(-5, 5), max_size=4).map(lambda v: np.array(v, dtype=np.int16))
)
keys = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.tuples(st.integers())
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    pairs = st.dictionaries(keys, inner, max_size=4)
    named = st.dictionaries(st.text("$ab.", max_size=2), inner, max_size=4)
    return lists | lists.map(tuple) | lists.map(deque) | pairs | named | pairs.map(OrderedDict)


@settings(max_examples=150, deadline=None)
@given(st.recursive(leaves, nested, max_leaves=15))
def test_whatever_hypothesis_thinks_of_comes_back(state: Any) -> None:
    assert same(round_trip(state), state)


class Colour(enum.IntEnum):
    RED = 1


class Name(enum.StrEnum):
    A = "a"


@dataclass
class Record:
    x: int = 1


Point = namedtuple("Point", "x y")


class Shouting(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_cannot_be_stored_is_named_with_its_path() -> None:
    refused = [object(), Colour.RED, Name.A, Record(), Point(1, 2), Shouting(), Path("x"), print, Record, lambda: 0]
    refused += [np.array([object()]), np.array([(None,)], dtype=[("a", "O")]), np.ma.array([1]), bytearray(b"x")]
    refused += [torch.zeros(2, device="meta"), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)]
    refused += [defaultdict(lambda: 3), torch.Generator(), torch.ones(2).to_mkldnn()]
    for value in refused:
        with pytest.raises(CheckpointError, match=r"^optimizer\.state\.3\.foo is a.*: it cannot be stored; "):
            flatten({"state": {3: {"foo": value}}}, "optimizer")
    with pytest.raises(CheckpointError, match=r"state\.\(.*a key\)\.1 is a type"):
        flatten({"state": {(1, Record): 1}})


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    with pytest.raises(CheckpointError, match="does it hold itself"):
        flatten(state)


HOSTILE: list[Any] = [
    {"$": "nonsense", "v": 1},
    {"$": ["list"], "v": 1},
    {"$": None},
    {"$": "tensor"},
    {"$": "tensor", "key": "absent"},
    {"$": "tensor", "key": ["w"]},
    {"$": "tensor", "key": "w", "stride": [2**40, 1]},
    {"$": "tensor", "key": "w", "stride": [-1, 2]},
    {"$": "tensor", "key": "w", "dtype": "save", "shape": [1]},
    {"$": "tensor", "key": "w", "dtype": "int8", "shape": [2**40]},
    {"$": "tensor", "key": "w", "offset": 0, "shape": [2**40], "stride": [1], "dtype": "float32"},
    {"$": "tensor", "key": "w", "offset": 4, "shape": [], "stride": [], "dtype": "float32"},
    {"$": "tensor", "key": "w", "offset": -1, "shape": [1], "stride": [1], "dtype": "float32"},
    {"$": "tensor", "key": "w", "offset": 3, "shape": [2], "stride": [1], "dtype": "float32"},
    {"$": "sparse", "layout": "sparse_coo", "shape": [2], "coalesced": True, "indices": 1, "values": 2},
    {
        "$": "sparse",
        "layout": "sparse_coo",
        "shape": [2],
        "coalesced": False,
        "indices": {"$": "tensor", "key": "i"},
        "values": {"$": "tensor", "key": "v"},
    },
    {"$": "ndarray", "tensor": {"$": "tensor", "key": "w"}, "dtype": "O", "shape": [1]},
    {"$": "ndarray", "tensor": {"$": "tensor", "key": "e"}, "dtype": "U0", "shape": [2**40]},
    {"$": "numpy", "dtype": "O", "v": "00"},
    {"$": "numpy", "dtype": "<f8", "v": "00"},
    {"$": "numpy", "dtype": [[]], "v": "00"},
    {"$": "defaultdict", "factory": "eval", "v": []},
    {"$": "dict", "v": [[[], 1]]},
    {"$": "dict", "v": [1]},
    {"$": "set", "v": [[]]},
    {"$": "deque", "v": [], "maxlen": -1},
    {"$": "range", "v": [1, 2, 0]},
    {"$": "range", "v": ["a"]},
    {"$": "slice", "v": []},
    {"$": "bytes", "v": "é"},
    {"$": "bytes", "tensor": 3},
    {"$": "float", "v": "00"},
    {"$": "int", "v": 3},
    {"$": "str", "v": "ff"},
    {"$": "torch.device", "v": "nonsense"},
    {"$": "torch.dtype", "v": "load"},
    {"$": "torch.Size", "v": ["a"]},
]


@pytest.mark.parametrize("tree", HOSTILE, ids=lambda t: str(t)[:60])
def test_descriptions_that_make_no_sense_are_refused(tree: Any) -> None:
    stored = {"w": torch.zeros(2, 2), "i": torch.tensor([[7]]), "v": torch.tensor([1.0]), "e": torch.zeros(0).byte()}
    with pytest.raises(CheckpointError, match="makes no sense"):
        unflatten({"a": [tree]}, stored)


def test_deep_descriptions_are_refused() -> None:
    tree: Any = []
    for _ in range(500):
        tree = [tree]
    with pytest.raises(CheckpointError, match="containers deep"):
        unflatten(tree, {})


def test_a_few_bytes_are_not_looked_at_without_end() -> None:
    """By a stride of 0, or by many views: both would make whoever reads the state read for hours."""
    stored = {"w": torch.zeros(1000)}
    view = {"$": "tensor", "key": "w", "dtype": "float32", "offset": 0}
    with pytest.raises(CheckpointError, match="claim far more values than are stored"):
        unflatten(view | {"shape": [10**12], "stride": [0]}, stored)
    with pytest.raises(CheckpointError, match="claim far more values than are stored"):
        unflatten([view | {"shape": [999], "stride": [1], "offset": n % 2, "n": n} for n in range(100_000)], stored)
    assert len(unflatten([{"$": "tensor", "key": "w"}] * 100_000, stored)) == 100_000  # shared by as many layers
    for shape, stride in (([2**63], [0]), ([1.0], [1]), (["1"], [1]), ([1] * 65, [1] * 65), ([True], [1])):
        with pytest.raises(CheckpointError, match="makes no sense"):
            unflatten(view | {"shape": shape, "stride": stride}, stored)
    wide = unflatten(view | {"shape": [50, 1000], "stride": [0, 1]}, stored)
    assert wide.shape == (50, 1000)
    base = torch.zeros(10)
    with pytest.raises(CheckpointError, match=r"largest has shape \(10000000, 10\).*before it is expanded"):
        flatten({"base": base, "wide": base.expand(10**7, 10)})  # told when it is saved, not when it is needed


@pytest.mark.parametrize("kind", ["dict", "set", "frozenset", "Counter"])
def test_keys_that_were_chosen_to_be_slow_are_refused(kind: str) -> None:
    """All of them have the same hash: a dict would compare each with all others."""
    keys = [{"$": "int", "v": hex((2**61 - 1) * i)} for i in range(1, 3000)]
    body = keys if kind.endswith("set") else [[key, 1] for key in keys]
    with pytest.raises(CheckpointError, match="is slow to distinguish them"):
        unflatten({"$": kind, "v": body}, {})
    honest = {hash(str(i)) * 7: (i, 2**62 + i) for i in range(20_000)}  # large, and many, and no trouble
    assert round_trip({"keys": honest, "set": set(honest)}) == {"keys": honest, "set": set(honest)}
