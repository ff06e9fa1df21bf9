"""Which samples of a batch cause a fault: by the rows of a bad result, else by trying the batch without some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.loader import plain_id
from trimtab.trace.values import tensors_in, where_bad

ID_NAMES = ("sample_ids", "sample_id", "ids", "id", "indices", "index", "idx")
"""Entries of a batch that are taken for the ids of its samples."""
MAX_TRIES = 16
"""How often a step is run again, at most, to find the samples."""
Rows = tuple[int, ...]


class BatchRows:
    """The tensors of a batch, and along which dimension of each its samples lie.

    Example:
        >>> rows = BatchRows({"x": torch.ones(4, 2), "y": torch.zeros(4)})
        >>> rows.size
        4
        >>> with rows.replaced((1, 2), by=0):
        ...     pass
    """

    def __init__(self, batch: object, lists: Sequence[list[Any]] | None = None) -> None:
        self._lists = list(sample_lists(batch) if lists is None else lists)
        inside = {id(t) for one in self._lists for t in tensors_in(one)}
        found = [
            t
            for t in tensors_in(batch)
            if t.dim() and t.layout is torch.strided and not t.is_meta and id(t) not in inside
        ]
        self.size = len(self._lists[0]) if self._lists else _size_of(found)
        self._places = [(t, d) for t in found if (d := _dim_of(t, self.size)) is not None and _can_be_written(t, d)]

    def of_leaf(self, tensor: Tensor) -> Rows:
        """The samples whose values in a tensor of the batch are bad."""
        for one in self._lists:
            if own := tuple(i for i, part in enumerate(one) if any(t is tensor for t in tensors_in(part))):
                return own
        return next(iter(self.guesses(tensor)), ())

    def guesses(self, result: Tensor) -> Iterator[Rows]:
        """Samples that the bad values of a result may belong to, the likeliest first; never all of them."""
        if self.size < 1 or not result.dim():
            return
        bad, seen = where_bad(result).cpu(), set[Rows]()
        for rows in self._rows_of(bad):
            if rows and len(rows) < max(self.size, 2) and rows not in seen:
                seen.add(rows)
                yield rows

    def _rows_of(self, bad: Tensor) -> Iterator[Rows]:
        for dim in range(min(bad.dim(), 2)):
            if bad.shape[dim] == self.size:
                others = [d for d in range(bad.dim()) if d != dim]
                line = bad.any(dim=others) if others else bad
                yield _numbers(line)
        first = bad.shape[0]
        if first > self.size and first % self.size == 0:
            line = bad.reshape(first, -1).any(dim=1)
            yield _numbers(line.reshape(self.size, -1).any(dim=1))  # rows of one sample side by side
            yield _numbers(line.reshape(-1, self.size).any(dim=0))  # or samples side by side

    @contextmanager
    def replaced(self, rows: Sequence[int], *, by: int) -> Iterator[None]:
        """Inside, these samples are copies of another one; afterwards they are as they were.

        Written past autograd: a graph of the user's that saved the batch does not see a change.
        """
        index, kept = torch.tensor(list(rows), dtype=torch.long, device="cpu"), []
        whole = [(one, list(one)) for one in self._lists]
        try:
            for one, parts in whole:
                one[:] = [parts[by] if i in rows else part for i, part in enumerate(parts)]
            for tensor, dim in self._places:
                data, own = tensor.data, index.to(tensor.device)
                kept.append((data, dim, own, data.index_select(dim, own)))
                stand_in = data.narrow(dim, by, 1).expand_as(kept[-1][3]).clone()
                data.index_copy_(dim, own, stand_in)
            yield
        finally:
            for one, parts in whole:
                one[:] = parts
            for data, dim, own, values in kept:
                data.index_copy_(dim, own, values)

    def culprits(
        self,
        guesses: Sequence[Rows],
        begin: Callable[[], None],
        is_good: Callable[[], bool],
        *,
        bisect: bool = True,
    ) -> tuple[Rows, int]:
        """The smallest set of samples without which the step is good, and how often it was tried.

        `begin` puts everything back, the batch included; `is_good` runs the step on what the batch holds then. Nothing
        is returned where no sample is to blame.
        """
        tries = _Tries(self, begin, is_good)
        if not (self._places or self._lists) or self.size < 2:
            return (), 0
        for rows in guesses[:3]:
            other = next(i for i in range(self.size) if i not in rows)
            if tries.good_without(rows, other):
                return rows, tries.num
        return tries.bisect() if bisect else (), tries.num


class _Tries:
    """A bounded number of runs."""

    def __init__(self, rows: BatchRows, begin: Callable[[], None], is_good: Callable[[], bool]) -> None:
        self._rows, self._begin, self._is_good = rows, begin, is_good
        self.num = 0

    def good_without(self, rows: Sequence[int], by: int) -> bool:
        self.num += 1
        self._begin()
        with self._rows.replaced(rows, by=by):
            return self._is_good()

    def bisect(self) -> Rows:
        everyone = list(range(self._rows.size))
        for by in dict.fromkeys((0, len(everyone) // 2, len(everyone) - 1)):
            others = [i for i in everyone if i != by]
            if self.good_without(others, by):
                found = self._bad_among(others, by)
                # Together they must be the whole cause: two samples that only fail together are none of them.
                return tuple(found) if found and self.good_without(found, by) else ()
        return ()

    def _bad_among(self, rows: list[int], by: int) -> list[int]:
        """Those that make the step bad, each by itself, with all others replaced."""
        ahead, found = [rows], list[int]()
        while ahead and self.num < MAX_TRIES:
            part = ahead.pop(0)
            rest = [i for i in range(self._rows.size) if i not in part and i != by]
            if part is not rows and self.good_without(rest, by):  # all together they are known to be bad
                continue
            if len(part) == 1:
                found += part
            else:
                ahead += [part[: len(part) // 2], part[len(part) // 2 :]]
        return [] if ahead else sorted(found)


def sample_lists(batch: object) -> list[list[Any]]:
    """The lists of a batch that hold one entry per sample, as detection models and sets of any size take them.

    That is a list of dicts of tensors, and a list of tensors whose first dimensions differ; where only the last one is
    smaller, they are rather the parts of a batch. A list of as many entries as another one that is such a list is one.

    Example:
        >>> points = [torch.ones(2, 3), torch.ones(5, 3), torch.ones(4, 3)]
        >>> sample_lists({"points": points, "y": torch.ones(3)}) == [points]
        True
        >>> sample_lists([torch.ones(4, 3), torch.ones(4)])
        []
    """
    lists = [one for one in _lists_in(batch) if len(one) > 1]
    size = next((len(one) for one in lists if _is_per_sample(one)), None)
    return [one for one in lists if len(one) == size]


def _lists_in(value: object, depth: int = 0) -> Iterator[list[Any]]:
    if isinstance(value, list) and value and all(isinstance(v, Tensor | Mapping) for v in value):
        yield value
        return
    parts: Sequence[object] = ()
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = value
    elif hasattr(value, "__dataclass_fields__"):
        parts = [getattr(value, name, None) for name in value.__dataclass_fields__]
    for part in parts if depth < 3 else ():
        yield from _lists_in(part, depth + 1)


def _is_per_sample(one: list[Any]) -> bool:
    if all(isinstance(part, Mapping) for part in one):
        return all(any(True for _ in tensors_in(part)) for part in one)
    if not all(isinstance(part, Tensor) and part.dim() for part in one):
        return False
    if len({(part.dtype, part.dim()) for part in one}) > 1:
        return False
    sizes = [int(part.shape[0]) for part in one]
    return len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]


def ids_in(batch: object) -> list[Any]:
    """The sample ids that a batch carries with it: an entry of a dict, dataclass or named tuple.

    Example:
        >>> ids_in({"x": torch.ones(2, 3), "index": torch.tensor([7, 9])})
        [7, 9]
    """
    names: Iterable[str] = getattr(batch, "_fields", None) or getattr(batch, "__dataclass_fields__", None) or ()
    entries = batch if isinstance(batch, Mapping) else {name: getattr(batch, name, None) for name in names}
    ids = next((entries[name] for name in ID_NAMES if name in entries), None)
    if isinstance(ids, Tensor):
        return [int(i) for i in ids.reshape(-1)] if not ids.is_floating_point() else []
    return [plain_id(i) for i in ids] if isinstance(ids, Sequence) and not isinstance(ids, str) else []


def _size_of(tensors: Sequence[Tensor]) -> int:
    """How many samples: the first dimension that most tensors agree on, else that of the first one."""
    if not tensors:
        return 0
    counts = Counter(int(t.shape[0]) for t in tensors)
    single = [int(t.shape[0]) for t in tensors if t.dim() == 1]  # labels: one number per sample
    for n in single:
        counts[n] += sum(t.dim() > 1 and t.shape[1] == n for t in tensors)
    best = max(counts.values())
    return next(int(t.shape[0]) for t in tensors if counts[int(t.shape[0])] == best)


def _dim_of(tensor: Tensor, size: int) -> int | None:
    return next((d for d in range(min(tensor.dim(), 2)) if tensor.shape[d] == size), None)


def _can_be_written(tensor: Tensor, dim: int) -> bool:
    """Not where several places share memory."""
    return not any(stride == 0 and n > 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True))


def _numbers(line: Tensor) -> Rows:
    return tuple(int(i) for i in line.nonzero().reshape(-1))
