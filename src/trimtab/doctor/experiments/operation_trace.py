"""Looks at single operations of one pass: dropout that is drawn in evaluation, columns that meet rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.doctor.batch_tensors import fresh
from trimtab.doctor.probe import Probe
from trimtab.doctor.target import raw_loss

DROPS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class _Drops(TorchFunctionMode):
    """Notes every functional dropout that is really drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in DROPS:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            if p and training:
                self.seen.append(f"F.{name} with p = {p} and training = {training}")
        elif name == "scaled_dot_product_attention":
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if p:
                self.seen.append(f"scaled_dot_product_attention with dropout_p = {p}")
        return func(*args, **kwargs)


def dropout_in_eval(probe: Probe) -> list[str]:
    """Dropout that is drawn though the model is in evaluation mode; nothing where that could not be tried."""
    if not probe.through or not probe.ours:
        return []
    mode = _Drops()
    try:
        with probe.trial(rates=False):
            probe.model.eval()
            with torch.no_grad(), mode:
                raw_loss(probe.target, fresh(probe.batch(0)))
            return mode.seen if not any(m.training for m in probe.model.modules()) else []
    except Exception:
        return []


class _Columns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes subtractions of a column [B, 1] and a row [B], of which one has a graph and the other has not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pair = [a for a in args[:2] if isinstance(a, Tensor)]
        if len(pair) == 2 and func.overloadpacket.__name__ in ("sub", "rsub"):
            a, b = sorted(pair, key=Tensor.dim, reverse=True)
            if a.dim() == 2 and b.dim() == 1 and a.shape[1] == 1 and a.shape[0] == b.shape[0] > 1:
                self.seen.append(f"{tuple(a.shape)} minus {tuple(b.shape)} gives {(a.shape[0], b.shape[0])}")
        return func(*args, **(kwargs or {}))


def broadcasts(probe: Probe) -> list[str] | None:
    """Where a column meets a row in a step; None where it could not be looked at."""
    mode = _Columns()
    try:
        with probe.trial(rates=False), mode:
            raw_loss(probe.target, fresh(probe.batch(0)))
    except Exception:
        return None
    return mode.seen
