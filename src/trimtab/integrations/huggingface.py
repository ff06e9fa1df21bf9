"""Hugging Face: `Trainer(..., callbacks=[trimtab.hf.GuardCallback()])`; the trainers of TRL and PEFT models, too."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trimtab.core.types import Finding, Record, Sample
from trimtab.guard.guard import Guard
from trimtab.integrations.training_guard import Attach, TrainingGuard, missing
from trimtab.torchutil.patch import wrap_method_of

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise missing("transformers", "hf") from error


class BareCallback(TrainerCallback):
    """Guards the training of a Hugging Face `Trainer`, and changes nothing in its log and its checkpoints.

    Args:
        trainer: The trainer; None: whichever has this callback when training begins.
        attach: Makes the guard; None: `trimtab.Guard`.
        settings: Keywords of `trimtab.Guard`.
    """

    def __init__(self, *, trainer: Any = None, attach: Attach | None = None, **settings: Any) -> None:
        super().__init__()
        self._training = TrainingGuard("Hugging Face Trainer", settings, self._stop, attach)
        self._stopping = False
        self._trainer: Callable[[], Any] = _nobody if trainer is None else weakref.ref(trainer)

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

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Weights, optimizer and state are restored by now: guard them."""
        self._stopping = False
        trainer = self._trainer()
        if trainer is None and (trainer := _trainer_with(self)) is not None:
            self._trainer = weakref.ref(trainer)  # it has this callback, and lives longer
        limit = args.max_grad_norm
        self._resume(state)
        self._training.begin(
            model,
            optimizer,
            theirs=f"max_grad_norm={limit}" if limit else "",
            steps_left=lambda: state.max_steps - state.global_step,
            scaler=getattr(getattr(trainer, "accelerator", None), "scaler", None),
        )
        if trainer is None:
            self._training.notice("the trainer was not found: losses are not seen")
        elif self.guard is not None:
            self.guard.also_remove(wrap_method_of(trainer, "training_step", self._training_step))

    def _training_step(self, inner: Callable[..., Any], *given: Any, **kwargs: Any) -> Any:
        try:
            loss = inner(*given, **kwargs)
        except BaseException as error:
            self._training.end(error)  # no event tells of it
            raise
        trainer = self._trainer()
        if isinstance(loss, Tensor) and trainer is not None:
            # Each is divided, or normalized over all of them, so that they add up to the loss of the step.
            usual = trainer.args.gradient_accumulation_steps
            self._training.loss(loss.detach() * getattr(trainer, "current_gradient_accumulation_steps", usual))
        return loss

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the training where a remedy wants it."""
        if self._stopping:
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any = None, **kwargs: Any) -> None:
        """Judge an evaluation."""
        if metrics:
            self._training.validated(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the guard."""
        self._training.end()

    def _resume(self, state: Any) -> None:
        """Take up what a checkpoint of the trainer has of this guard."""


class GuardCallback(BareCallback, ExportableState):
    """Guards the training of a Hugging Face `Trainer` or of a class made from it.

    It sees the gradients' norm before `max_grad_norm` clips, the loss of every step, and evaluations. Its state is part
    of the trainer's checkpoints: `resume_from_checkpoint` goes on with it. A loss that is not finite stays in the log,
    where the trainer would replace it by an average.

    Args:
        settings: Keywords of `trimtab.Guard`.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._nonfinite = _Nonfinite()
        super().__init__(**{**settings, "sinks": [*settings.get("sinks", ()), self._nonfinite]})

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **kwargs: Any) -> None:
        """Put back the loss that `logging_nan_inf_filter` took out."""
        if not logs or "loss" not in logs:
            return
        if self.guard is not None and self._training.running:
            self.guard.flush()
        if self._nonfinite.take():
            logs["loss"] = math.nan
            for entry in state.log_history[-1:]:
                if "loss" in entry:
                    entry["loss"] = math.nan

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the trainer's checkpoint keeps."""
        plain = {k: v for k, v in self._settings.items() if isinstance(v, str | int | float | bool)}
        return {"args": plain, "attributes": {"saved": self._training.state_dict()}}

    @property
    def saved(self) -> dict[str, Any]:
        """The state in the checkpoint."""
        return self._training.state_dict()

    @saved.setter
    def saved(self, state: Mapping[str, Any]) -> None:
        self._training.load_state_dict(state)

    def _resume(self, state: Any) -> None:
        if state.global_step == 0:
            return
        kept = getattr(state, "stateful_callbacks", None) or {}
        mine = kept.get(type(self).__name__, {})
        mine = mine[0] if isinstance(mine, list) else mine
        self._training.load_state_dict(mine.get("attributes", {}).get("saved", {}))


def _nobody() -> None:
    return None


def _trainer_with(callback: object) -> Any:
    """The trainer that has this callback: no event is given it."""
    for obj in gc.get_objects():
        if issubclass(type(obj), Trainer):
            handler = getattr(obj, "callback_handler", None)
            if any(one is callback for one in getattr(handler, "callbacks", ())):
                return obj
    return None


class _Nonfinite:
    """A sink that counts the steps whose loss was not finite."""

    def __init__(self) -> None:
        self._num = 0

    def write(self, record: Record) -> None:
        if isinstance(record, Sample) and record.phase == "train":
            self._num += not math.isfinite(record.scalars.get("loss", 0.0))

    def close(self) -> None:
        """Nothing to close."""

    def take(self) -> int:
        """How many since it was asked last."""
        num, self._num = self._num, 0
        return num
