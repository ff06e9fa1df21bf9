"""Steps that call back: gate after the user's closure ran, and undo what a line search did with bad values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trimtab.act.withhold import Owned
from trimtab.core.contain import Contained
from trimtab.sample import measure
from trimtab.sample.host import number

if TYPE_CHECKING:
    from trimtab.act.seam import Passenger


class ClosureGuard:
    """Wraps the closures of one optimizer.

    torch.optim's classes call it once, before anything else (LBFGS excepted): gating after that one call is exact.
    Others may call it several times or move weights first (LBFGS's line search, SAM). They are copied before the step
    and put back if it ends in non-finite weights. A class that is seen to call once, first, is not copied again.
    """

    def __init__(self, optimizer: Any, contained: Contained) -> None:
        self._optimizer, self._contained = optimizer, contained
        kind = type(optimizer)
        self._calls_once = kind.__module__.startswith("torch.optim") and "LBFGS" not in kind.__name__
        self._learning = not self._calls_once and "LBFGS" not in kind.__name__
        self._owned: Owned | None = None
        self._calls = 0
        self._moved_first = False

    def wrap(self, closure: Callable[[], Any], passenger: Passenger) -> Callable[[], Any]:
        """The closure the optimizer gets to call."""
        params = self._params()
        self._owned = None if self._calls_once else Owned(self._optimizer, params)
        self._calls, self._moved_first = 0, False
        versions = [p._version for p in params] if self._learning else []

        def guarded() -> Any:
            if self._calls == 0 and self._learning:
                self._moved_first = versions != [p._version for p in params]
            loss = closure()
            self._calls += 1
            if self._calls == 1:
                self._contained.call("measuring a step", self._called, loss, passenger)
            return loss

        return guarded

    @staticmethod
    def _called(loss: Any, passenger: Passenger) -> None:
        try:
            passenger.told(loss)
            passenger.before()
        except Exception:
            passenger.abandon()
            raise

    def finish(self, passenger: Passenger) -> None:
        """After the step: put everything back if it ended in non-finite weights, and learn how the class behaves."""
        owned, self._owned = self._owned, None
        if owned is None:
            return
        rejected = passenger.release()
        norm = number(measure.total(measure.wide_norms([measure.plain(p) for p in self._params()])))
        if rejected or not math.isfinite(norm):
            owned.restore()
            if not rejected:
                passenger.revoked()
        elif self._learning and self._calls == 1 and not self._moved_first:
            self._calls_once, self._learning = True, False
        elif self._learning and self._calls > 1:
            self._learning = False

    def _params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]
