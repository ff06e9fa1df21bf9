"""How healthy an optimizer's moments are, and how far its steps move the weights relative to their size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.compat.monitors.norm_functions import Source, named_tensors, wide_norms
from trimtab.core.errors import InputError
from trimtab.sample.measure import reference as measure
from trimtab.sample.rows import parameter_names
from trimtab.sample.transfer import to_host

HEALTHY_RATIO = (1e-5, 1e-2)
"""Between these a step moves a weight matrix neither too little to learn nor so much that it forgets; 1e-3 is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """One parameter's moments: how many elements of the second are denormal or zero, and of both non-finite.

    `update` is the root mean square of the step Adam makes per element before the learning rate: near 1 where gradients
    agree, near 0 where they are noise; NaN where there is nothing to tell it from.
    """

    name: str
    num_steps: int
    numel: int
    denormal: int
    zero: int
    nonfinite: int
    smallest: float
    largest: float
    update: float

    @property
    def healthy(self) -> bool:
        """Whether nothing is non-finite and no second moment has sunk below what its type holds in full."""
        return self.nonfinite == 0 and self.denormal == 0


def adam_state_report(
    optimizer: Optimizer, names: nn.Module | Iterable[tuple[str, Tensor]] | None = None
) -> dict[str, AdamState]:
    """The moments of every parameter of an Adam-like optimizer, by name; empty before its first step.

    Pass the model (or its `named_parameters()`) as `names`; else parameters go by their place, `group.number`. Denormal
    second moments are the trace of vanished gradients: dividing by their root is dividing by noise, or by `eps`.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> report = adam_state_report(optimizer, model)
        >>> report["weight"].num_steps, report["weight"].healthy, round(report["weight"].update, 3)
        (1, True, 1.0)
    """
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        raise InputError(f"got a {type(optimizer).__name__}; expected an optimizer such as torch.optim.Adam")
    called = _names(names)
    found: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = []
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            entries = state.get(p, {})
            if isinstance(entries.get("exp_avg_sq"), Tensor):
                found.append((called.get(id(p), f"{g}.{i}"), entries, group))
    if not found:
        return {}
    home = measure.plain(found[0][1]["exp_avg_sq"]).device
    rows = to_host(torch.stack([_measured(entries, group).to(home) for _, entries, group in found]))
    return {
        name: AdamState(
            name=name,
            num_steps=int(steps),
            numel=entries["exp_avg_sq"].numel(),
            denormal=int(denormal),
            zero=int(zero),
            nonfinite=int(nonfinite),
            smallest=low,
            largest=high,
            update=update,
        )
        for (name, entries, _), (steps, denormal, zero, nonfinite, low, high, update) in zip(
            found, rows.tolist(), strict=True
        )
    }


def _names(names: nn.Module | Iterable[tuple[str, Tensor]] | None) -> dict[int, str]:
    if names is None:
        return {}
    return parameter_names(names) if isinstance(names, nn.Module) else {id(p): name for name, p in names}


def _measured(entries: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Steps, denormals, zeros, non-finite, smallest and largest second moment, size of the step: on the device."""
    second = measure.plain(entries["exp_avg_sq"])
    wide = torch.float32 if second.device.type == "mps" else torch.float64
    steps = torch.as_tensor(entries.get("step", 0), device=second.device).to(wide).reshape(())
    if not second.numel():
        return torch.cat([steps.reshape(1), torch.zeros(6, dtype=wide, device=second.device)])
    tiny = torch.finfo(second.dtype).smallest_normal
    finite = torch.isfinite(second)
    bad = (~finite).sum()
    # Compared in the type's own bits, so that a processor that flushes denormals to zero cannot hide them.
    denormal = ((second.abs() < tiny) & (second.view(_BITS[second.element_size()]) != 0)).sum()
    first = entries.get("exp_avg")
    update = torch.full((), torch.nan, dtype=wide, device=second.device)
    if isinstance(first, Tensor):
        momentum = measure.plain(first)
        bad = bad + (~torch.isfinite(momentum)).sum()
        beta1, beta2 = group.get("betas", (0.9, 0.999))
        scaled = momentum.to(wide) / (1 - beta1**steps)
        root = (second.to(wide) / (1 - beta2**steps)).sqrt()
        update = torch.linalg.vector_norm(scaled / (root + group.get("eps", 1e-8))) / math.sqrt(second.numel())
    zero = (second.view(_BITS[second.element_size()]) == 0).sum()
    low, high = torch.aminmax(second)
    return torch.stack([x.to(wide) for x in (steps, denormal, zero, bad, low, high, update)])


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class UpdateRatio:
    """Measures how far a step moves each parameter relative to its size: a context manager around `optimizer.step()`.

    `ratios` holds the norm of the change over the norm of what was there, by name, and `total` the same of all
    parameters together. A parameter that was zero has no ratio (NaN). It keeps a copy of the weights for the length of
    the `with` block: use it now and then.

    Example:
        >>> weight = nn.Parameter(torch.ones(4))
        >>> weight.grad = torch.ones(4)
        >>> with update_to_parameter_ratio([("weight", weight)]) as update:
        ...     torch.optim.SGD([weight], lr=0.01).step()
        >>> round(update.total, 4), update.healthy
        (0.01, True)
    """

    def __init__(self, source: Source) -> None:
        self._named = named_tensors(source)
        self._before: list[Tensor] = []
        self.ratios: dict[str, float] = {}
        self.total = math.nan

    def __enter__(self) -> Self:
        with torch.no_grad():
            self._before = [measure.plain(p).clone() for _, p in self._named]
        return self

    def __exit__(self, *exc: object) -> None:
        before, self._before = self._before, []
        if exc[0] is not None or not before:
            return
        with torch.no_grad():
            changes = [measure.plain(p) - b for (_, p), b in zip(self._named, before, strict=True)]
            sizes = torch.stack([wide_norms(changes), wide_norms(before)])
        moved, size = to_host(sizes).astype(np.float64)
        with np.errstate(all="ignore"):
            ratios = np.where(size > 0, moved / size, np.nan)
            whole = np.sqrt(np.square(size).sum())
            self.total = float(np.sqrt(np.square(moved).sum()) / whole) if whole != 0 else math.nan
        self.ratios = {name: float(r) for (name, _), r in zip(self._named, ratios, strict=True)}

    @property
    def healthy(self) -> bool:
        """Whether the step as a whole was neither too small to matter nor too large to bear."""
        return HEALTHY_RATIO[0] <= self.total <= HEALTHY_RATIO[1]


def update_to_parameter_ratio(source: Source) -> UpdateRatio:
    """Watch one `optimizer.step()`: `with update_to_parameter_ratio(model) as update: optimizer.step()`.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> with update_to_parameter_ratio(model) as update:
        ...     optimizer.step()
        >>> update.ratios, update.healthy
        ({'weight': 0.0, 'bias': 0.0}, False)
    """
    return UpdateRatio(source)
