"""Ignite's engines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from tests.integrations.frameworks.harness import (
    BATCH,
    STEPS,
    Case,
    Result,
    Sink,
    Witness,
    data,
    differences,
    equal,
    fresh,
    needs,
    scaler,
)

engine = needs("ignite.engine")
pytestmark = pytest.mark.filterwarnings("ignore")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Training:
    """A trainer whose function does everything itself, as Ignite's users write them."""

    def __init__(self, case: Case, *, guarded: bool = True, **settings: Any) -> None:
        self.case, self.net, self.sink, self.num = case, fresh(), Sink(), 0
        self.witness = Witness(self.net, case.accumulate)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scaler = scaler() if case.precision == "fp16" else None
        if self.scaler is not None:
            self.witness.scale = self.scaler.get_scale
        self.trainer = engine.Engine(self.update)
        self.evaluator = engine.create_supervised_evaluator(
            self.net, metrics={"loss": needs("ignite.metrics").Loss(nn.functional.cross_entropy)}
        )
        self.handler = trimtab.ignite.GuardHandler(
            self.net,
            self.optimizer,
            scaler=self.scaler,
            gradient_accumulation_steps=case.accumulate,
            sinks=[self.sink],
            run_dir=False,
            **settings,
        )
        if guarded:
            self.handler.attach(self.trainer, self.evaluator)

    def update(self, _: Any, batch: Any) -> float:
        x, y = batch
        self.net.train()
        with torch.autocast("cpu", dtype=TYPES.get(self.case.precision), enabled=self.case.precision in TYPES):
            loss = self.witness.loss(nn.functional.cross_entropy(self.net(x).float(), y))
        part = loss / self.case.accumulate if self.case.accumulate > 1 else loss
        (part if self.scaler is None else self.scaler.scale(part)).backward()
        self.num += 1
        if self.num % self.case.accumulate == 0:
            self.witness.step()
            if self.case.clip is not None:
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.case.clip)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
        return loss.item()

    def run(self, epochs: int = 1) -> Result:
        self.trainer.run(loader(self.case), max_epochs=epochs)
        guard = self.handler.guard
        return Result(
            model=self.net,
            optimizer=self.optimizer,
            witness=self.witness,
            sink=self.sink,
            findings=[f.code for f in self.handler.findings],
            state=self.handler.state_dict(),
            rejected=guard.rejected if guard is not None else 0,
        )


def loader(case: Case) -> Any:
    return DataLoader(TensorDataset(*data(case)), batch_size=BATCH, shuffle=False)


def drive(case: Case, *, guarded: bool) -> Result:
    return Training(case, guarded=guarded).run()


def test_validation_is_seen() -> None:
    one = Training(Case())
    one.trainer.add_event_handler(engine.Events.EPOCH_COMPLETED, lambda _: one.evaluator.run(loader(Case(steps=2))))
    one.run(epochs=3)
    assert len(one.sink.val) == 3
    assert one.sink.val[-1].scalars["val_loss"] == pytest.approx(one.evaluator.state.metrics["loss"])


def test_a_resumed_training_goes_on_exactly() -> None:
    case = Case(accumulate=2, clip=0.05)
    whole = Training(case).run(epochs=2)
    first = Training(case)
    state = first.run().state
    second = Training(case)
    second.net.load_state_dict(first.net.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.handler.load_state_dict(state)
    seen: dict[str, Any] = {}
    second.trainer.add_event_handler(engine.Events.STARTED, lambda _: seen.update(second.handler.state_dict()))
    resumed = second.run()
    assert differences(seen, state) == []
    assert [s.step for s in second.sink.train] == list(range(STEPS, 2 * STEPS))
    assert equal(whole, resumed)


def test_an_exception_reaches_the_caller() -> None:
    one = Training(Case())

    def fail(_: Any) -> None:
        raise RuntimeError("no more")

    one.trainer.add_event_handler(engine.Events.ITERATION_COMPLETED(once=5), fail)
    with pytest.raises(RuntimeError, match="no more"):
        one.run()
    assert one.handler.guard is not None
    assert one.handler.guard.closed


def test_a_remedy_that_stops_ends_the_training() -> None:
    one = Training(Case(steps=200), mode="act")
    one.net.register_forward_pre_hook(lambda module, args: (args[0] * math.nan,))
    one.run()
    assert one.trainer.state.iteration < 200
    assert one.handler.guard is not None
    assert one.handler.guard.closed
