"""Keras on PyTorch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import trimtab
from tests.integrations.frameworks.harness import BATCH, FEATURES, Case, Result, Sink, Witness, data, needs

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = needs("keras")
pytestmark = pytest.mark.filterwarnings("ignore")
NUM_TENSORS = 6


def build(case: Case, **kwargs: Any) -> Any:
    keras.utils.set_random_seed(0)
    policy = {"fp32": "float32", "bf16": "mixed_bfloat16"}[case.precision]
    model = keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.Dense(16, dtype=policy),
            keras.layers.BatchNormalization(dtype=policy),
            keras.layers.Activation("gelu", dtype=policy),
            keras.layers.Dense(3, dtype=policy),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=case.clip)
    model.compile(optimizer=optimizer, loss=loss, **kwargs)
    return model


class Arrivals(Witness):
    """A witness that knows a step by the last gradient that arrives: Keras has no place to tell it."""

    def _arrived(self, p: torch.Tensor) -> None:
        super()._arrived(p)
        if len(self._sizes) == NUM_TENSORS:
            self.step()
            self._sizes.clear()


class Variables:
    """What Keras trains and keeps, in the form of PyTorch's."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def parameters(self) -> list[torch.Tensor]:
        return [v.value for v in self._model.trainable_weights]

    def state_dict(self) -> dict[str, Any]:
        found = (*self._model.weights, *self._model.optimizer.variables)
        return {f"{i}": v.value.detach() for i, v in enumerate(found)}


class Stateless:
    """The optimizer's own variables are among those of the model."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}}


def train(
    case: Case, *, guarded: bool, epochs: int = 1, settings: Any = None, **kwargs: Any
) -> tuple[Any, Any, Result]:
    x, y = data(case)
    model, sink = build(case), Sink()
    variables: Any = Variables(model)
    witness = Arrivals(variables, case.accumulate)
    inner = model.compute_loss
    model.compute_loss = lambda *args, **given: witness.loss(inner(*args, **given))
    callback = trimtab.keras.GuardCallback(sinks=[sink], run_dir=False, **(settings or {}))
    model.fit(
        x.numpy(),
        y.numpy(),
        batch_size=BATCH,
        shuffle=False,
        epochs=epochs,
        verbose=0,
        callbacks=[callback] if guarded else [],
        **kwargs,
    )
    guard = callback.guard
    return (
        model,
        callback,
        Result(
            model=variables,
            optimizer=Stateless(),
            witness=witness,
            sink=sink,
            findings=[f.code for f in callback.findings],
            rejected=guard.rejected if guard is not None else 0,
        ),
    )


def drive(case: Case, *, guarded: bool) -> Result:
    return train(case, guarded=guarded)[2]


def test_validation_is_seen() -> None:
    x, y = data(Case(steps=2))
    model, callback, seen = train(Case(), guarded=True, epochs=3, validation_data=(x.numpy(), y.numpy()))
    sink = seen.sink
    assert [s.scalars["val_loss"] for s in sink.val] == pytest.approx(model.history.history["val_loss"], rel=1e-5)
    assert len(sink.val) == 3
    assert callback.findings == []


def test_mode_raise_raises_and_leaves_nothing_behind() -> None:
    with pytest.raises(trimtab.TrainingStopped):
        train(Case(nan=True), guarded=True, settings={"mode": "raise"})


def test_what_cannot_be_followed_is_refused_with_the_reason() -> None:
    with pytest.raises(trimtab.InputError, match="rolled back"):
        train(Case(), guarded=True, settings={"mode": "act"})
    model = build(Case())
    model.optimizer.loss_scale_factor = 128.0
    callback = trimtab.keras.GuardCallback(run_dir=False)
    x, y = data(Case())
    with pytest.raises(trimtab.InputError, match="scales the loss"):
        model.fit(x.numpy(), y.numpy(), verbose=0, callbacks=[callback])
