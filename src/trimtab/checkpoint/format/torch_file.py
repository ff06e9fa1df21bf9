"""Reads what `torch.save` wrote: the archive, and the pickle in it, within bounds of time and memory.

`torch.load(weights_only=True)` runs no code of a file, but lets it ask for any amount of memory: compressed members
that inflate, byte arrays and tensors made from a number, strides of 0, containers that hold each other. Here only
tensors and plain data are built, everything that costs memory is counted before it is made, and tensors are mapped from
the file.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage

from trimtab.checkpoint.format.tensors import note_alike
from trimtab.core.errors import CheckpointError
from trimtab.core.files import is_hollow, open_regular

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
MEMORY = 64_000_000
"""Bytes that plain data of a file may take, beside its tensors."""
MAX_DEPTH = 100
_FREE_OPS = 700_000
_FREE_CLAIM = 64 << 20
_FREE_DIRECTORY = 2_000_000  # bytes: about 25,000 members
_ROW = struct.Struct("<8xHH8xIIHHH8xI")
_MAX_NAME = 300
_PER_TENSOR = 1_000
_END = object()
_Bytes: Any = UntypedStorage  # torch's annotations say less than it does


class Refused(Exception):
    """Why a file is not read; said without its path."""


class TooMuch(Refused):
    """It asks for more work or memory than its size accounts for."""


class Foreign(Refused):
    """What it holds is neither a tensor nor plain data: to build it would be to run code."""


@dataclass(slots=True)
class Budget:
    """What a file of `size` bytes may cost: work and memory that its size does not account for are bounded."""

    size: int
    memory: int = MEMORY
    steps: int = field(init=False)
    claimed: int = field(init=False)
    hashes: dict[int, int] = field(default_factory=dict)
    """How many keys have the same hash, of those that can be chosen to."""
    looks: set[tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    """The ways in which tensors look at storages."""
    unchecked: list[Tensor] = field(default_factory=list)
    """Sparse tensors, whose indices may not have been read yet."""

    def __post_init__(self) -> None:
        self.steps = _FREE_OPS + self.size // 100
        self.claimed = 4 * self.size + _FREE_CLAIM

    def spend(self, num_bytes: int) -> None:
        """Count memory before it is taken."""
        self.memory -= num_bytes
        if self.memory < 0:
            raise TooMuch(f"it describes more than {MEMORY} bytes of plain data, beside its tensors")

    def claim(self, num_bytes: int) -> None:
        """Count what tensors say they hold: many may look at the same few bytes."""
        self.claimed -= num_bytes
        if self.claimed < 0:
            raise TooMuch(f"its tensors claim far more values than its {self.size} bytes hold")


class Record(NamedTuple):
    """Where a member of an archive is, and how large."""

    header: int
    size: int
    stored: bool


@dataclass(slots=True)
class Storage:
    """The bytes that tensors look at; `untyped` shares them with the file where that is possible."""

    untyped: UntypedStorage
    dtype: torch.dtype | None
    num_bytes: int


class Global(NamedTuple):
    """The name of something that a pickle refers to."""

    name: str


_Held = TypeVar("_Held", bound=Sized)
StorageOf = Callable[[tuple[object, ...]], Storage]


def read_torch_file(path: Path) -> object:
    """Tensors and plain data of a file that `torch.save` wrote; raises `Refused` with the reason otherwise."""
    with open_regular(path) as file:
        info = os.fstat(file.fileno())
        size = info.st_size
        if size == 0:
            raise Refused("it is empty")
        if is_hollow(info):
            raise Refused(
                f"only about {info.st_blocks * 512} of its {size} bytes were ever written: a download or copy that "
                "did not finish"
            )
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    budget = Budget(size)
    try:
        loaded = _Archive(path, data, budget).load() if data[:4] == b"PK\x03\x04" else _load_legacy(data, budget)
        for one in budget.unchecked:
            _check_sparse(one)
        check_extent(loaded, 10_000 + 4 * (Budget(size).steps - budget.steps))
        return loaded
    finally:
        data.close()


def check_extent(value: object, limit: int) -> None:
    """Refuse containers that hold each other so often, or so deeply, that a walk through them would not end."""
    stack: list[Iterator[object]] = [iter((value,))]
    for _ in range(limit):
        one = next(stack[-1], _END)
        if one is _END:
            stack.pop()
            if not stack:
                return
        elif isinstance(one, Mapping):
            stack.append(chain(one.keys(), one.values()))
        elif isinstance(one, list | tuple | set | frozenset):
            stack.append(iter(one))
        if len(stack) > MAX_DEPTH:
            raise Refused(f"it is nested more than {MAX_DEPTH} deep")
    raise TooMuch("its containers hold each other so often that nobody can walk through them")


# -- the archive -----------------------------------------------------------------------------------------------------


class _Archive:
    """A zip file as torch writes it: nothing compressed, one folder, `data.pkl` and a member for each storage."""

    def __init__(self, path: Path, data: mmap.mmap, budget: Budget) -> None:
        self._path, self._data, self._budget = path, data, budget
        self._records = dict(_directory(data, budget))
        pickles = [name for name in self._records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise Refused("it is a zip file, but none of torch.save's: there is no data.pkl in it")
        self._folder = pickles[0].removesuffix("data.pkl")
        if f"{self._folder}constants.pkl" in self._records:
            raise Foreign("it is a TorchScript archive, which is code")
        self._storages: dict[str, Storage] = {}
        self._whole: UntypedStorage | None = None
        self._mapped_bytes = 0
        self._swap = self._small("byteorder") == b"big"

    def load(self) -> object:
        start, size = self._place(f"{self._folder}data.pkl")
        value, _ = _Pickle(self._data, start, start + size, self._budget, self._storage).load()
        return value

    def _small(self, name: str) -> bytes:
        if f"{self._folder}{name}" not in self._records:
            return b""
        start, size = self._place(f"{self._folder}{name}")
        return self._data[start : start + min(size, 100)]

    def _place(self, name: str) -> tuple[int, int]:
        """Where the bytes of a member begin, and how many they are."""
        record = self._records.get(name)
        if record is None:
            raise Refused(f"its member {name[:80]!r} is missing")
        if not record.stored:
            raise Refused(f"its member {name[:80]!r} is compressed, which torch.save never does: unpack it first")
        head = self._data[record.header : record.header + 30]
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise Refused(f"its member {name[:80]!r} is not where its directory says")
        start = record.header + 30 + sum(struct.unpack("<HH", head[26:30]))
        if start + record.size > self._budget.size:
            raise Refused(f"its member {name[:80]!r} is cut off")
        return start, record.size

    def _storage(self, description: tuple[object, ...]) -> Storage:
        dtype, item, key, count = _described(description, 5)
        if key not in self._storages:
            self._storages[key] = self._mapped(key, dtype, item, count)
        found = self._storages[key]
        if not 0 <= count * item <= found.num_bytes:
            raise Refused(f"storage {key[:80]!r} has {found.num_bytes} bytes; {count * item} were claimed")
        return found

    def _mapped(self, key: str, dtype: torch.dtype | None, item: int, count: int) -> Storage:
        start, size = self._place(f"{self._folder}data/{key}")
        if not 0 <= count * item <= size:
            raise Refused(f"storage {key[:80]!r} has {size} bytes; {count * item} were claimed")
        self._budget.spend(_PER_TENSOR)
        self._mapped_bytes += count * item
        if self._mapped_bytes > self._budget.size:
            raise TooMuch(f"its storages claim more than its {self._budget.size} bytes")
        if count == 0:
            return Storage(_Bytes(0), dtype, 0)
        if self._whole is None:
            self._whole = _Bytes.from_file(os.fspath(self._path), False, self._budget.size)
        part = self._whole[start : start + count * item]
        if start % 16 or self._swap:
            part = part.clone()
        if self._swap and dtype is not None:
            part.byteswap(dtype)
        elif self._swap:
            raise Refused("it was written on a machine of another byte order: load and save it there")
        return Storage(part, dtype, count * item)


def _directory(data: mmap.mmap, budget: Budget) -> Iterator[tuple[str, Record]]:
    """The members of a zip file by their names, each once."""
    start, size = _central(data, budget.size)
    if size > (limit := _FREE_DIRECTORY + budget.size // 10):
        raise TooMuch(f"its directory has {size} bytes, more than the {limit} of a file of its size")
    rows, at, seen = data[start : start + size], 0, set[str]()
    while at < size:
        if rows[at : at + 4] != b"PK\x01\x02" or at + 46 > size:
            raise Refused("its directory is damaged")
        flags, method, packed, full, names, extras, notes, header = _ROW.unpack_from(rows, at)
        at += 46
        name = rows[at : at + names].decode("utf-8", "replace")
        if 0xFFFFFFFF in (full, packed, header):
            full, packed, header = _wide(rows[at + names : at + names + extras], full, packed, header)
        if name in seen:
            raise Refused(f"its member {name[:80]!r} is in it twice")
        seen.add(name)
        yield name, Record(header, full, method == 0 and packed == full and not flags & 1)
        at += names + extras + notes


def _central(data: mmap.mmap, size: int) -> tuple[int, int]:
    """Where the directory of a zip file is, and how many bytes it has."""
    at = data.rfind(b"PK\x05\x06", max(size - 65_557, 0))
    if at < 0 or at + 22 > size:
        raise Refused("it is cut off: the directory at its end is missing")
    length, start = struct.unpack("<II", data[at + 12 : at + 20])
    wide = data[max(at - 20, 0) : at]
    if wide[:4] == b"PK\x06\x07":
        at = struct.unpack("<Q", wide[8:16])[0]
        head = data[at : at + 56]
        if len(head) < 56 or head[:4] != b"PK\x06\x06":
            raise Refused("the directory at its end is damaged")
        length, start = struct.unpack("<QQ", head[40:56])
    if start + length > size:
        raise Refused("the directory at its end is damaged")
    return start, length


def _wide(extra: bytes, full: int, packed: int, header: int) -> tuple[int, int, int]:
    """Sizes and places beyond 4 GB are in a field of their own."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack("<HH", extra[at : at + 4])
        if tag == 1:
            numbers = iter(struct.unpack(f"<{length // 8}Q", extra[at + 4 : at + 4 + length // 8 * 8]))
            full = next(numbers, full) if full == 0xFFFFFFFF else full
            packed = next(numbers, packed) if packed == 0xFFFFFFFF else packed
            header = next(numbers, header) if header == 0xFFFFFFFF else header
            break
        at += 4 + length
    return full, packed, header


# -- before torch 1.6 --------------------------------------------------------------------------------------------------


def _load_legacy(data: mmap.mmap, budget: Budget) -> object:
    """Five pickles, then the bytes of each storage behind its length."""
    at, end = 0, budget.size
    for expected in (MAGIC, PROTOCOL, None):
        value, at = _Pickle(data, at, end, budget, _no_storage).load()
        if expected is not None and value != expected:
            raise Refused("it does not begin as a file of torch.save does")
    storages: dict[str, Storage] = {}
    claimed = [0]

    def storage(description: tuple[object, ...]) -> Storage:
        dtype, item, key, count = _described(description, 6)
        if key not in storages:
            claimed[0] += count * item
            if claimed[0] > budget.size:
                raise TooMuch(f"its storages claim more than its {budget.size} bytes")
            budget.spend(_PER_TENSOR)
            storages[key] = Storage(_Bytes(count * item), dtype, count * item)
        found, view = storages[key], description[5]
        if view is None:
            return found
        name, offset, length = view if isinstance(view, tuple) and len(view) == 3 else (None, None, None)
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0 or not isinstance(name, str):
            raise Refused(f"a view of storage {key[:80]!r} makes no sense")
        if (offset + length) * item > found.num_bytes:
            raise Refused(f"a view of storage {key[:80]!r} reaches beyond it")
        if name not in storages:
            budget.spend(_PER_TENSOR)
            part = found.untyped[offset * item : (offset + length) * item]
            storages[name] = Storage(part, dtype, length * item)
        return storages[name]

    value, at = _Pickle(data, at, end, budget, storage).load()
    keys, at = _Pickle(data, at, end, budget, _no_storage).load()
    for key in keys if isinstance(keys, list) else ():
        one = storages.get(key) if isinstance(key, str) else None
        item = 1 if one is None or one.dtype is None else one.dtype.itemsize
        if one is None or data[at : at + 8] != (one.num_bytes // item).to_bytes(8, "little"):
            raise Refused("the storages at its end are not those that it describes")
        at += 8
        if at + one.num_bytes > end:
            raise Refused("it is cut off")
        if one.num_bytes:
            with memoryview(data) as view:
                raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(one.untyped)
                raw.copy_(_borrowed(view, at, one.num_bytes))
        at += one.num_bytes
    if not isinstance(keys, list) or not set(storages) >= set(keys):
        raise Refused("the storages at its end are not those that it describes")
    return value


def _borrowed(view: memoryview, start: int, length: int) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.frombuffer(view, np.uint8, length, start).copy())


def _no_storage(description: tuple[object, ...]) -> Storage:
    raise Refused("it has a storage where torch.save puts none")


# -- the pickle ------------------------------------------------------------------------------------------------------


class _Pickle:
    """Runs the few instructions of pickle that `torch.save` uses; what they may build is in `_BUILDERS`."""

    def __init__(self, data: mmap.mmap, start: int, end: int, budget: Budget, storage: StorageOf) -> None:
        self._data, self._at, self._end = data, start, end
        self._budget, self._storage = budget, storage

    def load(self) -> tuple[object, int]:
        """What it builds, and where it ends."""
        stack: list[object] = []
        marks: list[list[object]] = []
        memo: dict[int, object] = {}
        data, at, end, budget, spent = self._data, self._at, self._end, self._budget, 0
        try:
            for number in range(budget.steps + 1):
                if not number & 0xFF:
                    budget.spend(spent)
                    spent = 0
                if at >= end:
                    raise Refused("its description is cut off")
                code = data[at]
                at += 1
                if code in _PLAIN:  # the many that need nothing but the bytes behind them
                    kind, length, cost = _PLAIN[code]
                    raw, at, spent = data[at : at + length], at + length, spent + cost
                    if kind == _PUT:
                        memo[int.from_bytes(raw, "little")] = stack[-1]
                    elif kind == _GET:
                        stack.append(memo[int.from_bytes(raw, "little")])
                    elif kind == _MADE:
                        stack.append(_EMPTY[code]())
                    elif kind == _MARK:
                        marks.append(stack)
                        stack = []
                    elif kind is not None:
                        stack.append(struct.unpack(kind, raw)[0])
                    continue
                self._at = at
                if code == 0x2E:  # STOP
                    budget.steps -= number + 1
                    return stack.pop(), at
                if code in _SIZED:
                    stack.append(self._sized(code))
                elif code in (0x74, 0x65, 0x75):  # TUPLE, APPENDS, SETITEMS
                    items, stack = stack, marks.pop()
                    self._gather(code, stack, items)
                else:
                    self._rare(code, stack)
                at = self._at
            raise TooMuch("its description has far more parts than a checkpoint of its size")
        except (IndexError, KeyError, struct.error) as error:
            raise Refused(f"its description makes no sense ({type(error).__name__} at byte {at})") from error

    def _rare(self, code: int, stack: list[object]) -> None:
        """Instructions that come a few times per tensor."""
        if code in (0x61, 0x73):  # APPEND, SETITEM
            items = [stack.pop() for _ in range(1 if code == 0x61 else 2)][::-1]
            self._gather(0x65 if code == 0x61 else 0x75, stack, items)
        elif 0x85 <= code <= 0x87:  # TUPLE1 to TUPLE3
            self._budget.spend(80)
            if len(stack) < code - 0x84:
                raise IndexError
            stack[-(code - 0x84) :] = [tuple(stack[-(code - 0x84) :])]
        elif code == 0x63:  # GLOBAL
            self._budget.spend(100)
            stack.append(_named(self._line(), self._line()))
        elif code == 0x51:  # BINPERSID
            description = stack.pop()
            if not isinstance(description, tuple) or not description or description[0] != "storage":
                raise Foreign("it refers to objects outside of the file")
            stack.append(self._storage(description))
        elif code in (0x52, 0x81):  # REDUCE, NEWOBJ
            args, made = stack.pop(), stack.pop()
            stack.append(_build(made, args, self._budget))
        elif code == 0x62:  # BUILD
            stack.pop()
            if type(stack[-1]) is not OrderedDict:  # its attributes: the versions of a module's state dict
                raise Foreign(f"it sets the attributes of a {type(stack[-1]).__name__}")
        else:
            raise Foreign(f"it uses instruction {code:#04x} of pickle")

    def _take(self, length: int) -> bytes:
        at = self._at
        if at + length > self._end:
            raise Refused("its description is cut off")
        self._at = at + length
        return self._data[at : self._at]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, min(self._at + _MAX_NAME, self._end))
        if end < 0:
            raise Refused("it refers to something without a name")
        line = self._take(end - self._at)
        self._at += 1
        return line.decode("utf-8", "replace")

    def _sized(self, code: int) -> str | int:
        """A text, or a whole number of any length, behind its size."""
        size = int.from_bytes(self._take(_SIZED[code]), "little")
        raw = self._take(size) if size < 1_000_000 else self._long(size)
        if code == 0x8A:  # LONG1
            self._budget.spend(60 + size)
            return int.from_bytes(raw, "little", signed=True)
        self._budget.spend(60 + (size if raw.isascii() else 4 * size))
        return raw.decode("utf-8", "surrogatepass" if code == 0x58 else "replace")

    def _long(self, size: int) -> bytes:
        self._budget.spend(size)
        return self._take(size)

    def _gather(self, code: int, stack: list[object], items: list[object]) -> None:
        self._budget.spend(16 * len(items) + 50)
        if code == 0x74:
            stack.append(tuple(items))
            return
        target = stack[-1]
        if code == 0x65:
            if type(target) is not list:
                raise Foreign(f"it appends to a {type(target).__name__}")
            target.extend(items)
            return
        if not isinstance(target, dict) or type(target) not in (dict, OrderedDict, Counter):
            raise Foreign(f"it sets the items of a {type(target).__name__}")
        self._budget.spend(60 * len(items))
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key, self._budget)
            target[key] = value


def check_key(key: object, budget: Budget) -> None:
    """Refuse keys that no checkpoint has, and many that were chosen to look alike to a dict."""
    if not isinstance(key, str | bytes | int | float | complex | tuple | torch.dtype | torch.device | None):
        raise Foreign(f"a {type(key).__name__} is a key in it")
    if isinstance(key, tuple | complex) or (isinstance(key, int) and abs(key) >= 2**60):
        budget.spend(100)
    try:
        note_alike(key, budget.hashes)
    except (TypeError, ValueError) as error:
        raise TooMuch(str(error)) from error


def _named(module: str, name: str) -> object:
    """What a pickle may refer to: dtypes and the like themselves, functions and classes by their names only."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[(module, name)]
    module = IMPORT_MAPPING.get(module, module)
    full = f"{module}.{name}"
    if full in _VALUES:
        return _VALUES[full]
    if full in _BUILDERS or full in _NAMES or (module in ("torch", "torch.cuda") and name in _STORAGES):
        return Global(full)
    raise Foreign(f"{full!r} is neither a tensor nor plain data")


def _described(description: tuple[object, ...], length: int) -> tuple[torch.dtype | None, int, str, int]:
    """Of a storage: its dtype (None where it has none of its own), the bytes of one value, its key, and how many."""
    if len(description) == length:
        kind, key, count = description[1], description[2], description[4]
        if isinstance(key, str) and type(count) is int and count >= 0 and isinstance(kind, Global):
            if kind.name == "torch.storage.UntypedStorage":
                return None, 1, key, count
            dtype = _STORAGES.get(kind.name.rpartition(".")[2])
            if dtype is not None:
                return dtype, dtype.itemsize, key, count
    raise Refused("a storage is described in a way that torch.save does not use")


def _build(made: object, args: object, budget: Budget) -> object:
    if not isinstance(made, Global) or made.name not in _BUILDERS:
        raise Foreign(f"it calls {made.name if isinstance(made, Global) else type(made).__name__!r}")
    if not isinstance(args, tuple):
        raise Refused(f"it calls {made.name} without arguments")
    try:
        return _BUILDERS[made.name](budget, *args)
    except (Refused, CheckpointError):
        raise
    except Exception as error:
        raise Refused(f"what it gives to {made.name} makes no sense ({str(error)[:200]})") from error


class _View(NamedTuple):
    """Where a tensor is in its storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(
    budget: Budget,
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object = False,
    *_: object,
) -> Tensor:
    dtype = storage.dtype if isinstance(storage, Storage) else None
    return _tensor_v3(budget, storage, offset, size, stride, requires_grad, None, dtype)


def _tensor_v3(
    budget: Budget,
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    *_: object,
) -> Tensor:
    view = _checked(budget, storage, dtype, offset, size, stride)
    tensor = torch.empty(0, dtype=view.dtype, device="cpu")
    tensor.set_(view.storage.untyped, view.offset, view.size, view.stride)
    return tensor.requires_grad_() if requires_grad is True else tensor


def _checked(budget: Budget, storage: object, dtype: object, offset: object, size: object, stride: object) -> _View:
    """Refuse a tensor that reaches beyond its storage, or claims more than the whole file could be asked for."""
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise Refused("a tensor without a storage of a known type")
    if not isinstance(size, tuple | list) or not isinstance(stride, tuple | list) or type(offset) is not int:
        raise Refused("a tensor whose shape, strides and offset do not go together")
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or len(size) > 64 or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise Refused("a tensor whose shape, strides and offset do not go together")
    numel = math.prod(size)
    reach = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if numel else 0
    if reach * dtype.itemsize > storage.num_bytes:
        raise Refused(f"a tensor of shape {tuple(size)} reaches beyond the {storage.num_bytes} bytes it is made of")
    budget.spend(_PER_TENSOR)
    look = (id(storage), dtype, offset, tuple(size), tuple(stride))
    if look not in budget.looks:  # layers that share their weights are in a file once for each
        budget.looks.add(look)
        budget.claim(numel * dtype.itemsize)
    return _View(storage, dtype, offset, tuple(size), tuple(stride))


def _quantized(
    budget: Budget, storage: object, offset: object, size: object, stride: object, how: object, *_: object
) -> Tensor:
    dtype = storage.dtype if isinstance(storage, Storage) else None
    view = _checked(budget, storage, dtype, offset, size, stride)
    budget.spend(math.prod(view.size) * view.dtype.itemsize)
    typed_storage: Any = torch.storage.TypedStorage
    typed = typed_storage(wrap_storage=view.storage.untyped, dtype=view.dtype, _internal=True)
    rebuild: Any = torch._utils._rebuild_qtensor
    made: Tensor = rebuild(typed, view.offset, view.size, view.stride, how, False, OrderedDict())
    return made


def _sparse(budget: Budget, layout: torch.layout, parts: tuple[Any, ...]) -> Tensor:
    """Its indices are checked when all bytes are there: out of range, they would make others read foreign memory."""
    budget.spend(_PER_TENSOR)
    if layout is torch.sparse_coo:
        indices, values, size, *flag = parts
        coalesced = bool(flag[0]) if flag else None
        made = torch.sparse_coo_tensor(indices, values, tuple(size), is_coalesced=coalesced, check_invariants=False)
    else:
        first, second, values, size = parts
        made = torch.sparse_compressed_tensor(first, second, values, tuple(size), layout=layout, check_invariants=False)
    budget.unchecked.append(made)
    return made


def _check_sparse(tensor: Tensor) -> None:
    check: Any = torch._validate_sparse_compressed_tensor_args
    try:
        if tensor.layout is torch.sparse_coo:
            check = torch._validate_sparse_coo_tensor_args
            check(tensor._indices(), tensor._values(), tensor.size(), tensor.is_coalesced())
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            check(tensor.crow_indices(), tensor.col_indices(), tensor.values(), tensor.size(), tensor.layout)
        else:
            check(tensor.ccol_indices(), tensor.row_indices(), tensor.values(), tensor.size(), tensor.layout)
    except RuntimeError as error:
        raise Refused(f"a sparse tensor in it makes no sense ({str(error)[:200]})") from error


def _parameter(budget: Budget, data: object, requires_grad: object = True, *_: object) -> Tensor:
    if not isinstance(data, Tensor):
        raise Refused("a parameter without a tensor")
    budget.spend(_PER_TENSOR)
    return torch.nn.Parameter(data.detach(), requires_grad=requires_grad is True)


def _of_type(budget: Budget, function: object, kind: object, args: object, state: object) -> object:
    """A tensor with attributes of its own, which are left out."""
    if not isinstance(kind, Global) or kind.name not in _NAMES:
        raise Foreign("it holds a tensor of a class of its own")
    return _build(function, args, budget)


def _sized_arg(budget: Budget, value: _Held, kinds: tuple[type, ...]) -> _Held:
    """A container to copy: never a number, which would be a size."""
    if type(value) not in kinds:
        raise Refused(f"a container made of a {type(value).__name__}")
    budget.spend(100 * len(value) + 200)
    return value


def _set(budget: Budget, items: Sequence[object] = ()) -> set[object]:
    for item in _sized_arg(budget, items, (list, tuple)):
        check_key(item, budget)
    return set(items)


def _ordered(budget: Budget, pairs: Sequence[tuple[object, object]] = ()) -> OrderedDict[object, object]:
    made: OrderedDict[object, object] = OrderedDict()
    for key, value in _sized_arg(budget, pairs, (list, tuple)):
        check_key(key, budget)
        made[key] = value
    return made


def _counter(budget: Budget, counts: dict[object, int] | None = None) -> Counter[object]:
    return Counter(_sized_arg(budget, {} if counts is None else counts, (dict,)))  # its keys were checked when set


def _encode(budget: Budget, text: object, encoding: object = "latin1") -> bytes:
    """How pickle writes bytes for Python 2; other encodings could make them longer and longer."""
    if not isinstance(text, str) or encoding != "latin1":
        raise Foreign("it converts texts")
    budget.spend(len(text) + 60)
    return text.encode("latin1")


def _bytearray(budget: Budget, data: bytes | str = b"", encoding: object = None) -> bytearray:
    raw = _encode(budget, data, encoding) if isinstance(data, str) else _sized_arg(budget, data, (bytes,))
    return bytearray(raw)


def _layout(budget: Budget, name: str) -> object:
    layouts = {f"torch.{n}": getattr(torch, n) for n in ("strided", "sparse_coo", "sparse_csr", "sparse_csc")}
    layouts |= {f"torch.{n}": getattr(torch, n) for n in ("sparse_bsr", "sparse_bsc")}
    return layouts[name]


_PUT, _GET, _MADE, _MARK = "put", "get", "made", "mark"
_PLAIN: dict[int, tuple[str | None, int, int]] = {
    0x71: (_PUT, 1, 110),  # BINPUT
    0x72: (_PUT, 4, 110),
    0x68: (_GET, 1, 10),  # BINGET
    0x6A: (_GET, 4, 10),
    0x28: (_MARK, 0, 200),
    0x4E: (_MADE, 0, 10),  # None, True, False, ()
    0x88: (_MADE, 0, 10),
    0x89: (_MADE, 0, 10),
    0x29: (_MADE, 0, 10),
    0x5D: (_MADE, 0, 240),  # [], {}, set()
    0x7D: (_MADE, 0, 240),
    0x8F: (_MADE, 0, 240),
    0x4A: ("<i", 4, 50),  # BININT
    0x4B: ("<B", 1, 50),
    0x4D: ("<H", 2, 50),
    0x47: (">d", 8, 50),  # BINFLOAT
    0x80: (None, 1, 0),  # PROTO
}
"""Instructions by what they do, the bytes behind them, and the memory that their result takes."""
_EMPTY: dict[int, Callable[[], object]] = {0x5D: list, 0x7D: dict, 0x8F: set, 0x29: tuple}
_EMPTY |= {0x4E: lambda: None, 0x88: lambda: True, 0x89: lambda: False}
_SIZED = {0x58: 4, 0x55: 1, 0x8A: 1}  # BINUNICODE, SHORT_BINSTRING, LONG1

_STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "QUInt8Storage": torch.quint8,
    "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32,
}
_SCHEMES = ("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric")
_VALUES: dict[str, object] = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_VALUES |= {f"torch.{name}": getattr(torch, name) for name in (*_SCHEMES, "per_channel_affine_float_qparams")}
_NAMES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage")
_BUILDERS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.serialization._get_layout": _layout,
    "torch.Size": lambda budget, sizes=(): torch.Size(_sized_arg(budget, sizes, (list, tuple))),
    "torch.device": lambda budget, *description: torch.device(*description),
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.bytearray": _bytearray,
    "builtins.complex": lambda budget, *parts: complex(*(float(part) for part in parts)),
    "_codecs.encode": _encode,
}
