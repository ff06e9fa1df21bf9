"""What a loss will cost before it is computed, which backend costs least, and the refusal of what cannot end well.

The rates of a device are rough: enough to distinguish seconds from hours, and what fits from what does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from trimtab.losses.problem import check_name
from trimtab.losses.similarity import SIMILARITIES

LINES = 1 << 24
"""Logits of one ``[B, B]`` matrix up to which it is kept for the backward pass."""


_PER_CORE = 6e10  # float32 products of one core; 9e10 was measured with AVX-512
_PER_SM = {"ieee": 3.0e11, "tf32": 1.7e12, "bf16": 3.4e12}  # measured on an H200, of 132
_DEFAULT_SMS = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of one device, per second."""

    kind: str
    flops: float
    """Of large matrix products."""
    elements: float
    """Numbers that one plain pass over memory handles."""


def machine_of(device: torch.device, precision: str = "ieee", *, double: bool = False) -> Machine:
    """The rates of ``device``; of an H200 where a CUDA device is asked about that is not there."""
    slow = 2.0 if double else 1.0
    if device.type == "cuda":
        there = torch.cuda.is_available()
        count = torch.cuda.get_device_properties(device).multi_processor_count if there else _DEFAULT_SMS
        return Machine(kind="cuda", flops=count * _PER_SM[precision] / slow, elements=count * 2e9 / slow)
    cores = torch.get_num_threads()
    return Machine(kind=device.type, flops=cores * _PER_CORE / slow, elements=cores * 6e8 / slow)


def tile_of(device: torch.device) -> int:
    """Tuples of one tile where the caller does not say: what stays near a cache, or fills a card."""
    return 1 << 25 if device.type == "cuda" else 1 << 20


def small_bytes(device: torch.device) -> float:
    """Memory that is not worth asking for: the question takes longer than small losses do."""
    if device.type == "cuda" and torch.cuda.is_available():
        return 0.02 * torch.cuda.get_device_properties(device).total_memory
    return 2.0**26


def free_bytes(device: torch.device) -> float:
    """Memory a new tensor could get; infinite where it cannot be known."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return float("inf")
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):  # with what the page cache would give back, unlike SC_AVPHYS_PAGES
                return float(line.split()[1]) * 1024
    except OSError:
        pages = {"SC_AVPHYS_PAGES", "SC_PAGE_SIZE"}
        if pages <= set(getattr(os, "sysconf_names", ())):
            return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    return float("inf")


BACKENDS = ("auto", "dense", "materialize", "stream", "gram", "contract", "triton")
OBJECTIVES = ("axis", "joint", "full", "pairwise", "sampled", "sigmoid")
BUDGET_S = 600.0
_KEPT = 8  # numbers per logit that a forward and backward pass with plain autograd keeps
SMALL = 1 << 21
"""Tuples up to which keeping every logit is the fastest."""
TILE_WINS = 1 << 15
"""Logits of two modalities beyond which tiles are faster on a CPU than one matrix: they stay in its cache."""


class TooCostly(ValueError):
    """A loss that was refused before anything was allocated; says what it would take and what would fit.

    Example:
        >>> import torch
        >>> from trimtab.losses import TooCostly, nway_loss
        >>> try:
        ...     nway_loss([torch.ones(64, 512)] * 6, similarity="mip", objective="full", budget_s=1.0)
        ... except TooCostly as refusal:
        ...     print(str(refusal)[:83])
        the 'full' objective ('mip', backend 'stream') of 6 modalities, B=64, looks at 6.87
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Forward and backward pass of one loss, to within a factor of about 3."""

    backend: str
    tuples: float
    """Logits that are looked at."""
    flops: float
    bytes: float
    """Peak memory beyond the inputs."""
    time_s: float


class CostSettings(TypedDict, total=False):
    """The arguments of `nway_cost` that do not depend on the sizes of a problem."""

    backend: str
    precision: str
    chunk: int | None
    num_samples: int
    world: int


def nway_cost(
    num: int,
    batch: int,
    width: int,
    *,
    similarity: str = "mip",
    objective: str = "axis",
    backend: str = "auto",
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    chunk: int | None = None,
    num_samples: int = 1,
    world: int = 1,
) -> Estimate:
    """What the loss of ``num`` modalities ``[batch, width]`` costs on ``device``, and with which backend.

    Nothing is allocated, and the device need not be there: a CUDA device that is not counts as an H200.

    Example:
        >>> from trimtab.losses import nway_cost
        >>> full = nway_cost(6, 64, 512, similarity="mip", objective="full", device="cuda", precision="bf16")
        >>> full.tuples == 64**6, full.time_s < 10
        (True, True)
        >>> nway_cost(6, 64, 512, similarity="mip", objective="axis").tuples
        24576.0
    """
    check_name("similarity", similarity, SIMILARITIES)
    check_name("objective", objective, OBJECTIVES)
    check_name("backend", backend, BACKENDS)
    if min(num - 1, batch, width, num_samples, world) < 1:
        raise ValueError(
            f"num is {num}, batch {batch}, width {width}, num_samples {num_samples}, world {world}; expected "
            "at least 2 modalities and 1 of the others."
        )
    device = torch.device(device)
    name = choose(num, batch, similarity, objective, device) if backend == "auto" else backend
    sizes = num, batch, width
    if objective == "pairwise":
        one = _estimate((2, batch, width), similarity, name, device, precision, chunk)
        factor, bound = num * (num - 1) / 2, 1.0 if name in ("stream", "triton") else num * (num - 1) / 2
        return _times(one, factor / world, bound)
    one = _estimate(sizes, similarity, name, device, precision, chunk, num_samples if objective == "sampled" else 0)
    return _times(one, 1 / world, 1.0)


def choose(num: int, batch: int, similarity: str, objective: str, device: torch.device, *, linear: bool = True) -> str:
    """The backend that costs least; ``linear``: whether the exact contraction may be used where it applies."""
    family = SIMILARITIES[similarity].family
    triton = device.type == "cuda" and _triton(device)
    two = num == 2 or objective == "pairwise"
    if objective == "sampled" or (objective in ("axis", "joint") and not two):
        return "dense"
    if two:
        few = TILE_WINS if device.type == "cpu" else LINES
        return "dense" if batch**2 <= few or family == "gram" else "triton" if triton else "stream"
    if similarity == "mip":
        return "materialize" if batch**num < SMALL else "triton" if triton else "stream"
    if SIMILARITIES[similarity].linear and linear and objective == "full":
        return "contract"
    return "triton" if triton and family == "additive" and 4 <= num <= 7 and objective == "full" else "gram"


def double_is_cheap(xs: Sequence[Tensor], similarity: str, objective: str) -> bool:
    """Whether a problem is so small that float64 sums cost nothing worth mentioning.

    A float32 logit of size z is off by about 1e-7 z, and so is the gradient of a small loss; float64 ends that. Cards
    made for games, and Apple's, have next to no float64 units.
    """
    device = xs[0].device
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device)[1] != 0:
            return False
    elif device.type != "cpu":
        return False
    cost = nway_cost(len(xs), *xs[0].shape, similarity=similarity, objective=objective, device=device)
    return cost.flops <= 3e8 and cost.tuples <= SMALL


def can(backend: str, similarity: str, objective: str, num: int) -> bool:
    """Whether ``backend`` has a form for this loss."""
    if backend == "auto":
        return True
    if backend == "dense":
        return objective in ("axis", "joint", "sampled", "pairwise") or num == 2
    if objective == "sampled" or (objective in ("axis", "joint") and num > 2):
        return False
    family, linear = SIMILARITIES[similarity].family, SIMILARITIES[similarity].linear
    softmax = objective != "sigmoid"
    forms = {
        "materialize": True,
        "stream": family != "gram",
        "triton": family != "gram" and softmax,
        "gram": family != "product",
        "contract": linear and softmax,
    }
    return forms[backend]


def afford(
    estimate: Estimate,
    sizes: tuple[int, int, int],
    similarity: str,
    objective: str,
    device: torch.device,
    budget_s: float,
    budget_bytes: float | None,
    same: CostSettings | None = None,
) -> None:
    """Raise `TooCostly` where the estimate is over the budget of seconds or bytes (None: 9/10 of what is free).

    ``same`` are the other arguments of `nway_cost`, to which what is proposed instead must keep.
    """
    if estimate.time_s <= budget_s and budget_bytes is None and estimate.bytes < small_bytes(device):
        return  # not worth asking the device
    limit = _limit(device, budget_bytes)
    if estimate.time_s <= budget_s and estimate.bytes <= limit:
        return
    num, batch, width = sizes

    def fits(b: int, what: str) -> bool:
        kept: CostSettings = {**(same or {})}
        if what != objective:
            kept["backend"] = "auto"
        other = nway_cost(num, b, width, similarity=similarity, objective=what, device=device, **kept)
        return other.time_s <= budget_s and other.bytes <= limit

    smaller = next((b for b in (round(batch * 0.9**e) for e in range(1, 200)) if b > 1 and fits(b, objective)), None)
    ways = [] if smaller is None else [f"B={smaller} with the same settings"]
    ways += [f"objective={what!r}" for what in ("axis", "sampled") if what != objective and fits(batch, what)]
    fit = f"What fits: {'; '.join(ways)}. Or raise" if ways else "Raise"
    raise TooCostly(
        f"the {objective!r} objective ({similarity!r}, backend {estimate.backend!r}) of {num} modalities, B={batch}, "
        f"looks at {estimate.tuples:.3g} tuples: about {estimate.flops:.2g} FLOPs, {_bytes(estimate.bytes)} and "
        f"{_seconds(estimate.time_s)} on this {device.type} device, over the budget of {_bytes(limit)} and "
        f"{_seconds(budget_s)}. {fit} budget_s and budget_bytes."
    )


def check_tuples(xs: Sequence[Tensor], budget_bytes: float | None = None) -> None:
    """Raise `TooCostly` where the logits of all ``B^N`` tuples of ``xs`` would not fit into memory."""
    num, (batch, _), device = len(xs), xs[0].shape, xs[0].device
    size, limit = 4 * _KEPT * float(batch) ** num, _limit(device, budget_bytes)
    if size > limit:
        fits = int((limit / (4 * _KEPT)) ** (1 / num))
        raise TooCostly(
            f"all logits of {num} modalities with B={batch} are {batch**num:.3g} numbers: about {_bytes(size)} with a "
            f"backward pass, and {_bytes(limit)} can be had on this {device.type} device. What fits: B={fits}. "
            "nway_loss needs no such tensor; objective='axis' compares each sample with B others per modality."
        )


def _estimate(
    sizes: tuple[int, int, int],
    similarity: str,
    backend: str,
    device: torch.device,
    precision: str,
    chunk: int | None,
    sets: int = 0,
) -> Estimate:
    """Forward and backward pass of one backend: products, passes over numbers, largest tensors beside the inputs.

    ``sets`` are the random ones of `sampled`: their rows are gathered, and an anchor has a line in each.
    """
    num, batch, width = sizes
    family = SIMILARITIES[similarity].family
    # Numbers kept per logit: more where the similarity itself has steps between its inner products and its value.
    gram = {"dist": 8 * num, "cosmean": 14 * num, "volume": 4 * num + num**3 // 3}
    steps = {"product": 6, "additive": _KEPT}.get(family) or gram[similarity]
    tile = chunk or tile_of(device)
    if backend == "dense":
        lines = num * float(batch) ** 2 * max(1, sets)
        tuples, flops = lines, 6 * lines * width * (num - 1 if family == "gram" else 1)
        whole = lines <= num * (chunk or LINES)  # else one tile of one modality at a time
        gathered = sets * batch * num * (2 * num + width * (num - 1 if whole else 1))
        kept, passes = (lines if whole else float(chunk or LINES)) * steps + gathered, 4 * lines * steps
    else:
        tuples = float(batch) ** num
        left, right = float(batch) ** (num // 2), float(batch) ** (num - num // 2)
        rows = (left + right) * width
        if backend == "materialize":
            flops = tuples * (6 * width if family == "product" else 2)
            kept, passes = tuples * steps + 3 * rows * (family == "product"), 4 * tuples * steps
        elif backend == "contract":
            group = float(batch) ** (2 * -(-num // 3))
            flops, kept, passes = 12 * tuples, 6 * group, 30 * group
        elif backend == "gram":
            flops = 3 * batch**2 * width * num**2
            tile = chunk or tile_of(device) // (4 if device.type == "cpu" else 2)
            kept, passes = num**2 * batch**2 + (batch + 4) * right + min(tuples, tile) * steps, tuples * steps
        else:
            flops = 8 * tuples * width
            kept, passes = 3 * rows + min(tuples, tile) * 7, 8 * tuples
            if backend == "triton":
                kept, passes = 3 * rows + _weights(left, right, precision), tuples
                if family == "additive" and 4 <= num <= 7:  # without the width
                    flops, kept = 3 * batch**2 * width * num**2, num * batch * right
    machine = machine_of(device, {"fp32": "ieee", "auto": "ieee"}.get(precision, precision))
    time_s = flops / machine.flops + passes / machine.elements
    return Estimate(backend=backend, tuples=tuples, flops=flops, bytes=4 * kept, time_s=time_s)


def _weights(left: float, right: float, precision: str) -> float:
    """Numbers of 4 bytes that the kernels keep at a time: a block of weights, or what small problems take beside it."""
    from trimtab.losses.triton.stream_launcher import block_of

    high, wide = block_of(int(left), int(right))
    return max(2.0**26, high * wide * (0.5 if precision == "bf16" else 1.0))


def _times(one: Estimate, work: float, memory: float) -> Estimate:
    return Estimate(
        backend=one.backend,
        tuples=one.tuples * work,
        flops=one.flops * work,
        bytes=one.bytes * memory,
        time_s=one.time_s * work,
    )


def _triton(device: torch.device) -> bool:
    """Whether the Triton backend can run there; on a card that is only asked about, as on an H200."""
    if not torch.cuda.is_available():
        return True
    from trimtab.losses.triton import stream_launcher

    return stream_launcher.available(device)


def _limit(device: torch.device, budget_bytes: float | None) -> float:
    return 0.9 * free_bytes(device) if budget_bytes is None else budget_bytes


def _bytes(count: float) -> str:
    unit = max(0, min(5, int(len(f"{max(count, 1):.0f}") - 1) // 3))
    return f"{count / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


def _seconds(value: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (1.0, "s")):
        if value >= 2 * size:
            return f"{value / size:{'.0f' if value >= 1000 * size else '.3g'}} {unit}"
    return f"{value:.2g} s"


SURELY_FITS = 1 << 27
"""Bytes for which nobody is asked what is free."""


def check_it_fits(xs: Sequence[Tensor], similarity: str) -> None:
    """Raise `TooCostly` where a tensor of all tuples, with what its backward pass keeps, is more than is free."""
    (batch, width), num, device = xs[0].shape, len(xs), xs[0].device
    item = 2 if xs[0].dtype == torch.float64 else 1

    def needed(b: int) -> float:
        return item * nway_cost(num, b, width, similarity=similarity, objective="full", backend="materialize").bytes

    if needed(batch) < SURELY_FITS:
        return
    free = free_bytes(device)
    if needed(batch) > free:
        fits = next((b for b in range(batch - 1, 0, -1) if needed(b) <= free), 0)
        smaller = f" up to B={fits} fits;" if fits else ""
        raise TooCostly(
            f"the similarities of {num} modalities of {batch} samples are {batch}^{num} = {float(batch) ** num:.3g} "
            f"numbers: with what the backward pass keeps about {needed(batch) / 2**30:.3g} GiB, and "
            f"{free / 2**30:.3g} GiB are free on {device}. What to do:{smaller} form='line' gives {batch} x {batch}; "
            f"nway_loss(similarity={similarity!r}) needs no such tensor."
        )
