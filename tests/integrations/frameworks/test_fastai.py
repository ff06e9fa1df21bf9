"""fastai's Learner, with its own optimizers and with PyTorch's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trimtab
from tests.integrations.frameworks.harness import (
    BATCH,
    STEPS,
    Case,
    Result,
    Sink,
    Witness,
    data,
    equal,
    fresh,
    needs,
)

learner = needs("fastai.learner")
needs("fastai.callback.progress")  # adds `no_bar` to it
pytestmark = pytest.mark.filterwarnings("ignore")


def learner_of(case: Case, opt_func: Any = None, validation: Any = None) -> Any:
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.optimizer import Adam

    net = fresh()
    witness = Witness(net, case.accumulate)

    def loss_func(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return witness.loss(nn.functional.cross_entropy(out, y))

    train = DataLoader(TensorDataset(*data(case)), bs=BATCH, shuffle=False)
    loaders = DataLoaders(train, DataLoader(TensorDataset(*data(Case(steps=2))), bs=BATCH))
    learn = learner.Learner(loaders, net, loss_func=loss_func, opt_func=opt_func or Adam, lr=1e-2)
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == "ProgressCallback"])
    learn.witness = witness
    return learn


def callbacks_of(case: Case, witness: Witness) -> list[Any]:
    from fastai.callback.core import Callback
    from fastai.callback.training import GradientAccumulation, GradientClip

    class Norms(Callback):  # type: ignore[misc]
        order = 8  # after GradientAccumulation, which may skip the step, and before GradientClip

        def before_step(self) -> None:
            witness.step()

    found: list[Any] = [Norms()]
    if case.clip is not None:
        found.append(GradientClip(case.clip))
    if case.accumulate > 1:
        found.append(GradientAccumulation(case.accumulate * BATCH))
    return found


def drive(case: Case, *, guarded: bool, opt_func: Any = None, **settings: Any) -> Result:
    learn, sink = learner_of(case, opt_func), Sink()
    callback = trimtab.fastai.GuardCallback(sinks=[sink], run_dir=False, **settings)
    cbs = [*callbacks_of(case, learn.witness), *([callback] if guarded else [])]
    with learn.no_logging(), learn.no_bar():
        learn.fit(1, cbs=cbs)
    guard = callback.guard
    return Result(
        model=learn.model,
        optimizer=Numbered(learn.opt),
        witness=learn.witness,
        sink=sink,
        findings=[f.code for f in callback.findings],
        rejected=guard.rejected if guard is not None else 0,
    )


class Numbered:
    """fastai's state in the form of PyTorch's."""

    def __init__(self, opt: Any) -> None:
        self._entries = opt.state_dict()["state"]

    def state_dict(self) -> dict[str, Any]:
        entries = self._entries
        return {"state": entries if isinstance(entries, dict) else dict(enumerate(entries))}


def drive_adamw(case: Case, *, guarded: bool) -> Result:
    """The same with an optimizer of PyTorch."""
    return drive(case, guarded=guarded, opt_func=torch_adamw)


def torch_adamw(params: Any, **kwargs: Any) -> Any:
    from fastai.optimizer import OptimWrapper

    return OptimWrapper(params, opt=torch.optim.AdamW, **kwargs)


def test_validation_is_seen() -> None:
    learn, sink = learner_of(Case()), Sink()
    callback = trimtab.fastai.GuardCallback(sinks=[sink], run_dir=False)
    with learn.no_logging(), learn.no_bar():
        learn.fit(3, cbs=[callback])
    names = list(learn.recorder.metric_names)[1:]
    told = [dict(zip(names, row, strict=False))["valid_loss"] for row in learn.recorder.values]
    assert [s.scalars["val_loss"] for s in sink.val] == pytest.approx(told)
    assert len(told) == 3


def test_a_state_goes_on() -> None:
    first, second = (trimtab.fastai.GuardCallback(run_dir=False) for _ in range(2))
    learn = learner_of(Case())
    with learn.no_logging(), learn.no_bar():
        learn.fit(1, cbs=[first])
        second.load_state_dict(first.state_dict())
        learn.fit(1, cbs=[second])
    assert second.guard is not None
    assert [lane.attempts for lane in second.guard.lanes.values()] == [2 * STEPS]


def test_a_remedy_that_stops_ends_the_training() -> None:
    learn = learner_of(Case(steps=200))
    learn.model.register_forward_pre_hook(lambda module, args: (args[0] * math.nan,))
    callback = trimtab.fastai.GuardCallback(mode="act", run_dir=False)
    with learn.no_logging(), learn.no_bar():
        learn.fit(1, cbs=[callback])
    assert callback.guard is not None
    assert callback.guard.closed
    assert sum(lane.attempts for lane in callback.guard.lanes.values()) < 200


def test_mode_raise_raises_and_leaves_nothing_behind() -> None:
    learn, before = learner_of(Case(nan=True)), torch.nn.utils.clip_grad_norm_
    callback = trimtab.fastai.GuardCallback(mode="raise", run_dir=False)
    with pytest.raises(trimtab.TrainingStopped), learn.no_logging(), learn.no_bar():
        learn.fit(1, cbs=[callback])
    assert torch.nn.utils.clip_grad_norm_ is before
    assert "one_batch" not in vars(learn)
    assert not equal(
        drive(Case(), guarded=False),
        Result(model=learn.model, optimizer=Numbered(learn.opt), witness=learn.witness, sink=Sink()),
    )
