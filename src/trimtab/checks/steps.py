"""The observed steps in lines: batch, loss, gradient norm, health, scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trimtab.checks.events import Call
from trimtab.checks.leaves import is_label_like, leaves

NUM_LABELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One observed call, in numbers that can be printed and written as JSON."""

    step: int
    batch: tuple[str, ...]
    labels: tuple[int, ...]
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
            yield f"  labels {list(self.labels)}"
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


def view(call: Call, batch: Any) -> StepView:
    """Put one call into numbers."""
    found = list(leaves(batch))
    labels = next((t for _, t in found if is_label_like(t) and t.numel()), None)
    norms = [v for e in call.of("step") for v in e.facts["gradients"].norms.values()]
    there = [v for v in norms if v is not None]
    finite = [v for v in there if math.isfinite(v)]
    failure = call.failure
    return StepView(
        step=call.index,
        batch=tuple(
            f"{p or 'x'} {list(t.shape)} {str(t.dtype).removeprefix('torch.')} {t.device}" for p, t in found[:6]
        ),
        labels=tuple(int(v) for v in labels.reshape(-1)[:NUM_LABELS].tolist()) if labels is not None else (),
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
