"""Keras on PyTorch: `model.fit(..., callbacks=[trimtab.keras.GuardCallback()])`.

Its optimizers are not PyTorch's, and calls of its models run no hooks of PyTorch. So the guard is given a stand-in for
the optimizer, whose step is `optimizer.apply`, and is told batches and losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trimtab.core.errors import InputError
from trimtab.core.types import Finding
from trimtab.guard.guard import Guard
from trimtab.integrations.training_guard import Attach, TrainingGuard, missing
from trimtab.torchutil.patch import wrap_method_of

try:
    import keras
except ImportError as error:
    raise missing("keras", "keras") from error


class KerasOptimizer:
    """A Keras optimizer as the guard knows optimizers: groups of tensors with gradients, and a step."""

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        self._optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = [{"params": [v.value for v in variables], "lr": self._rate()}]
        self.state: dict[Any, Any] = {}
        self._apply: Callable[[], None] = _nothing

    def _rate(self) -> Any:
        rate = keras.ops.convert_to_tensor(self._optimizer.learning_rate)
        return float(rate) if rate.is_cpu else rate.detach().clone()

    def apply(self, inner: Callable[..., Any], grads: Any, trainable_variables: Any = None) -> None:
        """Instead of the optimizer's own `apply`: the same within a guarded step."""
        if trainable_variables is None:
            inner(grads)
            return
        given = [(v, g) for v, g in zip(trainable_variables, grads, strict=True) if g is not None]
        for variable, grad in given:
            if variable.value.grad is not grad:  # a train_step of the user's own
                variable.value.grad = grad
        self.param_groups[0]["lr"] = self._rate()

        def apply() -> None:
            now = [v.value.grad for v in trainable_variables]
            if not given or any(g is not None for g in now):  # else the update is rejected
                inner(now, trainable_variables)

        self._apply = apply
        try:
            self.step()
        finally:
            self._apply = _nothing

    def step(self) -> None:
        """What the guard measures before and cleans up after."""
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Keras saves its optimizers itself."""
        return {"state": {}, "param_groups": []}


def _nothing() -> None:
    """No step is under way."""


class KerasModel(nn.Module):
    """The variables of a Keras model: what it trains as parameters, and moving averages and the like as buffers.

    In Keras both are parameters. It is never called, and calls of the model itself run no hooks.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        for variable in model.trainable_weights:
            self._parameters[_name(variable)] = variable.value
        for variable in model.non_trainable_weights:
            self.register_buffer(_name(variable), variable.value)


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name)).replace(".", "_")


class GuardCallback(keras.callbacks.Callback):
    """Guards `model.fit` of Keras on PyTorch.

    Gradients are measured before the optimizer's own `clipnorm`, `global_clipnorm` or `clipvalue`. With
    `gradient_accumulation_steps` every micro-batch counts as a step.

    Args:
        attach: Makes the guard; None: `trimtab.Guard`.
        settings: Keywords of `trimtab.Guard`.
    """

    def __init__(self, *, attach: Attach | None = None, **settings: Any) -> None:
        super().__init__()
        self._training = TrainingGuard("Keras", settings, self._stop, attach)

    @property
    def guard(self) -> Guard | None:
        """The guard of the training; None before it begins."""
        return self._training.guard

    @property
    def findings(self) -> list[Finding]:
        """What was found so far."""
        return self._training.findings

    def _stop(self) -> None:
        self.model.stop_training = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Guard the model and its optimizer."""
        model, optimizer = self.model, self.model.optimizer
        check_keras(optimizer)
        stand_in = KerasOptimizer(optimizer, model.trainable_weights)
        limits = {name: getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm", "clipvalue")}
        theirs = [f"{name}={value}" for name, value in limits.items() if value]
        epochs, steps = self.params.get("epochs"), self.params.get("steps")
        self._training.begin(
            KerasModel(model),
            stand_in,
            theirs=", ".join(theirs),
            steps_left=lambda: epochs * steps if epochs and steps else None,
        )
        guard = self.guard
        if guard is None:
            return
        if guard.config.mode == "act":
            guard.close()
            raise InputError("mode='act' does not work with Keras: its optimizers cannot be rolled back; use 'advise'")
        guard.watch_losses()
        self._stand_in = stand_in  # a wrapped method is kept alive by its object alone
        guard.also_remove(wrap_method_of(optimizer, "apply", stand_in.apply))
        guard.also_remove(wrap_method_of(model, "train_step", self._train_step))

    def _train_step(self, inner: Callable[..., Any], data: Any) -> Any:
        try:
            self._training.loss(None, data)
            return inner(data)
        except BaseException as error:
            self._training.end(error)  # no event tells of it
            raise

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Judge a validation."""
        if logs and "val_loss" in logs:
            self._training.validated({k: v for k, v in logs.items() if k.startswith("val_")}, "val_loss")

    def on_train_end(self, logs: Any = None) -> None:
        """Close the guard."""
        self._training.end()

    def state_dict(self) -> dict[str, Any]:
        """To be saved beside the model."""
        return self._training.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there when training begins."""
        self._training.load_state_dict(state_dict)


def check_keras(optimizer: Any) -> None:
    """Refuse, with the reason, what cannot be followed."""
    if (name := keras.backend.backend()) != "torch":
        raise InputError(
            f"Keras runs on {name}, and trimtab guards PyTorch; set KERAS_BACKEND=torch before keras is imported"
        )
    if hasattr(optimizer, "inner_optimizer") or getattr(optimizer, "loss_scale_factor", None):
        raise InputError(
            f"{type(optimizer).__name__} scales the loss, which trimtab cannot follow in Keras; use 'mixed_bfloat16' "
            "instead of 'mixed_float16', and no loss_scale_factor"
        )
    if not isinstance(optimizer.learning_rate, float | torch.Tensor | keras.Variable):
        raise InputError(f"the learning rate is a {type(optimizer.learning_rate).__name__}; expected a number")
