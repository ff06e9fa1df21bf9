"""A sample as the flat `name: number` dictionary that experiment loggers want."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trimtab.core.types import Column, Kind, Sample

SCALARS = {
    "loss": "loss",
    "grad_norm": "grad/global_norm",
    "clip_coef": "grad/clip_coef",
    "update_ratio": "update/ratio",
    "weight_norm": "weight/global_norm",
    "scale": "amp/scale",
    "rejected": "health/rejected",
}
"""Which scalar of a training sample goes by which name."""

STANDARD = (
    "loss",
    "val/loss",
    "lr",
    "grad/global_norm",
    "grad/global_norm_clipped",
    "grad/clip_coef",
    "grad/max_norm",
    "grad/min_norm",
    "grad/mean_norm",
    "grad/has_nan",
    "grad/has_inf",
    "update/ratio",
    "weight/global_norm",
    "amp/scale",
    "health/rejected",
)
"""Every name that does not depend on the user's model."""


def metrics(sample: Sample) -> dict[str, float]:
    """What was measured, under flat names; nothing that was not.

    Example:
        >>> from trimtab.core.types import Layout
        >>> empty = Layout(names=(), kinds=(), numel=())
        >>> scalars = {"loss": 2.0, "grad_norm": 4.0, "clip_coef": 0.25}
        >>> metrics(Sample(step=0, layout=empty, table=np.empty((0, 7), np.float32), scalars=scalars))
        {'loss': 2.0, 'grad/global_norm': 4.0, 'grad/clip_coef': 0.25, 'grad/global_norm_clipped': 1.0}
    """
    scalars = sample.scalars
    if sample.phase == "val":
        out = {name: float(value) for name, value in scalars.items() if name.startswith("val/")}
        if "val_loss" in scalars:
            out["val/loss"] = float(scalars["val_loss"])
        return out
    out = {public: float(scalars[name]) for name, public in SCALARS.items() if name in scalars}
    norm, coef = scalars.get("grad_norm", math.nan), scalars.get("clip_coef", math.nan)
    if math.isfinite(norm) and math.isfinite(coef):
        out["grad/global_norm_clipped"] = float(norm * coef)
    if "lr" in scalars or "lr/0" in scalars:
        out["lr"] = float(scalars["lr"] if "lr" in scalars else scalars["lr/0"])
    out |= {name: float(value) for name, value in scalars.items() if name.startswith("lr/")}
    return out | _gradients(sample)


def _gradients(sample: Sample) -> dict[str, float]:
    norms = sample.col(Kind.GRAD, Column.L2).astype(np.float64)
    present = ~(norms < 0)  # a NaN is a measurement; ABSENT and FROZEN are not
    if not present.any():
        return {}
    norms = norms[present]

    def has(column: Column, looks: np.ndarray) -> float:
        """From the count where there is one; else from the norms, which are non-finite where a value is."""
        count = sample.col(Kind.GRAD, column)
        return float((count[present] > 0).any() if len(count) else looks.any())

    return {
        "grad/max_norm": float(norms.max()),
        "grad/min_norm": float(norms.min()),
        "grad/mean_norm": float(norms.mean()),
        "grad/has_nan": has(Column.NAN, np.isnan(norms)),
        "grad/has_inf": has(Column.INF, np.isinf(norms)),
    }


def layer_metrics(sample: Sample) -> dict[str, float]:
    """The gradient norm of each parameter that had one, and the mean where it was measured."""
    out: dict[str, float] = {}
    norms, means = sample.col(Kind.GRAD, Column.L2), sample.col(Kind.GRAD, Column.MEAN)
    for i, (name, norm) in enumerate(zip(sample.names(Kind.GRAD), norms.tolist(), strict=False)):
        if norm < 0:
            continue
        path = _path(name)
        out[f"{path}/norm"] = norm
        if len(means):
            out[f"{path}/mean"] = float(means[i])
    return out


def statistics_metrics(stats: Mapping[str, Any]) -> dict[str, float]:
    """The dictionary of `GradientHealthMonitor.check_gradients` under the same flat names.

    Example:
        >>> norms = {f"{name}_grad_norm": 2.0 for name in ("global", "max", "min", "mean")}
        >>> layers = {"0.weight": {"norm": 2.0, "mean": 0.1, "std": 0.5}}
        >>> flat = statistics_metrics({**norms, "has_nan": False, "has_inf": False, "layer_stats": layers})
        >>> list(flat)[5:]
        ['grad/has_inf', 'grad_layer/0/weight/norm', 'grad_layer/0/weight/mean', 'grad_layer/0/weight/std']
    """
    out = {f"grad/{name}_norm": float(stats[f"{name}_grad_norm"]) for name in ("global", "max", "min", "mean")}
    out |= {f"grad/{name}": float(stats[name]) for name in ("has_nan", "has_inf")}
    for name, layer in stats.get("layer_stats", {}).items():
        out |= {f"{_path(name)}/{what}": float(layer[what]) for what in ("norm", "mean", "std")}
    return out


def _path(name: str) -> str:
    return f"grad_layer/{name.replace('.', '/')}"
