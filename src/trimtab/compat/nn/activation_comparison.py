"""Activation functions side by side: what each does to a gradient, measured here and now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional, init

from trimtab.compat.nn.layers import ImprovedActivations

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, tuple[Activation, str]] = {
    "GELU": (ImprovedActivations.gelu, "transformers; the usual first choice"),
    "Swish/SiLU": (ImprovedActivations.swish, "deep MLPs and convolutions, with normalisation"),
    "Mish": (ImprovedActivations.mish, "where its price does not matter"),
    "LeakyReLU": (ImprovedActivations.leaky_relu, "simple and fast models"),
    "ELU": (ImprovedActivations.elu, "where activations should keep a mean near zero"),
    "scaled tanh": (ImprovedActivations.scaled_tanh, "where outputs must be bounded"),
    "ReLU": (functional.relu, "shallow models, or with normalisation"),
    "Tanh": (torch.tanh, "inside gated cells; flat for large inputs"),
}
DEAD = 1e-3
"""A unit whose slope is below this for every input passes nothing on that would bring it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRow:
    """What one activation function does; the gradient columns are of a network of `depth` plain layers."""

    name: str
    use: str
    slope_at_zero: float
    slope_at_minus_3: float
    dead_frac: float
    """Share of the units of the last layer that pass no gradient for any of the inputs."""
    kept_frac: float
    """Gradient norm at the first layer's output over that at the last one's: 1 is a gradient that arrives whole."""
    relative_time: float | None
    """Forward and backward, against ReLU in the same run; None where no time was taken."""


def compare_activations(
    *, depth: int = 20, width: int = 128, num_inputs: int = 256, repeats: int = 0, seed: int = 0
) -> tuple[ActivationRow, ...]:
    """Measure every function: slopes, dead units and the gradient left after `depth` layers, time if `repeats`.

    The layers are ``width`` wide, without bias, normalisation or residuals, with Kaiming's initialisation: the plain
    network in which an activation function must fend for itself. The global random state is left alone.

    Example:
        >>> rows = {row.name: row for row in compare_activations(depth=8, width=32, num_inputs=64)}
        >>> rows["ReLU"].slope_at_minus_3, rows["ReLU"].dead_frac > 0, rows["GELU"].slope_at_minus_3 != 0
        (0.0, True, True)
    """
    if min(depth, width, num_inputs) < 1:
        raise ValueError(f"depth={depth}, width={width} and num_inputs={num_inputs} must all be at least 1")
    times = _times(repeats, seed) if repeats > 0 else {}
    rows = []
    for name, (function, use) in ACTIVATIONS.items():
        dead, kept = _in_depth(function, depth, width, num_inputs, seed)
        row = ActivationRow(
            name=name,
            use=use,
            slope_at_zero=float(_slopes(function, torch.zeros(1))),
            slope_at_minus_3=float(_slopes(function, torch.full((1,), -3.0))),
            dead_frac=dead,
            kept_frac=kept,
            relative_time=times[name] / times["ReLU"] if times else None,
        )
        rows.append(row)
    return tuple(rows)


def activation_table(rows: Iterable[ActivationRow]) -> str:
    """The rows as a table in Markdown.

    Example:
        >>> print(activation_table(compare_activations(depth=2, width=8, num_inputs=8)).splitlines()[0])
        | activation | slope at 0 | slope at -3 | dead units | gradient kept | time / ReLU | use |
    """
    lines = ["| activation | slope at 0 | slope at -3 | dead units | gradient kept | time / ReLU | use |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        spent = "-" if row.relative_time is None else f"{row.relative_time:.2f}"
        lines.append(
            f"| {row.name} | {row.slope_at_zero:.3g} | {row.slope_at_minus_3:.3g} | {row.dead_frac:.1%} "
            f"| {row.kept_frac:.2g} | {spent} | {row.use} |"
        )
    return "\n".join(lines)


def _slopes(function: Activation, at: Tensor) -> Tensor:
    x = at.detach().clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(function(x).sum(), x)
    return slope


def _in_depth(function: Activation, depth: int, width: int, num_inputs: int, seed: int) -> tuple[float, float]:
    """The share of dead units in the last layer, and the share of the gradient that arrives at the first."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(num_inputs, width, generator=generator)
    first = before = h
    with torch.enable_grad():
        for layer in range(depth):
            weight = init.kaiming_normal_(torch.empty(width, width), nonlinearity="relu", generator=generator)
            before = h @ weight.T
            h = function(before)
            if layer == 0:
                first = h = h.detach().requires_grad_()
        sent = torch.randn(num_inputs, width, generator=generator)
        (arrived,) = torch.autograd.grad(h, first, sent)
    dead = (_slopes(function, before).abs() < DEAD).all(dim=0).float().mean()
    return float(dead), float(arrived.norm() / sent.norm())


def _times(repeats: int, seed: int) -> dict[str, float]:
    """CPU seconds of one forward and backward pass: the functions take turns, and the fastest of each counts."""
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    sent = torch.ones_like(x)
    best = dict.fromkeys(ACTIVATIONS, float("inf"))
    for _ in range(repeats):
        for name, (function, _use) in ACTIVATIONS.items():
            start = time.process_time()
            torch.autograd.grad(function(x), x, sent)
            best[name] = min(best[name], time.process_time() - start)
    return best
