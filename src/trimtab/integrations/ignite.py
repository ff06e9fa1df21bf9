"""Ignite: `trimtab.ignite.GuardHandler(model, optimizer).attach(trainer, evaluator)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.core.types import Finding
from trimtab.guard.guard import Guard
from trimtab.integrations.training_guard import TrainingGuard, missing
from trimtab.torchutil.patch import wrap_on_object

try:
    from ignite.engine import Events
except ImportError as error:
    raise missing("pytorch-ignite", "ignite") from error


class GuardHandler:
    """Guards what an Ignite engine trains.

    An engine's function calls `backward` itself: the loss is taken there. The norm is that before the function's own
    `clip_grad_norm_`. As an object with `state_dict` it goes into `Checkpoint(to_save={..., "guard": handler})`.

    Args:
        model: A module, or a dict of modules.
        optimizer: One optimizer, or a list or dict of them.
        scaler: The `GradScaler`, if there is one.
        gradient_accumulation_steps: What the engine's function divides each loss by.
        validation: Name of the evaluator's loss; None finds one with `loss` in it.
        settings: Other keywords of `trimtab.Guard`.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        scaler: Any = None,
        gradient_accumulation_steps: int = 1,
        validation: str | None = None,
        **settings: Any,
    ) -> None:
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._times, self._validation = gradient_accumulation_steps, validation
        self._engine: Any = None
        self._training = TrainingGuard("Ignite", settings, self._stop)

    @property
    def guard(self) -> Guard | None:
        """The guard of the training; None before it begins."""
        return self._training.guard

    @property
    def findings(self) -> list[Finding]:
        """What was found so far."""
        return self._training.findings

    def _stop(self) -> None:
        self._engine.terminate()

    def attach(self, engine: Any, evaluator: Any = None) -> None:
        """Guard this engine whenever it runs, and judge what the evaluator finds."""
        self._engine = engine
        engine.add_event_handler(Events.STARTED, self._begin)
        if evaluator is not None:
            evaluator.add_event_handler(Events.COMPLETED, self._validated)
        wrap_on_object(engine, "run", self._run)

    def _run(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Not by an event: a handler of EXCEPTION_RAISED would keep the exception from the caller.
        try:
            out = inner(*args, **kwargs)
        except BaseException as error:
            self._training.end(error)
            raise
        self._training.end()
        return out

    def _begin(self, engine: Any) -> None:
        self._training.begin(
            self._model, self._optimizer, steps_left=lambda: self._steps_left(engine.state), scaler=self._scaler
        )
        if self.guard is not None:
            self.guard.watch_losses(self._times)

    def _steps_left(self, state: Any) -> float | None:
        if not state.max_epochs or not state.epoch_length:
            return None
        return float(state.max_epochs * state.epoch_length - state.iteration) / self._times

    def _validated(self, evaluator: Any) -> None:
        name = None if self._validation is None else f"val_{self._validation}"
        self._training.validated({f"val_{key}": value for key, value in evaluator.state.metrics.items()}, name)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self._training.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there when training begins."""
        self._training.load_state_dict(state_dict)
