"""Tensors as they are stored: contiguous, in a dtype the file format has, and memory that is shared only once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from trimtab.core.errors import CheckpointError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""What JSON can say; read from a file, a sequence is a list and a mapping a dict."""

SAFE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
}
"""What safetensors calls the dtypes that every version of it knows; the others are stored as bytes of these."""

_CARRIERS = {torch.complex128: torch.float64, torch.complex32: torch.float16}
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_ALIGNMENT = 16  # of the widest dtype
_FREE_BYTES = 64 << 20
_MAX_ALIKE = 50


Found: TypeAlias = list[tuple[str, Tensor, dict[str, Json]]]
"""The tensors found on a walk: path, the tensor, and its place in the tree, which is filled when all are known."""


@dataclass(frozen=True, slots=True)
class _View:
    """One way of looking at a storage, and every place in the tree that looks at it so."""

    tensor: Tensor
    path: str
    slots: list[dict[str, Json]]
    start: int
    end: int


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """torch.float32 for `float32`; KeyError for anything that is no dtype."""
    return _DTYPES[name]


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one row; a single value may have any stride and still be contiguous, but not here."""
    return tensor.as_strided((tensor.numel(),), (1,))


def encode(value: Tensor, path: str, found: Found) -> Json:
    """Add a tensor to those found and return its place in the tree; a sparse one is added in parts."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise refusal(path, f"a {type(value).__name__}", "only plain tensors are stored; give its local, dense value")
    if value.is_quantized:
        raise refusal(path, "a quantized tensor", "store int_repr(), scale and zero point")
    if value.is_meta:
        raise refusal(path, "a tensor without values (device meta)", "materialise the module first")
    tensor = value.detach()
    if tensor.layout is torch.strided:
        slot: dict[str, Json] = {"$": "tensor"}
        found.append((path, tensor.resolve_conj().resolve_neg(), slot))
        return slot
    parts = _sparse_parts(tensor, path)
    layout = str(tensor.layout).removeprefix("torch.")
    body = {name: encode(part, f"{path}.{name}", found) for name, part in parts.items()}
    flag = {"coalesced": tensor.is_coalesced()} if tensor.layout is torch.sparse_coo else {}
    return {"$": "sparse", "layout": layout, "shape": list(tensor.shape), **flag, **body}


def _sparse_parts(tensor: Tensor, path: str) -> dict[str, Tensor]:
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {"crow": tensor.ccol_indices(), "col": tensor.row_indices(), "values": tensor.values()}
    raise refusal(path, f"a tensor of layout {tensor.layout}", "store a dense or sparse copy")


def place(found: Found, prefix: str = "") -> dict[str, Tensor]:
    """Decide what is stored under which key, and fill the places in the tree; `prefix` is left out of the keys."""
    stored: dict[str, Tensor] = {}
    looks: list[Tensor] = []
    for group in _by_storage(found):
        looks += [view.tensor for view in group]
        for views in _overlapping(group):
            key = _free_key(views[0].path.removeprefix(prefix), stored)
            if len(views) == 1:
                stored[key] = _store_one(views[0], key)
            else:
                stored[key] = _store_shared(views, key)
    claimed = sum(map(size_of, looks))
    if claimed > (limit := claimable(stored)):  # reading it back would be refused: better now than then
        most = max(looks, key=size_of)
        raise CheckpointError(
            f"tensors of {prefix or 'the state'} overlap so much that they claim {claimed} bytes, more than {limit}; "
            f"the largest has shape {tuple(most.shape)} and strides {most.stride()}: store it before it is expanded"
        )
    return stored


def size_of(tensor: Tensor) -> int:
    """The bytes that the values of a tensor would take, if each had its own."""
    return tensor.numel() * tensor.element_size()


def claimable(stored: Mapping[str, Tensor]) -> int:
    """How many bytes all views of what is stored may claim together: many may look at the same few bytes."""
    return 4 * sum(map(size_of, stored.values())) + _FREE_BYTES


def identity(tensor: Tensor) -> Hashable:
    """What two tensors have in common that are the same values in the same memory; others have nothing in common."""
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _by_storage(found: Found) -> list[list[_View]]:
    groups: dict[Hashable, dict[Hashable, _View]] = {}
    for number, (path, tensor, slot) in enumerate(found):
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        if tensor.numel():
            end = start + (1 + sum((n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * size
            where: Hashable = (tensor.device, tensor.untyped_storage().data_ptr())
        else:
            end, where = start, number  # empty: it shares nothing with anybody
        looks = (tensor.dtype, start, tensor.shape, tensor.stride())
        view = groups.setdefault(where, {}).setdefault(looks, _View(tensor, path, [], start, end))
        view.slots.append(slot)
    return [list(views.values()) for views in groups.values()]


def _overlapping(views: list[_View]) -> list[list[_View]]:
    """Views of one storage, in sets that have no byte in common."""
    sets: list[list[_View]] = []
    reach = -1
    for view in sorted(views, key=lambda view: (view.start, -view.end)):
        if sets and view.start < reach:
            sets[-1].append(view)
        else:
            sets.append([view])
        reach = max(reach, view.end)
    return sets


def _free_key(path: str, stored: dict[str, Tensor]) -> str:
    key = path if path and path != "__metadata__" else f"{path}~"  # that name means something else to safetensors
    number = 2
    while key in stored:  # {"a": {"b": t}, "a.b": t} has one path for two tensors
        key, number = f"{path}~{number}", number + 1
    return key


def _store_one(view: _View, key: str) -> Tensor:
    tensor = view.tensor
    entry: dict[str, Json] = {"key": key}
    if _dense_but_permuted(tensor.shape, tensor.stride()):
        entry["stride"] = list(tensor.stride())  # channels_last stays so
    if tensor.dtype not in SAFE_NAMES:
        entry |= {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
    for slot in view.slots:
        slot.update(entry)
    return _storable(tensor.contiguous())


def _storable(tensor: Tensor) -> Tensor:
    if tensor.dtype in SAFE_NAMES:
        return tensor
    return flat(tensor).view(_CARRIERS.get(tensor.dtype, torch.uint8))


def _store_shared(views: list[_View], key: str) -> Tensor:
    """One tensor that holds the memory of all `views`: the first one if it covers the rest, else a flat piece."""
    first = views[0].tensor
    dtype = first.dtype if len({view.tensor.dtype for view in views}) == 1 else torch.uint8
    start, end = views[0].start, max(view.end for view in views)
    if dtype is first.dtype and views[0].end == end and first.is_contiguous():
        base = first
    else:
        start -= start % _ALIGNMENT
        size = dtype.itemsize
        base = torch.empty(0, dtype=dtype, device=first.device)
        base = base.set_(first.untyped_storage(), start // size, ((end - start) // size,), (1,))
    for view in views:
        size = view.tensor.element_size()
        entry: dict[str, Json] = {"key": key, "offset": (view.start - start) // size, "shape": list(view.tensor.shape)}
        entry |= {"dtype": dtype_name(view.tensor.dtype), "stride": list(view.tensor.stride())}
        for slot in view.slots:
            slot.update(entry)
    return _storable(base)


class Made:
    """What was built so far of a description, and what it may still ask for.

    A few bytes can be looked at in any number of ways, by strides of 0 for example: whoever walks through the state
    would read each of them. Keys of a dict can be chosen so that it has to compare each with all others.
    """

    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._bytes = claimable(stored)
        self._hashes: dict[int, int] = {}

    def claim(self, num_bytes: int) -> None:
        """Count the bytes that one more view says it has."""
        self._bytes -= num_bytes
        if self._bytes < 0:
            raise ValueError("its tensors claim far more values than are stored")

    def check_key(self, key: Hashable) -> Hashable:
        """The key of a dict or item of a set, if it is not one of many that look alike to it."""
        note_alike(key, self._hashes)
        return key


def note_alike(key: object, hashes: dict[int, int]) -> None:
    """Count keys by their hash; ValueError for too many of one. Texts and small numbers cannot be made to be alike."""
    if isinstance(key, str | bytes | float | None) or (isinstance(key, int) and abs(key) < 2**60):
        return
    number = hash(key)
    hashes[number] = hashes.get(number, 0) + 1
    if hashes[number] > _MAX_ALIKE:
        raise ValueError(f"more than {_MAX_ALIKE} keys were chosen so that a dict is slow to distinguish them")


def text(tree: Mapping[str, Json], name: str) -> str:
    """A text in a description; TypeError where there is something else."""
    value = tree[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a text")
    return value


def table(tree: Mapping[str, Json], name: str) -> Mapping[str, Json]:
    """A description within a description."""
    value = tree[name]
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}; expected an object")
    return value


def items(tree: Mapping[str, Json], name: str) -> list[Json]:
    """A list in a description."""
    value = tree[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a list")
    return value


def sizes(tree: Mapping[str, Json], name: str) -> list[int]:
    """A shape or strides: whole numbers that torch can count with."""
    found = [n for n in items(tree, name) if type(n) is int and 0 <= n < 2**62]
    if len(found) != len(items(tree, name)):
        raise ValueError(f"{name} is {tree[name]}; expected whole numbers from 0 on")
    return found


def decode(tree: Mapping[str, Json], stored: Mapping[str, Tensor], made: Made) -> Tensor:
    """The tensor that `tree` describes; equal descriptions give the same object."""
    if tree["$"] == "sparse":
        return _decode_sparse(tree, stored, made)
    name = repr(tree)
    if name not in made.tensors:
        base = stored[text(tree, "key")]
        found = _decode_view(tree, base) if "offset" in tree else _decode_one(tree, base)
        made.claim(size_of(found))
        made.tensors[name] = found
    return made.tensors[name]


def _decode_one(tree: Mapping[str, Json], tensor: Tensor) -> Tensor:
    if "dtype" in tree:
        tensor = flat(tensor).view(dtype_named(text(tree, "dtype"))).reshape(sizes(tree, "shape"))
    if "stride" in tree:
        stride = sizes(tree, "stride")
        if not _dense_but_permuted(tensor.shape, stride):  # anything else could ask for any amount of memory
            raise ValueError(f"strides {stride} do not belong to shape {list(tensor.shape)}")
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return tensor


def _decode_view(tree: Mapping[str, Json], base: Tensor) -> Tensor:
    dtype, shape, stride = dtype_named(text(tree, "dtype")), sizes(tree, "shape"), sizes(tree, "stride")
    (offset,) = sizes({"offset": [tree["offset"]]}, "offset")
    row = flat(base)
    if row.dtype is not dtype:
        whole = row.nbytes // dtype.itemsize * dtype.itemsize // row.element_size()
        row = row[:whole].view(dtype)
    if len(shape) != len(stride) or len(shape) > 64:
        raise ValueError(f"shape {shape}, strides {stride} and offset {offset} do not go together")
    if all(shape) and offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) >= len(row):
        raise ValueError(f"shape {shape} with strides {stride} at {offset} is outside of {len(row)} values")
    return row.as_strided(shape, stride, row.storage_offset() + offset)


def _decode_sparse(tree: Mapping[str, Json], stored: Mapping[str, Tensor], made: Made) -> Tensor:
    names = [name for name in ("indices", "crow", "col", "values") if name in tree]
    parts, shape = {name: decode(table(tree, name), stored, made) for name in names}, sizes(tree, "shape")
    if tree["layout"] == "sparse_coo":
        indices, values = parts["indices"], parts["values"]
        # Invariants are checked: indices out of range would make later operations read foreign memory.
        coalesced = bool(tree["coalesced"])
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
    layouts = {"sparse_csr": torch.sparse_csr, "sparse_bsr": torch.sparse_bsr}
    layouts |= {"sparse_csc": torch.sparse_csc, "sparse_bsc": torch.sparse_bsc}
    return torch.sparse_compressed_tensor(
        parts["crow"],
        parts["col"],
        parts["values"],
        shape,
        layout=layouts[text(tree, "layout")],
        check_invariants=True,
    )


def _dense_but_permuted(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides are those of a contiguous tensor whose dimensions were put into another order."""
    if len(shape) != len(stride) or not all(n > 0 for n in shape):
        return False
    expected, outer = 1, len(shape)
    permuted = False
    for step, n, dim in sorted((s, n, -i) for i, (n, s) in enumerate(zip(shape, stride, strict=True)) if n > 1):
        if step != expected:
            return False
        permuted = permuted or -dim > outer  # contiguous: the smaller the stride, the later the dimension
        expected, outer = expected * n, -dim
    return permuted


def refusal(path: str, what: str, remedy: str) -> CheckpointError:
    """The error that says what at `path` cannot be stored, and what to do instead."""
    return CheckpointError(f"{path or 'the state'} is {what}: it cannot be stored; {remedy}")
