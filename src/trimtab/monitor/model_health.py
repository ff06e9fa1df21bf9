"""The health of a run in five booleans, and its numbers in one dictionary: the documented questions to a trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trimtab.guard.recording import HEALTH_PARTS
from trimtab.monitor.nonfinite import find_nonfinite
from trimtab.monitor.norms import compute_global_gradient_norm
from trimtab.sample.transfer import number
from trimtab.torchutil.optimizer_argument import labelled

log = logging.getLogger("trimtab")

HEALTH_KEYS = (*HEALTH_PARTS, "overall_healthy")
"""The keys of the documented dictionary, the same that `Guard.health()` uses."""
RECENT = 100
Losses = Iterable[Tensor | float] | Mapping[str, Iterable[Tensor | float]]


def monitor_training_health(
    model: nn.Module,
    losses: Losses = (),
    optimizer: Any = None,
    *,
    training: bool | None = True,
    recent: int = RECENT,
) -> dict[str, bool]:
    """Healthy or not, part by part; what is wrong is logged by name. Changes nothing.

    - `gradients_healthy`: no gradient holds a NaN or Inf.
    - `losses_healthy`: none of the last `recent` losses is NaN or Inf. `losses` is a list, or one list by name.
    - `parameters_healthy`: no parameter holds a NaN or Inf.
    - `model_healthy`: no buffer (running statistics, say) holds a NaN or Inf; the model is in the mode that `training`
      says, so that a model left in evaluation mode is seen (None asks nothing); and the optimizer, where one or several
      are given, holds every trainable parameter of the model and none that has left it.
    - `overall_healthy`: all of them.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> monitor_training_health(model, losses=[0.7, float("nan")])["losses_healthy"]
        False
        >>> monitor_training_health(model, losses=[0.7])["overall_healthy"]
        True
    """
    gradients = [(f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]
    parameters = [(f"parameter {name}", p) for name, p in model.named_parameters()]
    buffers = [(f"buffer {name}", b) for name, b in model.named_buffers()]
    bad = find_nonfinite([*gradients, *parameters, *buffers])  # together: one transfer
    troubles: dict[str, list[str]] = {
        "gradients_healthy": [name for name, _ in gradients if name in bad],
        "losses_healthy": _bad_losses(losses, recent),
        "parameters_healthy": [name for name, _ in parameters if name in bad],
        "model_healthy": [
            *(name for name, _ in buffers if name in bad),
            *_mode(model, training),
            *(mismatch(model, optimizer) if optimizer is not None else ()),
        ],
    }
    for part, found in troubles.items():
        if found:
            log.warning("%s is False: %s", part, "; ".join(found[:8]))
    report = {part: not troubles[part] for part in HEALTH_PARTS}
    return report | {"overall_healthy": all(report.values())}


def _bad_losses(losses: Losses, recent: int) -> list[str]:
    families = losses if isinstance(losses, Mapping) else {"": losses}
    out = []
    for name, values in families.items():
        known = [number(v) for v in values][-recent:]
        bad = sum(not math.isfinite(v) for v in known)
        if bad:
            out.append(f"{bad} of the last {len(known)} {f'{name} ' if name else ''}losses are NaN or Inf")
    return out


def _mode(model: nn.Module, training: bool | None) -> list[str]:
    if training is None or model.training == training:
        return []
    return [f"the model is in {'training' if model.training else 'evaluation'} mode"]


def mismatch(model: nn.Module, optimizer: Any) -> list[str]:
    """What the optimizer misses of the model, and what it moves that is no longer there."""
    named = dict(model.named_parameters())
    mine = {id(p) for p in named.values()}
    held = {id(p): p for o in labelled(optimizer).values() for g in o.param_groups for p in g["params"]}
    missed = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    foreign = sum(key not in mine for key in held)
    out = [f"the optimizer does not hold {', '.join(missed[:4])}"] if missed else []
    return out + ([f"the optimizer holds {foreign} parameters that are not the model's"] if foreign else [])


def get_training_stats(
    model: nn.Module,
    optimizer: Any = None,
    *,
    training_history: Sequence[Any] = (),
    validation_history: Sequence[Any] = (),
    scaler: Any = None,
    amp_enabled: bool | None = None,
    learning_rate: float | None = None,
) -> dict[str, Any]:
    """The documented numbers of a run, in one dictionary.

    The rate and decay are those of the first parameter group; a rate that is cut around the steps cannot be read from
    it, so who knows better says so with `learning_rate`. Without a scaler pass `amp_enabled` for bfloat16.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> stats = get_training_stats(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01))
        >>> stats["current_learning_rate"], stats["current_weight_decay"], stats["total_parameters"]
        (0.1, 0.01, 3)
    """
    groups = [g for o in labelled(optimizer).values() for g in o.param_groups] if optimizer is not None else []
    rate = learning_rate if learning_rate is not None else _first(groups, "lr")
    first = next(model.parameters(), None)
    enabled = bool(scaler.is_enabled()) if scaler is not None else False
    return {
        "training_history": list(training_history),
        "validation_history": list(validation_history),
        "current_learning_rate": rate,
        "current_weight_decay": _first(groups, "weight_decay"),
        "total_parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "device": str(first.device) if first is not None else "cpu",
        "amp_enabled": enabled if amp_enabled is None else amp_enabled,
        "current_gradient_norm": compute_global_gradient_norm(model),
    }


def _first(groups: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((number(g[key]) for g in groups if g.get(key) is not None), None)
