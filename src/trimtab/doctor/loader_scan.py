"""Goes through the loader once, as far as time allows, and writes down what every check of the data needs."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trimtab.doctor.batch_tensors import fresh, is_label_like, leaves, num_samples, tensor_hash
from trimtab.sample.transfer import number

NUM_KEPT = 8
MAX_BATCHES = 400
MAX_VALUES = 200_000
MAX_KEPT_BYTES = 256_000_000
MAX_CLASSES = 100_000


@dataclass(slots=True)
class Leaf:
    """One place of a batch over all batches seen."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    empty: list[int] = field(default_factory=list)
    nan: dict[int, int] = field(default_factory=dict)
    inf: dict[int, int] = field(default_factory=dict)
    mask_like: bool = True
    low: float = float("inf")
    high: float = float("-inf")
    flat_batches: int = 0
    one_value_batches: int = 0
    num_batches: int = 0
    num_rows: int = 0
    prints: list[int] = field(default_factory=list)
    first_rows: set[int] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=dict)
    runs: int = 0
    last: float | None = None

    @property
    def is_float(self) -> bool:
        """Whether it holds floats."""
        return self.dtype.is_floating_point

    @property
    def label_like(self) -> bool:
        """Whether it holds whole numbers."""
        return not self.dtype.is_floating_point and not self.dtype.is_complex and self.dtype is not torch.bool

    @property
    def constant(self) -> bool:
        """Whether every sample of every batch was the same."""
        return self.num_rows > 1 and self.flat_batches == self.num_batches and len(self.first_rows) == 1


@dataclass(slots=True)
class Scan:
    """What the loader gave: the first batches themselves, and of all others what was to be noted."""

    batches: list[object] = field(default_factory=list)
    num: int = 0
    complete: bool = False
    one_shot: bool = False
    seconds: float = 0.0
    leaves: dict[str, Leaf] = field(default_factory=dict)
    size: int | None = None
    error: str = ""
    where: str = ""

    @property
    def num_seen(self) -> str:
        """In words."""
        return f"{'all ' if self.complete else 'the first '}{self.num} batch{'' if self.num == 1 else 'es'}"


def scan(loader: Iterable[object], *, budget_s: float, least: int = NUM_KEPT) -> Scan:
    """Look at its batches; at least some, however long it takes.

    Example:
        >>> seen = scan([(torch.zeros(4, 2), torch.arange(4))], budget_s=1.0)
        >>> seen.num, seen.leaves["0"].constant, seen.leaves["1"].constant
        (1, True, False)
    """
    out = Scan(one_shot=iter(loader) is loader)
    began = time.perf_counter()
    size = 0
    try:
        for batch in loader:
            _look(out, batch)
            size += sum(t.numel() * t.element_size() for _, t in leaves(batch))
            if len(out.batches) < NUM_KEPT and (size < MAX_KEPT_BYTES or len(out.batches) < 2):
                out.batches.append(fresh(batch))
            out.num += 1
            late = time.perf_counter() - began > budget_s
            if out.num >= MAX_BATCHES or (late and out.num >= least) or (out.one_shot and out.num >= 4 * least):
                break
        else:
            out.complete = True
    except Exception as error:  # whatever a data set may raise is a finding
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        out.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        out.where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    out.seconds = time.perf_counter() - began
    return out


def _look(out: Scan, batch: object) -> None:
    for path, tensor in leaves(batch):
        leaf = out.leaves.get(path)
        if leaf is None:
            leaf = out.leaves[path] = Leaf(path, tensor.dtype, tuple(tensor.shape), tensor.device)
        _note(leaf, tensor, out.num)
    if out.size is None:
        out.size = num_samples(batch)


def _note(leaf: Leaf, tensor: Tensor, index: int) -> None:
    leaf.num_batches += 1
    if tensor.numel() == 0:
        leaf.empty.append(index)
        return
    if tensor.is_meta or tensor.layout is not torch.strided:
        return
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        nan = int(number(torch.isnan(tensor).sum()))
        inf = int(number(torch.isinf(tensor).sum()))
        if nan:
            leaf.nan[index] = nan
        if inf:
            leaf.inf[index] = inf
    if not tensor.is_complex():
        finite = tensor[torch.isfinite(tensor)] if tensor.is_floating_point() else tensor
        if finite.numel():
            leaf.low = min(leaf.low, number(finite.min()))
            leaf.high = max(leaf.high, number(finite.max()))
            leaf.mask_like &= not bool(finite.any())
            leaf.one_value_batches += bool((finite == finite.reshape(-1)[0]).all())
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    leaf.num_rows += rows.shape[0]
    leaf.flat_batches += bool((rows == rows[:1]).all())
    leaf.first_rows.add(tensor_hash(rows[0]))
    leaf.prints.append(tensor_hash(tensor))
    if is_label_like(tensor) and tensor.dim() == 1:
        flat = tensor.detach().cpu()
        leaf.runs += int((flat[1:] != flat[:-1]).sum()) + (leaf.last is not None and leaf.last != float(flat[0]))
        leaf.last = float(flat[-1])
    if is_label_like(tensor) and len(leaf.counts) < MAX_CLASSES:
        values, counts = np.unique(tensor.detach().cpu().numpy().reshape(-1)[:MAX_VALUES], return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            leaf.counts[int(value)] = leaf.counts.get(int(value), 0) + count
