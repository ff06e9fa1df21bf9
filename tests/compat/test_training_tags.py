from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.record.record_fakes import CUT, NAN, layout, sample, verdict
from trimtab.compat.training_tags import TrainingTagsSink, tag_sender
from trimtab.core.errors import InputError
from trimtab.core.types import Action, Outcome
from trimtab.record.sinks import adapt

DECAY = Action(kind="raise_weight_decay", args={"factor": 1.5})


class Writer:
    """Looks like a SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.flushed = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))

    def flush(self) -> None:
        self.flushed += 1


class Run:
    """Looks like a wandb run."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.rows.append((values, step))


def told(*records: Any) -> list[tuple[str, float, int]]:
    writer = Writer()
    sink = TrainingTagsSink(writer)
    for record in records:
        sink.write(record)
    return writer.scalars


def test_d12_norms_before_and_after_clipping_and_the_loss() -> None:
    assert told(sample(4, loss=2.0, grad_norm=4.0, clip_coef=0.25)) == [
        ("Training/GradNorm_Before", 4.0, 4),
        ("Training/GradNorm_After", 1.0, 4),
        ("Loss/Train", 2.0, 4),
    ]


def test_a_step_that_was_not_clipped_has_one_norm() -> None:
    seen = told(sample(0, grad_norm=3.0))
    assert seen == [("Training/GradNorm_Before", 3.0, 0), ("Training/GradNorm_After", 3.0, 0)]


def test_d12_epoch_tags_come_with_a_validation_and_leave_nan_out() -> None:
    steps = [sample(0, loss=1.0, accuracy=0.5), sample(1, loss=NAN), sample(2, loss=3.0, f1=0.25)]
    val = sample(2, phase="val", val_loss=2.5, **{"val/accuracy": 0.75, "val/f1": 0.5})
    assert told(*steps, val)[-6:] == [
        ("Loss/Train_Epoch", 2.0, 2),
        ("Accuracy/Train_Epoch", 0.5, 2),
        ("F1/Train_Epoch", 0.25, 2),
        ("Loss/Val_Epoch", 2.5, 2),
        ("Accuracy/Val_Epoch", 0.75, 2),
        ("F1/Val_Epoch", 0.5, 2),
    ]


def test_a_mean_begins_anew_with_each_validation() -> None:
    val = sample(0, phase="val", val_loss=1.0)
    seen = told(sample(0, loss=10.0), val, sample(1, loss=4.0), val, val)
    assert [v for tag, v, _ in seen if tag == "Loss/Train_Epoch"] == [10.0, 4.0]


def test_d12_an_action_is_told_once_though_its_effect_is_reported_later() -> None:
    first = Outcome(at=7, action=CUT, applied=True, detail="LR multiplier 1 -> 0.5")
    later = Outcome(at=7, action=CUT, applied=True, detail="20 steps later: loss 3 -> 2: better")
    refused = Outcome(at=9, action=CUT, applied=False)
    again = Outcome(at=30, action=CUT, applied=True)
    seen = told(first, later, refused, again)
    assert seen == [("Training/CorrectiveAction", 1.0, 7), ("Training/CorrectiveAction", 1.0, 30)]


def test_the_words_of_an_action_have_a_tag_of_their_own() -> None:
    writer = Writer()
    TrainingTagsSink(writer).write(Outcome(at=7, action=CUT, applied=True, detail="LR multiplier 1 -> 0.5"))
    assert writer.texts == [
        ("Training/CorrectiveAction/text", "multiply the learning rate by 0.5: LR multiplier 1 -> 0.5", 7)
    ]


def test_d12_the_adjusted_rate_is_told_while_it_is_adjusted_and_once_after() -> None:
    seen = told(
        sample(0, **{"lr/0": 0.1}),
        sample(1, **{"lr/0": 0.1, "lr_multiplier": 0.5}),
        sample(2, **{"lr/0": 0.2, "lr_multiplier": 0.5}),
        sample(3, **{"lr/0": 0.2}),
        sample(4, **{"lr/0": 0.2}),
    )
    assert seen == [
        ("Training/AdjustedLR", 0.05, 1),
        ("Training/AdjustedLR", 0.1, 2),
        ("Training/AdjustedLR", 0.2, 3),
    ]


def test_d12_the_adjusted_decay_is_read_from_what_the_remedy_says() -> None:
    from types import SimpleNamespace

    import torch

    from trimtab.remedies.raise_weight_decay import RaiseWeightDecay

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=2e-4)
    outcome = RaiseWeightDecay().apply(DECAY, SimpleNamespace(optimizer=optimizer), at=5)
    seen = told(outcome)
    assert seen[0] == ("Training/CorrectiveAction", 1.0, 5)
    assert seen[1] == ("Training/AdjustedWD", pytest.approx(3e-4), 5)


def test_two_optimizers_do_not_share_a_tag() -> None:
    seen = told(sample(0, lay=layout(optimizer="gen"), loss=1.0))
    assert seen == [("Loss/Train/gen", 1.0, 0)]


def test_other_records_are_let_pass() -> None:
    assert told(verdict(3), sample(2, phase="error", loss=1.0)) == []


def test_a15_any_logger_with_log_gets_one_dict_per_step() -> None:
    run = Run()
    sink = TrainingTagsSink(run)
    sink.write(sample(3, loss=1.0, grad_norm=2.0))
    sink.write(Outcome(at=1, action=CUT, applied=True))
    assert run.rows[0] == ({"Training/GradNorm_Before": 2.0, "Training/GradNorm_After": 2.0, "Loss/Train": 1.0}, 3)
    assert run.rows[1] == ({"Training/CorrectiveAction": 1.0}, 3)  # never an older step: wandb would drop it


def test_log_metrics_comes_first_and_may_take_any_step() -> None:
    class Lightning:
        def __init__(self) -> None:
            self.rows: list[tuple[dict[str, float], int]] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.rows.append((metrics, step))

    logger = Lightning()
    send = tag_sender(logger)
    send({"a": 1.0}, 5)
    send({"a": 2.0}, 4)
    assert [step for _, step in logger.rows] == [5, 4]


def test_a_log_without_step_gets_the_values_alone() -> None:
    class Bare:
        rows: list[dict[str, float]] = []  # noqa: RUF012

        def log(self, values: dict[str, float]) -> None:
            self.rows.append(values)

    tag_sender(Bare())({"a": 1.0}, 5)
    assert Bare.rows == [{"a": 1.0}]


def test_a_logging_logger_gets_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mine"):
        tag_sender(logging.getLogger("mine"))({"Loss/Train": 0.5}, 2)
    assert caplog.messages == ["step 2  Loss/Train 0.5"]


def test_what_cannot_log_is_refused() -> None:
    with pytest.raises(InputError, match="int cannot take tagged values"):
        TrainingTagsSink(3)


def test_it_is_a_sink_and_flushes_what_it_does_not_own() -> None:
    writer = Writer()
    sink = TrainingTagsSink(writer)
    assert adapt(sink) is sink
    sink.close()
    assert writer.flushed == 1
    TrainingTagsSink(Run()).close()
