"""Cut the learning rate as a multiplier around each step: no scheduler sees it, so none can undo or compound it."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from trimtab.core.config import PolicyConfig
from trimtab.core.types import Action, Outcome


class LrMultiplier:
    """What every group's LR is multiplied with during a step: 1, or less after a cut until it has recovered."""

    def __init__(self, optimizer: Optimizer, settings: PolicyConfig) -> None:
        self._optimizer: Any = optimizer
        self._settings = settings
        self._hold = 0
        self._saved: list[tuple[dict[str, Any], Any]] = []
        self._shim: Any = None
        self._shimmed: Any = None
        self.value = 1.0

    def cut(self, factor: float) -> float:
        """Multiply by `factor`, not below the floor; it stays there for the cool-down, then recovers step by step."""
        self.value = max(self.value * factor, self._settings.floor)
        self._hold = self._settings.cooldown
        self._shield()
        return self.value

    def apply(self) -> None:
        """Before the step: put the cut rates into the groups."""
        if self.value == 1.0:
            return
        for group in self._optimizer.param_groups:
            lr = group["lr"]
            self._saved.append((group, lr))
            group["lr"] = lr * self.value  # a tensor LR gets a new tensor: the user's own is never written to

    def undo(self) -> None:
        """After the step, whether it went well or raised: put the scheduler's rates back."""
        for group, lr in self._saved:
            group["lr"] = lr
        self._saved.clear()

    def recover(self) -> None:
        """One quiet step passed."""
        if self.value == 1.0:
            return
        if self._hold > 0:
            self._hold -= 1
            return
        self.value = min(1.0, self.value * 10.0 ** (1.0 / self._settings.recover))
        if self.value == 1.0:
            self.remove()

    def _shield(self) -> None:
        """While a cut is in force, undo it even when the step raises: a post-hook would not be called then."""
        if self._shim is not None:
            return
        inner = self._optimizer.step

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            finally:
                self.undo()

        self._shimmed = self._optimizer.__dict__.get("step")
        # A bound method carrying the inner one's marks: LR schedulers look for both on `optimizer.step`.
        marked: Any = functools.wraps(inner)(step)
        del marked.__wrapped__  # a GradScaler reads the signature, and fails where bound methods wrap each other
        self._shim = types.MethodType(marked, self._optimizer)
        self._optimizer.step = self._shim

    def remove(self) -> None:
        """Take the shim off `optimizer.step`, unless somebody wrapped it since: then it stays and does nothing."""
        self.undo()
        if self._shim is not None and self._optimizer.__dict__.get("step") is self._shim:
            if self._shimmed is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._shimmed
        self._shim = self._shimmed = None

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"value": self.value, "hold": self._hold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.value, self._hold = float(state["value"]), int(state["hold"])
        if self.value != 1.0:
            self._shield()


class CutLR:
    """The remedy `cut_lr`: factor 0.5 after NaN, 0.1 after an explosion."""

    kind: ClassVar[str] = "cut_lr"

    def apply(self, action: Action, target: Any, at: int) -> Outcome:
        """Cut the multiplier of the lane's optimizer."""
        before = target.multiplier.value
        after = target.multiplier.cut(float(action.args.get("factor", 0.5)))
        rates = [_rate(g["lr"]) * after for g in target.optimizer.param_groups if not isinstance(g["lr"], Tensor)]
        now = f", effective LR {', '.join(f'{r:.3g}' for r in rates)}" if rates else ""
        return Outcome(
            at=at, action=action, applied=after < before, detail=f"LR multiplier {before:.3g} -> {after:.3g}{now}"
        )


def _rate(lr: Any) -> float:
    return float(lr)
