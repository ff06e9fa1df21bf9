"""The monitor's part of the self-test: real gradients, healthy and spoiled, and clipping beside torch's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from trimtab.monitor.gradients import GradientHealthMonitor
from trimtab.train.selftest_kit import Facts, Group, Part, expect, loss_of, network


def _checked(device: torch.device, factor: float = 1.0, spoil: float | None = None) -> dict[str, Any]:
    """What the monitor says of real gradients: as they are, scaled, or with one bad value in one layer."""
    model = network(device)
    loss_of(model, device, factor).backward()  # type: ignore[no-untyped-call]
    weight = model.get_parameter("0.weight")
    if spoil is not None and weight.grad is not None:
        weight.grad[3, 3] = spoil
    return GradientHealthMonitor(model).check_gradients()


def _told(stats: Mapping[str, Any]) -> Facts:
    return {
        "Global norm": f"{stats['global_grad_norm']:.4g}",
        "Max norm": f"{stats['max_grad_norm']:.4g}",
        "Min norm": f"{stats['min_grad_norm']:.4g}",
        "Has NaN": stats["has_nan"],
        "Has Inf": stats["has_inf"],
    }


def _healthy(device: torch.device) -> Facts:
    model = network(device)
    loss_of(model, device).backward()  # type: ignore[no-untyped-call]
    stats = GradientHealthMonitor(model).check_gradients()
    parts = [torch.linalg.vector_norm(p.grad.double()) for p in model.parameters() if p.grad is not None]
    true = float(torch.linalg.vector_norm(torch.stack(parts)))
    found = stats["global_grad_norm"]
    expect(
        math.isclose(found, true, rel_tol=1e-4), f"the global norm is {found:.6g}; in double precision it is {true:.6g}"
    )
    expect(not (stats["has_nan"] or stats["has_inf"]), "healthy gradients were called non-finite")
    expect(
        stats["params_with_grads"] == len(parts), f"{stats['params_with_grads']} of {len(parts)} gradients were seen"
    )
    return _told(stats)


def _nonfinite(device: torch.device, *, value: float, key: str, other: str) -> Facts:
    stats = _checked(device, spoil=value)
    expect(stats[key], f"one {value} in a gradient was not seen ({key} is False)")
    expect(not stats[other], f"one {value} in a gradient was taken for another kind ({other} is True)")
    expect(bool(stats["recommendations"]), f"one {value} in a gradient was seen, but nothing was recommended")
    return _told(stats)


def _vanishing(device: torch.device) -> Facts:
    stats = _checked(device, factor=1e-12)
    expect(
        any("anish" in r for r in stats["recommendations"]), f"gradients of {_size(stats)} were not called vanishing"
    )
    return _told(stats)


def _exploding(device: torch.device) -> Facts:
    stats = _checked(device, factor=1e6)
    expect(
        any("xplod" in r for r in stats["recommendations"]), f"gradients of {_size(stats)} were not called exploding"
    )
    return _told(stats)


def _size(stats: Mapping[str, Any]) -> str:
    return f"norm {stats['global_grad_norm']:.3g}"


def _clipping(device: torch.device) -> Facts:
    mine = network(device)
    loss_of(mine, device, 100.0).backward()  # type: ignore[no-untyped-call]
    theirs = copy.deepcopy(mine)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    before = GradientHealthMonitor(mine).apply_gradient_clipping(max_norm=1.0)
    expected = float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))
    expect(
        math.isclose(before, expected, rel_tol=1e-5),
        f"the norm before clipping is {before:.6g}; torch says {expected:.6g}",
    )
    pairs = [(p.grad, q.grad) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True)]
    apart = max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)
    expect(apart <= 1e-6, f"clipped gradients differ from torch's by up to {apart:.2g}")
    return {"Norm before": f"{before:.4g}", "Largest difference to torch": f"{apart:.1e}"}


MONITOR = Group(
    heading="Testing Gradient Health Monitor",
    parts=(
        Part(name="healthy gradients", body=_healthy),
        Part(name="NaN in a gradient", body=partial(_nonfinite, value=math.nan, key="has_nan", other="has_inf")),
        Part(name="Inf in a gradient", body=partial(_nonfinite, value=math.inf, key="has_inf", other="has_nan")),
        Part(name="vanishing gradients", body=_vanishing),
        Part(name="exploding gradients", body=_exploding),
        Part(name="clipping as torch does it", body=_clipping),
    ),
)
