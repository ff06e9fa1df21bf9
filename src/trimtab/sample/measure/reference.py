"""The torch reference of every measurement, on any device: L2 norms every step, all columns on a cadence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.core.types import ABSENT, F32, Column
from trimtab.sample.measure.native import native
from trimtab.sample.transfer import Sent, is_here, names_of, number, to_host, upload

GLOBALS = ("grad_norm", "nonfinite_grads", "rejected", "clip_coef", "inverse_coef")
"""What the device decides about a step, in the order it stands behind the table."""

PAIRS = ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2), (0, 3), (3, 3))
DOTS = tuple(f"dots/{4 * i + j}" for i, j in PAIRS)
"""Which products of four vectors are sent, and what they are called."""

NUM_OTHERS = 32
"""Places for single numbers that travel along with the table: the loss, what probes left on the device, what the loop
told. The last one is used by captured steps."""

_LOW = {torch.float16, torch.bfloat16}


def plain(tensor: Tensor) -> Tensor:
    """The dense real values of a sparse, complex, sharded or ordinary tensor; of a sharded one, this rank's part."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = _summed(tensor).to_local()
    if tensor.layout is not torch.strided:
        # Duplicate indices add up when the gradient is applied, so they must add up before it is measured.
        tensor = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _summed(sharded: Any) -> Any:
    """Each process may hold a summand instead of a part: squares of those do not add up, so they are added first."""
    kinds = sharded.placements
    if not any(kind.is_partial() for kind in kinds):
        return sharded
    from torch.distributed.tensor import Replicate

    return sharded.redistribute(placements=[Replicate() if kind.is_partial() else kind for kind in kinds])


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device decides by itself: the norm to clip to, the norm to reject above, whether NaN and Inf reject.

    A norm up to `clip_above` is not clipped at all.
    """

    max_norm: float | None = None
    reject_above: float | None = None
    reject_nonfinite: bool = True
    clip_above: float | None = None


KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""The types that the kernels read, by the numbers they are told."""


class Outgoing:
    """What else a step sends to the host along with its table: single numbers on the device, a look at its batch, and
    products of four vectors.

    All is given by addresses and read on the stream that measures: what is deleted after the launch is read before.
    """

    __slots__ = ("_held", "addresses", "input", "names", "taken", "vectors", "words")

    def __init__(
        self,
        input: Tensor | None = None,
        vectors: Sequence[Tensor | None] | None = None,
        words: tuple[int, int] = (0, 0),
    ) -> None:
        self.input, self.vectors = input, vectors  # dense, of a type that the kernels read
        self.words = words  # of the input's beginning that are sent, and from its first sample to the second
        self.taken: list[str] = []
        self.names: list[str] = []
        self.addresses: list[int] = []
        self._held: list[Tensor] = []

    def add(self, name: str, value: Tensor) -> None:
        """Send one number more, or several in one tensor."""
        if value.dtype is not torch.float32 or not value.is_contiguous():
            value = value.detach().float().contiguous()
        self._held.append(value)
        self.taken.append(name)
        at = value.data_ptr()
        if value.numel() == 1:
            self.names.append(name)
            self.addresses.append(at)
        else:
            self.names += names_of(name, value)
            self.addresses += range(at, at + 4 * value.numel(), 4)

    def all_names(self) -> tuple[str, ...]:
        """The names of everything behind the table; what there is not has none."""
        looked = self.input is not None and self.input.dtype in KINDS
        return _PREFIXES[looked, self.vectors is not None] + tuple(self.names)


_PREFIXES = {
    (looked, multiplied): (
        *GLOBALS,
        *(("in_rms", "in_bad") if looked else ("", "")),
        *(DOTS if multiplied else ("",) * len(DOTS)),
    )
    for looked in (False, True)
    for multiplied in (False, True)
}


@dataclass(slots=True)
class Measured:
    """A measured list of tensors, all of it still on the device: a table and the five `GLOBALS` in one flat buffer."""

    flat: Tensor
    num_rows: int
    num_columns: int
    scalars: dict[str, Tensor] | None = None  # views of the `GLOBALS`, where the buffer is used again
    sent: Sent | None = None  # the same on its way to the host
    scaled: bool = False  # the tensors were scaled by the clip coefficient

    @property
    def table(self) -> Tensor:
        """The columns, one row a tensor."""
        return self.flat[: self.num_rows * self.num_columns].view(self.num_rows, self.num_columns)

    def scalar(self, name: str) -> Tensor:
        """One of `GLOBALS`."""
        if self.scalars is not None:
            return self.scalars[name]
        return self.flat[self.num_rows * self.num_columns + GLOBALS.index(name)]

    def spare(self, limits: Limits) -> None:
        """Take back the clipping of a norm that `clip_above` leaves alone, on the device."""
        if limits.max_norm is not None and limits.clip_above is not None:
            small = self.scalar("grad_norm") <= limits.clip_above
            for name in ("clip_coef", "inverse_coef"):
                self.scalar(name).masked_fill_(small, 1.0)


def on_device(
    tensors: Sequence[Tensor], present: list[int] | None, num_rows: int, limits: Limits, scale: Tensor | None
) -> Measured:
    """The torch reference of the one-pass kernel: norms only, the same decisions, on any device, without waiting."""
    parts = norms(tensors)
    if scale is not None:
        parts = parts / scale.to(parts.device)
    norm = total(parts)
    bad = ~torch.isfinite(norm)
    reject = (norm > limits.reject_above) & ~bad if limits.reject_above is not None else torch.zeros_like(bad)
    if limits.reject_nonfinite:
        reject = reject | bad
    coef = torch.ones_like(norm)
    if limits.max_norm is not None:
        coef = torch.where(bad, coef, (limits.max_norm / (norm + 1e-6)).clamp(max=1.0))
    values = torch.stack([norm, bad.to(norm.dtype), reject.to(norm.dtype), coef, 1.0 / coef])
    table = scatter(parts.unsqueeze(1), present, num_rows)
    measured = Measured(torch.cat([table.reshape(-1), values]).float(), num_rows, 1)
    measured.spare(limits)
    return measured


def stored(tensor: Tensor) -> Tensor:
    """The real values a tensor stores, to be changed in place; scaling them scales it, duplicates and all."""
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def address(tensor: Tensor) -> int:
    """Where the values of a tensor, or of this rank's part of a sharded one, are kept."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).data_ptr()


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each tensor, one vector on the device of the first, without waiting for it.

    Tensors must be plain. A float16 or bfloat16 tensor is measured in float32; on accelerators everything is
    accumulated in float64 where the device has it, so that huge finite values do not overflow.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    first, given = tensors[0].device, tensors if isinstance(tensors, list) else list(tensors)
    wide = _accumulator({t.dtype for t in given}, first, here=is_here(tensors[0]))
    out = torch._foreach_norm(given, 2.0, dtype=wide) if wide else torch._foreach_norm(given, 2.0)
    if first.type != "cpu" and any(o.device != first for o in out):
        out = tuple(o.to(first, non_blocking=True) for o in out)
    return torch.stack(out)


def _accumulator(dtypes: set[torch.dtype], device: torch.device, *, here: bool) -> torch.dtype | None:
    """What to accumulate in; None where the tensors' own type is right and nothing need be converted."""
    if not here:
        return torch.float32 if device.type == "mps" else torch.float64
    if len(dtypes) == 1 and not dtypes & _LOW:
        return None
    return torch.float64 if torch.float64 in dtypes else torch.float32


def total(parts: Tensor) -> Tensor:
    """The norm of a vector of norms: the global norm, the same way `clip_grad_norm_` computes it."""
    whole: Tensor = torch.linalg.vector_norm(parts, 2.0)
    return whole


def wide_norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norms that do not overflow on finite values: non-finite only where a tensor holds NaN or Inf."""
    norms = [torch.linalg.vector_norm(t.double() if t.device.type != "mps" else t) for t in tensors]
    return torch.stack([norm.to(norms[0].device) for norm in norms])


def scatter(measured: Tensor, present: list[int] | None, num_rows: int) -> Tensor:
    """Rows of the gradients there are, put among the rows of all parameters; a missing one has norm ABSENT."""
    if present is None:
        return measured
    out = torch.zeros(num_rows, measured.shape[1], dtype=measured.dtype, device=measured.device)
    out[:, 0] = ABSENT
    # By an uploaded index: indexing with a list would make the host wait for its copy.
    out.index_copy_(0, upload(np.array(present, np.int64), measured.device), measured)
    return out


def scatter_to(values: Tensor, places: Tensor | None, num: int) -> Tensor:
    """Values put at their places among zeros; None: they are all there."""
    if places is None:
        return values
    out = torch.zeros(num, dtype=values.dtype, device=values.device if len(values) else places.device)
    return out.index_copy_(0, places, values) if len(values) else out


def full(tensors: Sequence[Tensor], *, fractions: bool = True) -> Tensor:
    """All columns of `Column` for each plain tensor: a float32 table [tensors, columns] on the first one's device."""
    if not tensors:
        return torch.zeros(0, len(Column), dtype=torch.float32, device="cpu")
    device = tensors[0].device
    if is_here(tensors[0]):
        if (table := compiled_columns(tensors)) is not None:
            if not fractions:
                table[:, 5:] = torch.nan
            return table
        return torch.from_numpy(full_on_cpu([to_host(t) for t in tensors], fractions=fractions))
    return torch.stack([reference_row(t, fractions).to(device, non_blocking=True) for t in tensors])


def compiled_columns(tensors: Sequence[Tensor]) -> Tensor | None:
    """The same by the compiled readings; None where they are not there, or cannot read one of the tensors."""
    if native is None or not tensors:
        return None
    table = np.empty((len(tensors), len(Column)), np.float32)
    return torch.from_numpy(table) if native.columns(list(tensors), FP16_SMALLEST, table) else None


def sizes(tensors: Sequence[Tensor]) -> Tensor:
    """Rows for tensors of which only the size matters (weights, updates): L2 and exact counts, the rest unmeasured."""
    if not tensors or not is_here(tensors[0]):
        return full(tensors, fractions=False)
    if (read := compiled_columns(tensors)) is not None:
        read[:, 1:3] = read[:, 5:] = torch.nan
        return read
    table = torch.full((len(tensors), len(Column)), torch.nan, dtype=torch.float32, device="cpu")
    table[:, 0] = norms(tensors)
    table[:, 3:5] = 0.0
    if not math.isfinite(number(total(table[:, 0]))):  # rare: count what is there, without overflow
        bad = [i for i, ok in enumerate(to_host(torch.isfinite(table[:, 0]))) if not ok]
        if bad:
            table[bad] = full([tensors[i] for i in bad], fractions=False)
    return table


def reference_row(tensor: Tensor, fractions: bool = True) -> Tensor:
    """The reference of one row, on any device, without waiting for it."""
    size = tensor.numel()
    if size == 0:
        return torch.zeros(len(Column), dtype=torch.float32, device=tensor.device)
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    magnitude = tensor.abs()
    missing = torch.full((), torch.nan, dtype=wide, device=tensor.device)
    zero = (magnitude == 0).sum().to(wide) if fractions else missing
    tiny = (magnitude < FP16_SMALLEST).sum().to(wide) if fractions else missing
    return torch.stack(
        [
            torch.linalg.vector_norm(tensor, dtype=wide),
            magnitude.max().to(wide),
            tensor.sum(dtype=wide) / size,
            torch.isnan(tensor).sum().to(wide),
            torch.isinf(tensor).sum().to(wide),
            zero / size,
            (tiny - zero) / size,
        ]
    ).float()


FP16_SMALLEST = 2.0**-24
"""The smallest positive float16: what lies below is lost when a gradient is kept in half precision."""

_CHUNK = 1 << 15
_ONES = {np.dtype(t): np.ones(_CHUNK, t) for t in (np.float32, np.float64)}
"""A dot product with ones sums several times faster than `sum`, and in float64 between chunks loses nothing."""


def full_on_cpu(arrays: Sequence[NDArray[Any]], *, fractions: bool = True) -> F32:
    """All columns of `Column` for each real array: a float32 table [arrays, columns]."""
    with np.errstate(all="ignore"):
        rows = [_cpu_row(a.reshape(-1), fractions) for a in arrays]
        return np.array(rows, dtype=np.float64).astype(np.float32).reshape(len(arrays), len(Column))


def _cpu_row(flat: NDArray[Any], fractions: bool) -> tuple[float, ...]:
    if flat.size == 0:
        return (0.0,) * len(Column)
    if flat.dtype not in _ONES:
        flat = flat.astype(np.float32)
    ones = _ONES[flat.dtype]
    square = summed = largest = 0.0
    nan = inf = zero = tiny = 0
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        magnitude = np.abs(chunk)
        squares = float(np.dot(chunk, chunk))
        if not math.isfinite(squares):  # a bad value, or squares too large for the type: look again, wider
            wide = chunk.astype(np.float64)
            squares = float(np.dot(wide, wide))
            nan += int(np.count_nonzero(np.isnan(chunk)))
            inf += int(np.count_nonzero(np.isinf(chunk)))
            summed += float(wide.sum())
        else:
            summed += float(np.dot(chunk, ones[: chunk.size]))
        square += squares
        largest = max(largest, float(magnitude.max()))
        if fractions and (few := int(np.count_nonzero(magnitude < FP16_SMALLEST))):
            tiny += few
            zero += int(np.count_nonzero(magnitude == 0))
    if nan:
        largest = square = math.nan
    shares = (zero / flat.size, (tiny - zero) / flat.size) if fractions else (math.nan, math.nan)
    return (math.sqrt(square), largest, summed / flat.size, float(nan), float(inf), *shares)
