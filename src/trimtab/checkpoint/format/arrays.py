"""numpy arrays and scalars as they are stored: values as tensors or bytes, never as pickled objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.checkpoint.format import tensors
from trimtab.checkpoint.format.tensors import Json, Made, Shelf, refusal

_TORCH_HAS = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}  # the others: as bytes


def encode(value: np.ndarray[Any, Any] | np.generic, path: str, shelf: Shelf) -> Json:
    """A numpy array or scalar; one that holds Python objects is refused."""
    if type(value) not in (np.ndarray, np.memmap) and not isinstance(value, np.generic):
        raise refusal(path, f"a numpy.{type(value).__name__}", "store numpy.asarray() of it")
    if value.dtype.hasobject:
        raise refusal(path, "a numpy value of dtype object", "store a list, or give it a numeric dtype")
    descr = _listed(np.lib.format.dtype_to_descr(value.dtype))
    if isinstance(value, np.generic):
        return {"$": "numpy", "dtype": descr, "v": value.tobytes().hex()}
    array = np.asarray(value)
    if array.dtype.isnative and array.dtype.itemsize in _TORCH_HAS.get(array.dtype.kind, ()):
        contiguous = np.ascontiguousarray(array).reshape(array.shape)  # it makes a 0-d array 1-d
        if not contiguous.flags.writeable:
            contiguous = contiguous.copy()  # torch warns about memory that it must not write to
        return {"$": "ndarray", "tensor": tensors.encode(torch.from_numpy(contiguous), path, shelf)}
    raw = (
        torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        if array.nbytes
        else torch.empty(0, dtype=torch.float32, device="cpu").byte()
    )
    body = {"dtype": descr, "shape": list(array.shape), "tensor": tensors.encode(raw, path, shelf)}
    return {"$": "ndarray", **body}


def decode(tree: dict[str, Json], stored: Mapping[str, Tensor], made: Made) -> Any:
    """The array or scalar that `tree` describes."""
    if tree["$"] == "numpy":
        dtype = _plain_dtype(tree["dtype"])
        if dtype.itemsize == 0:
            return np.zeros(1, dtype=dtype)[0]
        raw = bytes.fromhex(tree["v"])
        if len(raw) != dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes for a numpy scalar of {dtype.itemsize}")
        return np.frombuffer(bytearray(raw), dtype=dtype)[0]
    array = tensors.decode(tree["tensor"], stored, made).numpy()
    if "dtype" not in tree:
        return array
    dtype = _plain_dtype(tree["dtype"])
    if dtype.itemsize == 0:
        if array.size or np.prod(tree["shape"], dtype=object) > 1_000_000:
            raise ValueError(f"shape {tree['shape']} for values without bytes")
        return np.zeros(tree["shape"], dtype=dtype)
    return np.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(tree["shape"])


def _plain_dtype(descr: Json) -> np.dtype[Any]:
    dtype = np.lib.format.descr_to_dtype(_tupled(descr))
    if dtype.hasobject:
        raise ValueError("a numpy dtype of Python objects")
    return dtype


def _listed(descr: Any) -> Json:
    return [_listed(item) for item in descr] if isinstance(descr, (list, tuple)) else descr


def _tupled(descr: Json) -> Any:
    """numpy tells a list of fields from a field by list and tuple, which JSON does not."""
    if isinstance(descr, str):
        return descr
    if descr and all(isinstance(field, list) for field in descr):
        return [_field(field) for field in descr]
    if len(descr) == 2:  # a sub-array: (dtype, shape)
        return (_tupled(descr[0]), tuple(descr[1]))
    raise ValueError(f"a numpy dtype {str(descr)[:80]}")


def _field(field: list[Json]) -> tuple[Any, ...]:
    name, kind, *shape = field
    return (tuple(name) if isinstance(name, list) else name, _tupled(kind), *(tuple(s) for s in shape))
