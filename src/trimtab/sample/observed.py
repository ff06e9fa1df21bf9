"""What hooks cannot see and the loop tells: losses of micro-batches, the batch, extra scalars."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import InputError
from trimtab.sample.transfer import is_here


def scalar_loss(loss: object, *, strict: bool) -> Tensor | float:
    """The loss as one detached number; `strict` wants a tensor, as `guard.step` does."""
    if isinstance(loss, Tensor):
        here = is_here(loss)
        if not here and loss.dtype is torch.float32 and not loss.dim():
            return loss.detach()  # the usual case on an accelerator
        if here and loss.is_floating_point() and loss.numel() == 1:
            return float(loss.item())  # now: what a loop does to the tensor afterwards is none of this step
        if loss.numel() != 1:
            raise InputError(
                f"the loss has shape {tuple(loss.shape)}; expected one number. "
                "Reduce it first, for example with loss.mean()."
            )
        if loss.is_complex():
            raise InputError(f"the loss is complex ({loss.dtype}); expected a real number, for example loss.abs()")
        if here:
            return float(loss.detach())
        return loss.detach().reshape(()) if loss.dim() else loss.detach()
    if strict or isinstance(loss, bool) or not isinstance(loss, int | float):
        raise InputError(
            f"the loss is a {type(loss).__name__}; expected the scalar tensor that backward() was called on. "
            "Pass the tensor itself, not loss.item()."
        )
    return float(loss)


def batch_size(batch: object) -> int | None:
    """How many samples a batch holds: the first dimension of the first tensor in it."""
    if batch is None:
        return None
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((n for part in parts if (n := batch_size(part)) is not None), None)


class Observed:
    """Losses told since the last step. Two optimizers stepping on one backward share them; a new one clears them."""

    def __init__(self) -> None:
        self._losses: list[Tensor | float] = []
        self._scalars: dict[str, Tensor | float] = {}
        self._round = 0
        self._used = self._ignores = False
        self._last: weakref.ref[Tensor] | None = None  # weak: a loss can hold a whole graph
        self.num_losses = 0
        """How many were ever told."""
        self.on_loss: Callable[[Tensor], None] = _ignore
        self.on_batch: Callable[[Any], None] = _ignore

    def told(
        self, loss: object, batch: object, scalars: Mapping[str, object], strict: bool, *, returned: bool = False
    ) -> None:
        """Check and keep what was told. The first word after a step starts a new round.

        The same loss object told twice for one step (observed, then stepped on) counts once. One that was `returned`
        by a closure may be detached: `backward` was called on it before.
        """
        if self._ignores:
            return
        value = None if loss is None and not strict else scalar_loss(loss, strict=strict)
        extra = {key: scalar_loss(v, strict=False) for key, v in scalars.items()} if scalars else None
        if batch is not None and (size := batch_size(batch)) is not None:
            extra = {**(extra or {}), "batch_size": float(size)}
        if self._used:
            self._losses, self._scalars, self._used, self._last = [], {}, False, None
            self._round += 1
        if batch is not None:
            self.on_batch(batch)
        if value is not None and (self._last is None or self._last() is not loss):  # else it was told already
            self._losses.append(value)
            self.num_losses += 1
            if isinstance(loss, Tensor):
                if not returned or not loss.is_leaf:
                    self.on_loss(loss)
                self._last = weakref.ref(loss)
            else:
                self._last = None
        if extra:
            self._scalars.update(extra)

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Inside, nothing that is told counts: steps are run that are none of the loop's."""
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    @property
    def last_loss(self) -> Tensor | None:
        """The tensor that was told last, while it is there."""
        return None if self._last is None else self._last()

    def losses(self) -> list[Tensor | float]:
        """The losses of the micro-batches of this step."""
        return list(self._losses)

    def take(self, seen: int) -> tuple[int, Tensor | float | None, dict[str, Tensor | float]]:
        """The round, the mean loss and the scalars, for a step that last took round `seen`; nothing if not new."""
        if self._round == seen or not (self._losses or self._scalars):
            return seen, None, {}
        self._used = True
        losses = self._losses
        return self._round, losses[0] if len(losses) == 1 else _mean(losses), dict(self._scalars)


def _ignore(value: object) -> None:
    """Nobody listens."""


def _mean(losses: list[Tensor | float]) -> Tensor | float | None:
    if not losses:
        return None
    if len(losses) == 1:
        return losses[0]
    if any(isinstance(loss, Tensor) for loss in losses):
        first = next(loss for loss in losses if isinstance(loss, Tensor))
        same = [torch.as_tensor(loss, dtype=torch.float32, device=first.device) for loss in losses]
        return torch.stack(same).mean()
    return sum(float(loss) for loss in losses) / len(losses)


def before_their_clipping(scalars: dict[str, Any]) -> dict[str, Any]:
    """The loop clips by itself, and told the norm before: that is the gradient's, and both clippings count as one."""
    before, after = scalars.pop("norm_before"), scalars.get("grad_norm", math.nan)
    scalars.pop("handed", None)  # the same thing, estimated
    if not math.isnan(after) and not after > before * (1 + 1e-3):  # else it was not of these gradients
        scalars["grad_norm"] = before
        if 0 < before < math.inf:
            scalars["clip_coef"] = min(after / before, 1.0) * scalars.get("clip_coef", 1.0)
    return scalars
