"""Composer: `Trainer(..., algorithms=[trimtab.composer.GuardAlgorithm()])`.

Its events and attributes are those of the source of Composer 0.33 (640518880); it was not run: Composer cannot be
installed beside the PyTorch that is tested here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.core.types import Finding
from trimtab.guard.guard import Guard
from trimtab.integrations.training_guard import TrainingGuard, missing

try:
    from composer.core import Algorithm, Event
except ImportError as error:
    raise missing("mosaicml (composer)", "composer") from error


class GuardAlgorithm(Algorithm):
    """Guards the training of a Composer `Trainer`.

    Put it first among the algorithms: gradients are unscaled at `AFTER_TRAIN_BATCH`, where `GradientClipping` runs.

    Args:
        settings: Keywords of `trimtab.Guard`.
    """

    def __init__(self, **settings: Any) -> None:
        self._state: Any = None
        self._training = TrainingGuard("Composer", settings, self._stop)

    @property
    def guard(self) -> Guard | None:
        """The guard of the training; None before it begins."""
        return self._training.guard

    @property
    def findings(self) -> list[Finding]:
        """What was found so far."""
        return self._training.findings

    def _stop(self) -> None:
        self._state.stop_training()

    def match(self, event: Any, state: Any) -> bool:
        """The events that it acts on."""
        return event in (
            Event.FIT_START,
            Event.AFTER_LOSS,
            Event.AFTER_TRAIN_BATCH,
            Event.EVAL_END,
            Event.FIT_END,
        )

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        """Tell the guard."""
        self._state = state
        if event == Event.FIT_START:
            self._training.begin(state.model, list(state.optimizers), scaler=getattr(state, "scaler", None))
        elif event == Event.AFTER_LOSS:
            self._training.loss(total_of(state.loss), state.batch)
        elif event == Event.AFTER_TRAIN_BATCH:
            for optimizer in state.optimizers:
                self._training.clips(optimizer)
        elif event == Event.EVAL_END:
            for metrics in state.eval_metrics.values():
                found = {f"val_{name}": metric.compute() for name, metric in metrics.items()}
                self._training.validated(found)
        else:
            self._training.end()

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's checkpoint keeps."""
        return self._training.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = False) -> None:
        """Go on from there when training begins."""
        self._training.load_state_dict(state)


def total_of(loss: Any) -> Any:
    """What Composer will call `backward` on: of several losses the one called total, or the sum of their means."""
    if isinstance(loss, Mapping):
        if "total" in loss:
            return loss["total"]
        loss = tuple(loss.values())
    if isinstance(loss, list | tuple):
        return sum(one.mean() for one in loss)
    return loss
