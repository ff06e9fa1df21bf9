"""The labels that the doctor prints are those that the loss compares with, wherever they are in the batch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

from trimtab.doctor.batch_tensors import roles_of
from trimtab.doctor.examine import examine
from trimtab.doctor.observed_step import Options
from trimtab.doctor.target import check_target

VOCAB, CLASSES, ROWS, LENGTH = 50, 5, 6, 10
Batch = dict[str, Tensor]


class Reader(nn.Module):
    """Tokens in; a score per class, or per token at every place."""

    def __init__(self, out: int, *, pooled: bool) -> None:
        super().__init__()
        self.embed, self.head, self.pooled = nn.Embedding(VOCAB, 16), nn.Linear(16, out), pooled

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(tokens).mean(1) if self.pooled else self.embed(tokens))
        return found


class WithLoss(Reader):
    """Computes its own loss from labels that it is given, as many published models do."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None) -> Any:
        scores = super().forward(input_ids)
        assert labels is not None
        moved = f.pad(labels, (0, 1), value=-100)[:, 1:]
        return {"loss": f.cross_entropy(scores.flatten(0, 1), moved.flatten(), ignore_index=-100), "logits": scores}


def steps_of(model: nn.Module, batches: list[Any], step: Callable[[Any, Any], Any], **options: Any) -> Any:
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "loader": batches}
    return examine(check_target({**given, "step_fn": step}), Options(**options), select=["DATA006"]).steps


def batches(num: int = 4) -> list[Batch]:
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "tokens": torch.randint(20, VOCAB, (ROWS, LENGTH), generator=draw),
            "lengths": torch.full((ROWS,), LENGTH),
            "kind": torch.randint(0, CLASSES, (ROWS,), generator=draw),
        }
        for _ in range(num)
    ]


def by_cross_entropy(scores: Tensor, kind: Tensor) -> Tensor:
    return f.cross_entropy(scores, kind)


def by_gather(scores: Tensor, kind: Tensor) -> Tensor:
    return -scores.log_softmax(1).gather(1, kind[:, None]).mean()


def by_indexing(scores: Tensor, kind: Tensor) -> Tensor:
    return -scores.log_softmax(1)[torch.arange(len(kind)), kind].mean()


def by_taking_along(scores: Tensor, kind: Tensor) -> Tensor:
    return -torch.take_along_dim(scores.log_softmax(1), kind[:, None], 1).sum() / len(kind)


@pytest.mark.parametrize(
    ("loss", "order"),
    [
        *((by_cross_entropy, order) for order in permutations(("tokens", "lengths", "kind"))),
        *((loss, ("tokens", "kind", "lengths")) for loss in (by_gather, by_indexing, by_taking_along)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value),
)
def test_labels_are_what_the_loss_uses_in_every_order_of_the_batch(loss: Any, order: tuple[str, ...]) -> None:
    places = {name: i for i, name in enumerate(order)}
    rows = [tuple(batch[name] for name in order) for batch in batches()]
    steps = steps_of(
        Reader(CLASSES, pooled=True),
        rows,
        lambda model, batch: loss(model(batch[places["tokens"]]), batch[places["kind"]]),
    )
    assert steps
    for step in steps:
        assert step.labels == tuple(rows[step.step][places["kind"]].tolist())
        assert any(line == f"  labels {list(step.labels)}" for line in step.lines())


def prompted() -> list[Batch]:
    """Instruction tuning: the labels of the prompt are ignored, those of the answer are its tokens."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        tokens = torch.randint(10, VOCAB, (ROWS, LENGTH), generator=draw)
        labels = tokens.clone()
        labels[:, : LENGTH - 3] = -100
        found.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels})
    return found


def test_the_tokens_of_a_prompt_are_no_labels() -> None:
    rows = prompted()
    steps = steps_of(WithLoss(VOCAB, pooled=False), rows, lambda model, batch: model(**batch)["loss"])
    assert steps
    for step in steps:
        answer = rows[step.step]["labels"][:, LENGTH - 3 :].reshape(-1)
        assert step.labels == tuple(answer.tolist())[:8]
        assert (step.num_labels, step.num_ignored) == (ROWS * LENGTH, ROWS * (LENGTH - 3))
        assert f"({ROWS * (LENGTH - 3)} of {ROWS * LENGTH} are ignored)" in "\n".join(step.lines())


def test_a_model_that_is_given_its_labels_has_a_target_all_the_same() -> None:
    batch = prompted()[0]
    moved = f.pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
    found = roles_of(batch, list(batch.values()), moved, by_contract=False)
    assert (found.targets, found.sure) == (("labels",), True)
    assert found.inputs == ("input_ids", "attention_mask")
    # An autoencoder is given one tensor, and compares with it: it has no target of its own.
    x = torch.randn(4, 3)
    assert roles_of({"y": x}, [x], x, by_contract=False).targets == ()


def test_next_tokens_are_the_labels_of_a_language_model() -> None:
    rows = [batch["tokens"] for batch in batches()]
    steps = steps_of(
        Reader(VOCAB, pooled=False),
        rows,
        lambda model, t: f.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()),
    )
    assert [step.labels for step in steps] == [tuple(rows[s.step][:, 1:].reshape(-1)[:8].tolist()) for s in steps]


def test_binary_targets_are_labels_though_they_are_floats() -> None:
    rows = [(b["tokens"], (b["kind"] > 2).float()) for b in batches()]
    steps = steps_of(
        Reader(1, pooled=True),
        rows,
        lambda model, batch: f.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1]),
    )
    assert [step.labels for step in steps] == [tuple(int(v) for v in rows[s.step][1]) for s in steps]


@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, worth: f.mse_loss(scores.squeeze(1), worth),
        lambda scores, worth: (scores.squeeze(1) - worth).abs().pow(1.5).mean(),
    ],
    ids=["known loss", "unknown loss"],
)
def test_where_there_are_no_labels_none_are_printed(loss: Any) -> None:
    rows = [(b["tokens"], torch.linspace(0, 1, ROWS)) for b in batches()]
    steps = steps_of(Reader(1, pooled=True), rows, lambda model, batch: loss(model(batch[0]), batch[1]))
    assert steps
    assert all(step.labels == () for step in steps)
    assert not any("labels" in line for step in steps for line in step.lines())


def test_the_contract_names_the_target_where_the_loss_was_never_reached() -> None:
    model = Reader(CLASSES, pooled=True)
    rows = [(b["tokens"], torch.full((ROWS,), CLASSES)) for b in batches()]  # out of range: the loss raises
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "loader": rows}
    report = examine(check_target({**given, "loss_fn": f.cross_entropy}), select=["DATA006"])
    assert report.steps[0].failure
    assert report.steps[0].labels == (CLASSES,) * ROWS


def test_a_watched_script_shows_the_labels_of_its_loss(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        f"model = nn.Sequential(nn.Embedding({VOCAB}, 8), nn.Flatten(), nn.Linear(8 * 4, {CLASSES}))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(6):\n"
        f"    x, y = torch.randint(20, {VOCAB}, (6, 4)), torch.arange(6) % {CLASSES}\n"
        "    optimizer.zero_grad()\n"
        "    nn.functional.cross_entropy(model(x), y).backward()\n"
        "    optimizer.step()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "doctor", "--json", str(script)], capture_output=True, text=True, check=False
    )
    steps = json.loads(done.stdout)["steps"]
    assert steps
    assert all(step["labels"] == [0, 1, 2, 3, 4, 0] for step in steps)
