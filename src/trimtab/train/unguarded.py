"""The control arm: the same face as a guard, and nothing behind it but the optimizer."""

from __future__ import annotations

from typing import Any


class Unguarded:
    """Steps the optimizer as a plain loop would: no clipping, no rejection, no record, no checkpoint.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> bare = Unguarded(torch.optim.SGD([weight], lr=1.0))
        >>> (weight * float("nan")).sum().backward()
        >>> bare.step(None)
        >>> bare.rejected, bool(weight.isnan())
        (0, True)
    """

    def __init__(self, optimizer: Any, scaler: Any = None) -> None:
        self._optimizer, self._scaler = optimizer, scaler
        self.findings: list[Any] = []
        self.rejected = 0
        self.run_dir = None

    def step(self, loss: Any, batch: Any = None) -> None:
        """Step, whatever the gradients hold."""
        if self._scaler is None:
            self._optimizer.step()
            return
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def observe(self, loss: Any = None, batch: Any = None, **scalars: Any) -> None:
        """Nobody looks."""

    def validate(self, loss: Any, **metrics: Any) -> None:
        """Nobody looks."""

    def close(self, reason: str = "closed") -> None:
        """Nothing to close."""
