"""MODE002: the loss leads nowhere: no gradient can come from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Column, Finding, Kind, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGrad:
    """The loss leads nowhere: no gradient can come from it.

    ## What it sees
    No parameter got a gradient in `persist` steps, and either the model was called with gradients switched off or the
    loss that was told is cut off from any graph.

    ## Why it matters
    Nothing is learned. `loss.detach()`, `loss.data`, `torch.tensor(loss)`, a forward under `no_grad` or
    `inference_mode` do this without an error.

    ## What to try
    1. Remove the `no_grad`, `inference_mode` or `detach` around the training forward pass and the loss.
    2. Do not build a new tensor from a loss: it has no history.
    3. Check that `set_grad_enabled(False)` of a validation is undone.
    """

    code: ClassVar[str] = "MODE002"
    name: ClassVar[str] = "no-grad"
    needs: ClassVar[tuple[str, ...]] = ("no_grad_forward", "loss_detached", "no_grad_error")
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    persist: int = 2

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when there is no gradient and no way to one."""
        if window.scalar("no_grad_error"):
            yield found(self, window, f"{': '.join(window.now.notes.get('exception', ()))}", ("loss",))
            return
        if not self._cut(window.now.scalars) or len(window.past) < self.persist - 1:
            return
        norms = window.now.col(Kind.GRAD, Column.L2)
        if not (norms < 0).all() and not window.scalar("same_gradients"):  # a NaN is a gradient, too
            return
        if not all(self._cut(s) for s in list(window.past)[len(window.past) - self.persist + 1 :]):
            return
        why = (
            "the model is called with gradients switched off"
            if window.scalar("no_grad_forward")
            else "the loss has no graph"
        )
        yield found(self, window, f"no parameter gets a gradient: {why}.", ("loss",))

    @staticmethod
    def _cut(scalars: Mapping[str, float]) -> bool:
        return bool(scalars.get("no_grad_forward") or scalars.get("loss_detached"))
