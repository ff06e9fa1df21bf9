"""`trimtab run` on programs of frameworks: validation, no trace in checkpoints, callbacks of their own, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.frameworks.harness import Case, Sink, fresh, needs
from trimtab.core.config import resolve
from trimtab.run.auto_guard import AutoGuard
from trimtab.run.guarded_training import GuardedTraining

pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def watched(**settings: Any) -> Iterator[tuple[Sink, list[GuardedTraining]]]:
    sink, trainings = Sink(), list[GuardedTraining]()
    watching = AutoGuard({"sinks": [sink], "run_dir": False, **settings}, trainings.append)
    watching.start()
    try:
        yield sink, trainings
    finally:
        watching.finish()


def lightning() -> Any:
    needs("lightning.pytorch")
    from tests.integrations.frameworks import test_lightning

    return test_lightning


def huggingface() -> Any:
    needs("transformers")
    from tests.integrations.frameworks import test_huggingface

    return test_huggingface


def test_lightning_validates_and_its_checkpoint_knows_nothing_of_us(tmp_path: Path) -> None:
    one = lightning()
    case, path = Case(), tmp_path / "a.ckpt"
    module, trainer = one.Module(case), one.trainer_of(case, [], max_epochs=3, num_sanity_val_steps=2)
    before = list(trainer.callbacks)
    with watched() as (sink, trainings):
        trainer.fit(module, one.loader(case), one.loader(case))
    assert trainer.callbacks == before
    trainer.save_checkpoint(path)
    assert len(sink.val) == 3
    assert sink.val[-1].scalars["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    assert [training.findings for training in trainings] == [0]
    assert "GuardCallback" not in str(torch.load(path, weights_only=True)["callbacks"])


def test_a_checkpoint_that_lightning_saves_while_it_trains_knows_nothing_of_us(tmp_path: Path) -> None:
    one = lightning()
    case, saved = Case(), list[Any]()

    class Saving(one.Module):  # type: ignore[misc, name-defined]
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            saved.append(dict(checkpoint["callbacks"]))

    keep = needs("lightning.pytorch.callbacks").ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=1)
    with watched():
        one.trainer_of(case, [keep], enable_checkpointing=True).fit(Saving(case), one.loader(case))
    assert saved
    assert not any("Guard" in key for entry in saved for key in entry)


def test_hugging_face_evaluates_and_its_checkpoint_and_log_know_nothing_of_us(tmp_path: Path) -> None:
    one = huggingface()
    saving = {"save_strategy": "steps", "save_steps": 12, "eval_strategy": "steps", "eval_steps": 8}
    trainer = one.trainer_of(Case(), tmp_path / "out", [], **saving)
    before = list(trainer.callback_handler.callbacks)
    with watched() as (sink, _):
        trainer.train()
    assert trainer.callback_handler.callbacks == before
    told = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [s.scalars["val_loss"] for s in sink.val] == pytest.approx(told)
    assert len(told) == 3
    state = json.loads((tmp_path / "out" / "checkpoint-12" / "trainer_state.json").read_text())
    assert list(state["stateful_callbacks"]) == ["TrainerControl"]


def test_ignite_evaluators_on_other_data_are_validations() -> None:
    needs("ignite.engine")
    from tests.integrations.frameworks import test_ignite as one

    run = one.Training(Case(), guarded=False)
    train, other = one.loader(Case()), one.loader(Case(steps=2))
    seen = list[float]()

    def evaluate(_: Any) -> None:
        run.evaluator.run(train)
        run.evaluator.run(other)
        seen.append(run.evaluator.state.metrics["loss"])

    run.trainer.add_event_handler(one.engine.Events.EPOCH_COMPLETED, evaluate)
    with watched() as (sink, _):
        run.trainer.run(train, max_epochs=3)
    assert [s.scalars["val_loss"] for s in sink.val] == pytest.approx(seen)
    assert len(seen) == 3


def test_fastai_validates() -> None:
    needs("fastai.learner")
    from tests.integrations.frameworks import test_fastai as one

    with watched() as (sink, _):
        learn = one.learner_of(Case())
        with learn.no_logging(), learn.no_bar():
            learn.fit(3)
    names = list(learn.recorder.metric_names)[1:]
    told = [dict(zip(names, row, strict=False))["valid_loss"] for row in learn.recorder.values]
    assert [s.scalars["val_loss"] for s in sink.val] == pytest.approx(told)
    assert not any(type(cb).__name__ == "GuardCallback" for cb in learn.cbs)


def test_keras_validates_and_says_what_it_cannot_follow(caplog: pytest.LogCaptureFixture) -> None:
    needs("keras")
    from tests.integrations.frameworks import test_keras as one

    x, y = one.data(Case(steps=2))
    with watched(config=resolve(None, mode="act")) as (sink, _):
        model, *_ = one.train(Case(), guarded=False, epochs=3, validation_data=(x.numpy(), y.numpy()))
    assert [s.scalars["val_loss"] for s in sink.val] == pytest.approx(model.history.history["val_loss"], rel=1e-5)
    assert "mode 'advise' is used instead" in caplog.text
    with watched():
        model = one.build(Case())
        model.optimizer.loss_scale_factor = 128.0
        model.fit(x.numpy(), y.numpy(), verbose=0)
    assert "not guarded: Adam scales the loss" in caplog.text


def test_a_program_with_a_callback_of_its_own_gets_no_second_one(tmp_path: Path) -> None:
    one, other = lightning(), huggingface()
    with watched() as (sink, trainings):
        assert len(one.drive(Case(), guarded=True).sink.train) == Case().steps
        assert len(other.drive(Case(), guarded=True).sink.train) == Case().steps
    assert sink.train == []
    assert [training.own for training in trainings] == [True, True]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_plain_loop_that_divides_to_accumulate(scaled: bool) -> None:
    true: list[float] = []
    with watched() as (sink, _):
        net = fresh()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        generator = torch.Generator().manual_seed(0)
        parts: list[float] = []
        for i in range(30):
            x = torch.randn(16, 8, generator=generator)
            loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
            parts.append(float(loss.detach()))
            scaler.scale(loss / 4).backward()
            if i % 10 in (3, 7, 9):  # the last of an "epoch" has two micro-batches only
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                true.append(sum(parts) / len(parts))
                parts = []
    assert [s.scalars["loss"] for s in sink.train] == pytest.approx(true, rel=1e-5)
