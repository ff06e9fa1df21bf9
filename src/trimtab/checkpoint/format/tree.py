"""Any nested state as JSON and tensors, and back: exact, and nothing is executed on the way back.

What JSON has, stays as it is: None, bool, str, int below 2**63, finite float, list, and a dict whose keys are strings.
Everything else is an object with the key `$` that names its kind: `{"$": "tuple", "v": [1, 2]}`. A tensor is
`{"$": "tensor", "key": "layer.0.weight"}` and its values are in the second half of what `flatten` returns.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trimtab.checkpoint.format import tensors
from trimtab.checkpoint.format.tensors import Found, Json, Made, refusal
from trimtab.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Stands for a tensor that several processes stored together, under this key."""

    key: str


MAX_DEPTH = 100
"""Containers within containers; beyond it a state most likely holds itself, and a file is most likely hostile."""

_FACTORIES: dict[str, Callable[[], object] | None] = {"": None, "list": list, "dict": dict, "int": int, "float": float}
_INT_LIMIT = 2**63
_LONG_BYTES = 1024  # longer ones go to the tensor file: base64 makes them a third larger and slow to parse
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, struct.error)


def flatten(state: object, path: str = "") -> tuple[Json, dict[str, Tensor]]:
    """Split `state` into JSON-able data and the tensors it refers to by key; `path` is its name in messages.

    The tensors are contiguous, detached, on the device they were on, and share memory with the state wherever they can.
    Memory that several tensors share is in them once. `requires_grad` is not kept.

    Example:
        >>> tree, stored = flatten({"w": torch.ones(2), "betas": (0.9, 0.999)})
        >>> tree
        {'w': {'$': 'tensor', 'key': 'w'}, 'betas': {'$': 'tuple', 'v': [0.9, 0.999]}}
        >>> unflatten(tree, stored)
        {'w': tensor([1., 1.]), 'betas': (0.9, 0.999)}
    """
    found: Found = []
    tree = _encode(state, path, found, 0)
    prefix = f"{path}." if path else ""
    return tree, tensors.place(found, prefix)


def unflatten(tree: Json, stored: Mapping[str, Tensor]) -> Any:
    """Build the state that `flatten` took apart; CheckpointError where `tree` does not describe one."""
    try:
        return _decode(tree, stored, Made(stored), 0)
    except CheckpointError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(
            f"the description of the state makes no sense ({type(error).__name__}: {str(error)[:200]}); "
            "the file is damaged or was not written by trimtab: use another checkpoint"
        ) from error


def _encode(value: Any, path: str, found: Found, depth: int) -> Json:
    kind = type(value)
    if value is None or value is True or value is False:
        return value
    if kind is str:
        return _encode_str(value)
    if kind is int:
        return value if -_INT_LIMIT < value < _INT_LIMIT else {"$": "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": struct.pack(">d", value).hex()}
    if isinstance(value, Tensor):
        return tensors.encode(value, path, found)
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(value, path, found)
    if depth >= MAX_DEPTH:
        raise refusal(path, f"more than {MAX_DEPTH} containers deep", "does it hold itself?")
    if kind is list:
        return _encode_items(value, path, found, depth)
    if kind is dict:
        if "$" not in value and all(type(key) is str for key in value) and _no_surrogates(value):
            dot = f"{path}." if path else ""
            return {key: _encode(item, f"{dot}{key}", found, depth + 1) for key, item in value.items()}
        return {"$": "dict", "v": _encode_pairs(value, path, found, depth)}
    if kind in _ENCODERS:
        name, parts = _ENCODERS[kind]
        return {"$": name, **parts(value, path, found, depth)}
    remedy = "store plain data and tensors: give it a state_dict() and store that"
    raise refusal(path, f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""), remedy)


def _encode_str(value: str) -> Json:
    if value.isascii() or _no_surrogates((value,)):
        return value
    return {"$": "str", "v": value.encode("utf-8", "surrogatepass").hex()}  # JSON would join two halves into one


def _no_surrogates(strings: Iterable[str]) -> bool:
    try:
        "".join(strings).encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_items(value: Collection[Any], path: str, found: Found, depth: int) -> list[Json]:
    kinds = set(map(type, value))
    if kinds == {int} and min(value) > -_INT_LIMIT and max(value) < _INT_LIMIT:
        return list(value)  # a generator's state or an epoch's order: thousands of numbers, no path needed for any
    if kinds == {float} and all(map(math.isfinite, value)):
        return list(value)
    dot = f"{path}." if path else ""
    return [_encode(item, f"{dot}{i}", found, depth + 1) for i, item in enumerate(value)]


def _encode_pairs(value: Mapping[object, object], path: str, found: Found, depth: int) -> list[Json]:
    dot = f"{path}." if path else ""
    return [
        [_encode(key, f"{dot}{key!r:.80} (a key)", found, depth + 1), _encode(item, f"{dot}{key}", found, depth + 1)]
        for key, item in value.items()
    ]


def _items(value: Collection[object], path: str, found: Found, depth: int) -> dict[str, Json]:
    return {"v": _encode_items(value, path, found, depth)}


def _pairs(value: Mapping[object, object], path: str, found: Found, depth: int) -> dict[str, Json]:
    return {"v": _encode_pairs(value, path, found, depth)}


def _defaultdict(value: defaultdict[object, object], path: str, found: Found, depth: int) -> dict[str, Json]:
    name = next((name for name, factory in _FACTORIES.items() if factory is value.default_factory), None)
    if name is None:
        raise refusal(path, f"a defaultdict of {value.default_factory!r}", "use list, dict, int or float")
    return {"factory": name, **_pairs(value, path, found, depth)}


def _bytes(value: bytes, path: str, found: Found, depth: int) -> dict[str, Json]:
    if len(value) <= _LONG_BYTES:
        return {"v": base64.b64encode(value).decode()}
    return {"tensor": tensors.encode(torch.frombuffer(bytearray(value), dtype=torch.uint8), path, found)}


def _set(value: Collection[Any], path: str, found: Found, depth: int) -> dict[str, Json]:
    items = list(value)
    try:
        items.sort()
    except TypeError:
        items.sort(key=repr)  # of mixed types: any order will do, if it is the same each time
    return {"v": _encode_items(items, path, found, depth)}


_ENCODERS: dict[type, tuple[str, Callable[[Any, str, Found, int], dict[str, Json]]]] = {
    tuple: ("tuple", _items),
    OrderedDict: ("OrderedDict", _pairs),
    Counter: ("Counter", _pairs),  # MultiStepLR keeps its milestones in one
    defaultdict: ("defaultdict", _defaultdict),
    set: ("set", _set),
    frozenset: ("frozenset", _set),
    deque: ("deque", lambda v, p, s, d: {"maxlen": v.maxlen, **_items(v, p, s, d)}),
    bytes: ("bytes", _bytes),
    Elsewhere: ("elsewhere", lambda v, p, s, d: {"v": v.key}),
    complex: ("complex", lambda v, p, s, d: {"v": struct.pack(">dd", v.real, v.imag).hex()}),
    range: ("range", lambda v, p, s, d: {"v": [_encode(i, p, s, d) for i in (v.start, v.stop, v.step)]}),
    slice: ("slice", lambda v, p, s, d: {"v": [_encode(i, p, s, d + 1) for i in (v.start, v.stop, v.step)]}),
    torch.Size: ("torch.Size", lambda v, p, s, d: {"v": list(v)}),
    torch.dtype: ("torch.dtype", lambda v, p, s, d: {"v": tensors.dtype_name(v)}),
    torch.device: ("torch.device", lambda v, p, s, d: {"v": str(v)}),
}


def _decode(tree: Json, stored: Mapping[str, Tensor], made: Made, depth: int) -> object:
    if tree is None or isinstance(tree, (bool, str, int, float)):
        return tree
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} containers deep")
    if not isinstance(tree, Mapping):
        return [_decode(item, stored, made, depth + 1) for item in tree]
    if "$" not in tree:
        return {key: _decode(item, stored, made, depth + 1) for key, item in tree.items()}
    kind = tensors.text(tree, "$")
    if kind == "tensor" or kind == "sparse":
        return tensors.decode(tree, stored, made)
    if kind == "ndarray" or kind == "numpy":
        return _decode_array(tree, stored, made)
    if kind == "bytes" and "tensor" in tree:
        return tensors.decode(tensors.table(tree, "tensor"), stored, made).numpy().tobytes()
    if kind in _SIMPLE:
        return _SIMPLE[kind](tensors.text(tree, "v"))
    if kind in _PAIRS:
        pairs = []
        for pair in tensors.items(tree, "v"):
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"a {kind} holds something other than keys with a value each")
            key, value = (_decode(one, stored, made, depth + 1) for one in pair)
            pairs.append((made.check_key(key), value))
        return _PAIRS[kind](pairs, tree)
    if kind in _ITEMS:
        items = [_decode(item, stored, made, depth + 1) for item in tensors.items(tree, "v")]
        if kind in ("set", "frozenset"):
            items = [made.check_key(item) for item in items]
        return _ITEMS[kind](items, tree)
    raise ValueError(f"a kind {str(kind)[:40]!r} does not exist")


_SIMPLE: dict[str, Callable[[str], object]] = {
    "int": lambda v: int(v, 16),
    "float": lambda v: struct.unpack(">d", bytes.fromhex(v))[0],
    "complex": lambda v: complex(*struct.unpack(">dd", bytes.fromhex(v))),
    "str": lambda v: bytes.fromhex(v).decode("utf-8", "surrogatepass"),
    "bytes": lambda v: base64.b64decode(v, validate=True),
    "torch.dtype": tensors.dtype_named,
    "elsewhere": Elsewhere,
    "torch.device": torch.device,
}

_PAIRS: dict[str, Callable[[list[tuple[Any, Any]], Mapping[str, Json]], object]] = {
    "dict": lambda pairs, tree: dict(pairs),
    "OrderedDict": lambda pairs, tree: OrderedDict(pairs),
    "Counter": lambda pairs, tree: Counter(dict(pairs)),
    "defaultdict": lambda pairs, tree: defaultdict(_FACTORIES[tensors.text(tree, "factory")], pairs),
}

_ITEMS: dict[str, Callable[[list[Any], Mapping[str, Json]], object]] = {
    "tuple": lambda items, tree: tuple(items),
    "set": lambda items, tree: set(items),
    "frozenset": lambda items, tree: frozenset(items),
    "deque": lambda items, tree: deque(items, _maxlen(tree)),
    "range": lambda items, tree: range(*items),
    "slice": lambda items, tree: slice(*items),
    "torch.Size": lambda items, tree: torch.Size(items),
}


def _maxlen(tree: Mapping[str, Json]) -> int | None:
    return None if tree["maxlen"] is None else tensors.sizes({"maxlen": [tree["maxlen"]]}, "maxlen")[0]


_TORCH_HAS = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}  # the others: as bytes


def _encode_array(value: np.ndarray[Any, Any] | np.generic, path: str, found: Found) -> Json:
    """A numpy array or scalar; one that holds Python objects is refused."""
    if type(value) not in (np.ndarray, np.memmap) and not isinstance(value, np.generic):
        raise refusal(path, f"a numpy.{type(value).__name__}", "store numpy.asarray() of it")
    if value.dtype.hasobject:
        raise refusal(path, "a numpy value of dtype object", "store a list, or give it a numeric dtype")
    descr = _lists(np.lib.format.dtype_to_descr(value.dtype))
    if isinstance(value, np.generic):
        return {"$": "numpy", "dtype": descr, "v": value.tobytes().hex()}
    array = np.asarray(value)
    if array.dtype.isnative and array.dtype.itemsize in _TORCH_HAS.get(array.dtype.kind, ()):
        contiguous = np.ascontiguousarray(array).reshape(array.shape)  # it makes a 0-d array 1-d
        if not contiguous.flags.writeable:
            contiguous = contiguous.copy()  # torch warns about memory that it must not write to
        return {"$": "ndarray", "tensor": tensors.encode(torch.from_numpy(contiguous), path, found)}
    raw = (
        torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        if array.nbytes
        else torch.empty(0, dtype=torch.float32, device="cpu").byte()
    )
    body = {"dtype": descr, "shape": list(array.shape), "tensor": tensors.encode(raw, path, found)}
    return {"$": "ndarray", **body}


def _decode_array(tree: Mapping[str, Json], stored: Mapping[str, Tensor], made: Made) -> object:
    """The array or scalar that `tree` describes."""
    if tree["$"] == "numpy":
        dtype = _plain_dtype(tree["dtype"])
        if dtype.itemsize == 0:
            return np.zeros(1, dtype=dtype)[0]
        raw = bytes.fromhex(tensors.text(tree, "v"))
        if len(raw) != dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes for a numpy scalar of {dtype.itemsize}")
        return np.frombuffer(bytearray(raw), dtype=dtype)[0]
    array = tensors.decode(tensors.table(tree, "tensor"), stored, made).numpy()
    if "dtype" not in tree:
        return array
    dtype, shape = _plain_dtype(tree["dtype"]), tensors.sizes(tree, "shape")
    if dtype.itemsize == 0:
        if array.size or math.prod(shape) > 1_000_000:
            raise ValueError(f"shape {shape} for values without bytes")
        return np.zeros(shape, dtype=dtype)
    return np.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(shape)


def _plain_dtype(descr: Json) -> np.dtype[Any]:
    dtype = np.lib.format.descr_to_dtype(cast(Any, _tuples(descr)))  # its annotation leaves out what it can do
    if dtype.hasobject:
        raise ValueError("a numpy dtype of Python objects")
    return dtype


def _lists(descr: Json) -> Json:
    return [_lists(item) for item in descr] if isinstance(descr, list | tuple) else descr


def _tuples(descr: Json) -> object:
    """numpy distinguishes a list of fields from a field by list and tuple, which JSON does not."""
    if isinstance(descr, str):
        return descr
    fields = [field for field in descr if isinstance(field, list)] if isinstance(descr, list) else []
    if isinstance(descr, list) and fields and len(fields) == len(descr):
        return [_field(field) for field in fields]
    if isinstance(descr, list) and len(descr) == 2:  # a sub-array: (dtype, shape)
        return (_tuples(descr[0]), tuple(tensors.sizes({"shape": descr[1]}, "shape")))
    raise ValueError(f"a numpy dtype {str(descr)[:80]}")


def _field(field: list[Json]) -> tuple[object, ...]:
    name, kind, *shapes = field
    sizes = (tuple(tensors.sizes({"shape": shape}, "shape")) for shape in shapes)
    return (tuple(name) if isinstance(name, list) else name, _tuples(kind), *sizes)
