"""Cut the learning rate as a multiplier around each step: no scheduler sees it, so none can undo or compound it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from trimtab.core.config import PolicyConfig
from trimtab.core.remedy import Rated
from trimtab.core.types import Action, Outcome
from trimtab.torchutil.optimizers import rates_of
from trimtab.torchutil.patch import wrap_method_of


class LrMultiplier:
    """What every group's LR is multiplied with during a step: 1, or less after a cut until it has recovered."""

    def __init__(self, optimizer: Optimizer, settings: PolicyConfig) -> None:
        self._optimizer: Any = optimizer
        self._settings = settings
        self._hold = 0
        self._saved: list[tuple[dict[str, Any], Any]] = []
        self._unshield: Callable[[], None] | None = None
        self._most: list[float] = []
        self.value = 1.0

    def cut(self, factor: float) -> float:
        """Multiply by `factor`, not below the floor; it stays there for the cool-down, then recovers step by step."""
        self.value = max(self.value * factor, self._settings.floor)
        self._hold = self._settings.cooldown
        self._shield()
        return self.value

    def limit(self, most: Sequence[float]) -> None:
        """From now on no group's rate above these, until its own schedule is back there; cuts come on top."""
        self._most = list(most)
        self._shield()

    def rates(self) -> list[float]:
        """The rates of all groups as the loop set them, within the limits in force; NaN where only a device knows."""
        out = []
        for i, rate in enumerate(rates_of(self._optimizer)):
            out.append(min(rate, self._most[i]) if i < len(self._most) and not math.isnan(self._most[i]) else rate)
        return out

    @property
    def limited(self) -> bool:
        """Whether a limit is in force."""
        return bool(self._most)

    @property
    def now(self) -> float:
        """What the highest rate is multiplied with in the coming step, limits included."""
        if not self._most:
            return self.value
        groups = self._optimizer.param_groups
        rates = [(g["lr"], m) for g, m in zip(groups, self._most, strict=False) if not isinstance(g["lr"], Tensor)]
        return self.value * float(min([1.0, *(m / lr for lr, m in rates if lr > m)]))

    @property
    def active(self) -> bool:
        """Whether any rate is cut or limited, or was in the step under way."""
        return self.value != 1.0 or bool(self._most) or bool(self._saved)

    def apply(self) -> None:
        """Before the step: put the cut rates into the groups."""
        if self.value == 1.0 and not self._most:
            return
        high = [self._is_high(i, group["lr"]) for i, group in enumerate(self._optimizer.param_groups)]
        if not any(high):
            self._most = []
        for i, group in enumerate(self._optimizer.param_groups):
            lr = group["lr"]
            self._saved.append((group, lr))
            most = self._most[i] if high[i] else None
            # a tensor LR gets a new tensor: the user's own is never written to
            bounded = lr if most is None else lr.clamp(max=most) if isinstance(lr, Tensor) else most
            group["lr"] = bounded * self.value

    def _is_high(self, group: int, lr: Any) -> bool:
        if group >= len(self._most) or math.isnan(self._most[group]):
            return False
        return not lr.is_cpu or bool(lr > self._most[group]) if isinstance(lr, Tensor) else lr > self._most[group]

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
        if self.value == 1.0 and not self._most:
            self.remove()

    def _shield(self) -> None:
        """While a cut is in force, undo it even when the step raises: a post-hook would not be called then."""
        if self._unshield is None:
            self._unshield = wrap_method_of(self._optimizer, "step", self._undone)

    def _undone(self, inner: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        try:
            return inner(*args, **kwargs)
        finally:
            self.undo()

    def remove(self) -> None:
        """Leave `optimizer.step` alone from now on."""
        self.undo()
        if self._unshield is not None:
            self._unshield()
            self._unshield = None

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"value": self.value, "hold": self._hold, "most": list(self._most)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.value, self._hold = float(state["value"]), int(state["hold"])
        self._most = [float(m) for m in state.get("most", ())]
        if self.value != 1.0 or self._most:
            self._shield()


class CutLR:
    """The remedy `cut_lr`: factor 0.5 after NaN, 0.1 after an explosion."""

    kind: ClassVar[str] = "cut_lr"

    def apply(self, action: Action, target: Rated, at: int) -> Outcome:
        """Cut the multiplier of the lane's optimizer."""
        before = target.multiplier.value
        factor = float(action.args.get("factor", 0.5))
        if target.rewound_at == at:
            factor = float(action.args.get("after_rewind", factor))
            if "after_rewind" in action.args and (factor == 1.0 or target.multiplier.limited):
                why = "the rate is held already" if target.multiplier.limited else "the rate is not the cause"
                return Outcome(at=at, action=action, applied=False, detail=f"the weights are back, and {why}")
        after = target.multiplier.cut(factor)
        rates = [float(g["lr"]) * after for g in target.optimizer.param_groups if not isinstance(g["lr"], Tensor)]
        now = f", effective LR {', '.join(f'{r:.3g}' for r in rates)}" if rates else ""
        return Outcome(
            at=at, action=action, applied=after < before, detail=f"LR multiplier {before:.3g} -> {after:.3g}{now}"
        )
