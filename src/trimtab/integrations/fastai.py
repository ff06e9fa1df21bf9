"""fastai: `learn.fit(5, cbs=trimtab.fastai.GuardCallback())`; its own optimizers, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trimtab.core.types import Finding
from trimtab.guard.guard import Guard
from trimtab.integrations.training_guard import Attach, TrainingGuard, missing
from trimtab.torchutil.patch import wrap_on_object

try:
    from fastai.callback.core import Callback, CancelFitException
except ImportError as error:
    raise missing("fastai", "fastai") from error


class GuardCallback(Callback):
    """Guards the training of a `Learner`.

    It sees the norm before `GradientClip`, the loss of every batch as it was before `GradientAccumulation` divides it,
    and the validation loss.

    Args:
        attach: Makes the guard; None: `trimtab.Guard`.
        settings: Keywords of `trimtab.Guard`.
    """

    order = 60  # after the recorder, which knows the validation loss

    def __init__(self, *, attach: Attach | None = None, **settings: Any) -> None:
        super().__init__()
        self._training = TrainingGuard("fastai", settings, self._stop, attach)
        self._stopping = False

    @property
    def guard(self) -> Guard | None:
        """The guard of the training; None before it begins."""
        return self._training.guard

    @property
    def findings(self) -> list[Finding]:
        """What was found so far."""
        return self._training.findings

    def _stop(self) -> None:
        self._stopping = True

    def before_fit(self) -> None:
        """Guard the model and its optimizer."""
        learn, self._stopping = self.learn, False
        if hasattr(learn, "lr_finder") or hasattr(self, "gather_preds"):
            return  # neither of them trains
        inner = getattr(learn.opt, "opt", None)  # one of PyTorch's, in a wrapper
        optimizer = inner if isinstance(inner, torch.optim.Optimizer) else learn.opt
        accumulates = any(type(cb).__name__ == "GradientAccumulation" for cb in learn.cbs)
        self._training.begin(
            learn.model,
            optimizer,
            steps_left=None if accumulates else lambda: learn.n_epoch * len(learn.dls.train),
            scaler=getattr(learn, "scaler", None),
        )
        if self.guard is not None:
            self.guard.also_remove(wrap_on_object(learn, "one_batch", self._one_batch))

    def _one_batch(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except Exception as error:
            if not type(error).__name__.startswith("Cancel"):  # fastai's own way to skip the rest of something
                self._training.end(error)  # no event tells of it
            raise

    def after_loss(self) -> None:
        """Tell the loss and the batch."""
        if self.training:
            self._training.loss(self.learn.loss, (*self.learn.xb, *self.learn.yb))

    def after_batch(self) -> None:
        """End the training where a remedy wants it."""
        if self._stopping:
            raise CancelFitException()

    def after_epoch(self) -> None:
        """Judge a validation."""
        recorder = getattr(self.learn, "recorder", None)
        if recorder is None or not recorder.values:
            return
        names = list(recorder.metric_names)[1:]  # the first is the epoch
        values = dict(zip(names, recorder.values[-1], strict=False))
        if "valid_loss" in values:
            told = {k: v for k, v in values.items() if k != "train_loss" and isinstance(v, int | float)}
            self._training.validated(told, "valid_loss")

    def after_fit(self) -> None:
        """Close the guard."""
        self._training.end()

    def state_dict(self) -> dict[str, Any]:
        """To be saved beside `learn.save`."""
        return self._training.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there when training begins."""
        self._training.load_state_dict(state_dict)
