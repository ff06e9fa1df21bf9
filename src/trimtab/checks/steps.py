"""The observed steps in lines: batch, loss, gradient norm, health, scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trimtab.checks.events import Call
from trimtab.checks.leaves import is_label_like, leaves
from trimtab.checks.roles import Roles

NUM_LABELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One observed call, in numbers that can be printed and written as JSON."""

    step: int
    batch: tuple[str, ...]
    labels: tuple[int, ...]
    num_ignored: int
    num_labels: int
    loss: float | None
    requires_grad: bool
    loss_device: str
    grad_norm: float | None
    norm_after_clip: float | None
    nonzero: int
    zero: int
    total: int
    nonfinite: int
    largest: float
    smallest: float
    scale: float | None
    seconds: float
    failure: str

    def lines(self, *, gradients: bool = True) -> Iterator[str]:
        """As the sanity tool prints it."""
        yield f"Step {self.step}: batch {'; '.join(self.batch) or 'without tensors'}"
        if self.labels:
            left_out = f" ({self.num_ignored} of {self.num_labels} are ignored)" if self.num_ignored else ""
            yield f"  labels {list(self.labels)}{left_out}"
        if self.failure:
            yield f"  {self.failure}"
            return
        told = "none returned" if self.loss is None else f"{self.loss:.6f}"
        yield f"  loss {told}, requires_grad {self.requires_grad}, device {self.loss_device or 'unknown'}"
        if not gradients:
            return
        if self.grad_norm is None:
            yield "  no optimizer step in this call"
            return
        yield (
            f"  [GRAD] Step {self.step:4d} | Global: {self.grad_norm:.2e} | Zero: {self.zero}/{self.total} | "
            f"NaN/Inf: {self.nonfinite}/{self.total} | Range: [{self.smallest:.2e}, {self.largest:.2e}]"
        )
        yield f"  Gradient health: {self.nonzero}/{self.total} non-zero, {self.nonfinite} NaN/Inf"
        after = self.norm_after_clip
        if after is not None and after != self.grad_norm:
            yield f"  norm after clip {after:.4g}"
        if self.scale is not None:
            yield f"  scaler scale {self.scale:g}"


def view(call: Call, batch: Any, roles: Roles | None = None) -> StepView:
    """Put one call into numbers."""
    found = list(leaves(batch))
    labels = _labels(call, dict(found), roles)
    kept = None if labels is None else labels[labels != call.facts.ignore_index]
    norms = [v for e in call.of("step") for v in e.facts["gradients"].norms.values()]
    there = [v for v in norms if v is not None]
    finite = [v for v in there if math.isfinite(v)]
    failure = call.failure
    return StepView(
        step=call.index,
        batch=tuple(
            f"{p or 'x'} {list(t.shape)} {str(t.dtype).removeprefix('torch.')} {t.device}" for p, t in found[:6]
        ),
        labels=() if kept is None else tuple(int(v) for v in kept[:NUM_LABELS].tolist()),
        num_ignored=0 if labels is None or kept is None else labels.numel() - kept.numel(),
        num_labels=0 if labels is None else labels.numel(),
        loss=call.loss,
        requires_grad=call.requires_grad,
        loss_device=call.loss_device,
        grad_norm=call.norm_before,
        norm_after_clip=call.norm_after,
        nonzero=sum(v != 0 for v in there),
        zero=sum(not v for v in norms),
        total=len(norms),
        nonfinite=len(there) - len(finite),
        largest=max(finite, default=0.0),
        smallest=min(finite, default=0.0),
        scale=call.scale,
        seconds=call.seconds,
        failure=f"{failure.kind} in {failure.phase}: {failure.text[:200]}" if failure is not None else "",
    )


def _labels(call: Call, batch: dict[str, Tensor], roles: Roles | None) -> Tensor | None:
    """What the loss compared with, as a row of whole numbers; None where it had none, or nobody can say.

    The first whole numbers of a batch are as often tokens as labels: only the loss knows. Where it was never reached,
    or is written by hand, the target that the contract names is taken, then what scores were picked by.
    """
    facts = call.facts
    seen = [t for t in facts.targets if _is_class(t, facts.kind)]
    if not seen and roles is not None and roles.sure:
        seen = [batch[path] for path in roles.targets if path in batch and is_label_like(batch[path])]
    return next((t.detach().reshape(-1) for t in (*seen, *facts.picked) if t.numel() and not t.is_meta), None)


def _is_class(target: Tensor, kind: str) -> bool:
    if target.is_floating_point():  # a binary cross-entropy takes its classes as 0.0 and 1.0
        return kind.startswith("bce") and bool((target == target.round()).all())
    return not target.is_complex()
