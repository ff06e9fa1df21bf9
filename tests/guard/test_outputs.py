"""Models answer with what they like: a loss first, a dict, a dataclass. The guard finds the logits, or none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trimtab import Guard

STEPS = 60


@dataclass
class Answer:
    loss: Tensor
    logits: Tensor


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face's: a dict whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


SHAPES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda loss, logits: (loss, logits),
    "list": lambda loss, logits: [loss, logits],
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "dataclass": Answer,
    "named tuple": Named,
    "model output": lambda loss, logits: ModelOutput(loss=loss, logits=logits),
    "loss only": lambda loss, logits: loss,
    "loss of one element": lambda loss, logits: loss.reshape(1),
    "loss per sample first": lambda loss, logits: (loss.expand(len(logits)), loss, logits),
    "nested": lambda loss, logits: ({"losses": {"total": loss}}, {"out": (logits,)}),
    "with text": lambda loss, logits: ("ok", 3, None, loss, logits),
    "an object": lambda loss, logits: type("Out", (), {"loss": loss, "logits": logits})(),
}


def loss_in(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.sum()
    parts = list(output.values()) if isinstance(output, dict) else output
    if isinstance(parts, list | tuple):
        tensors = [p for p in parts if isinstance(p, Tensor)]
        return next(t for t in tensors if t.dim() == 0) if tensors else loss_in(parts[0])
    return parts.loss


class Model(nn.Module):
    def __init__(self, shape: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.shape = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), shape

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.body(x)
        return self.shape(F.cross_entropy(logits, labels), logits)


def train(shape: str, attach: Callable[[nn.Module, Any], Guard | None], *, told: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(SHAPES[shape])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    guard = attach(model, optimizer)
    source = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = torch.randn(32, 8, generator=source)
        y = x[:, :4].argmax(1)
        loss = loss_in(model(x, labels=y))
        loss.backward()
        if guard is not None and told:
            guard.observe(loss=loss, batch={"x": x, "labels": y})
        optimizer.step()
        optimizer.zero_grad()
    if guard is not None:
        guard.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("told", [True, False], ids=["told", "hooks alone"])
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_the_model_answers_training_is_as_without(
    shape: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    want = train(shape, lambda model, optimizer: None, told=told)
    guards: list[Guard] = []

    def attach(model: nn.Module, optimizer: Any) -> Guard:
        guards.append(Guard.attach(model, optimizer, run_dir=False))
        return guards[0]

    assert all(map(torch.equal, train(shape, attach, told=told), want))
    assert guards[0].findings == []
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


@pytest.mark.parametrize("shape", ["tuple", "dict", "dataclass", "named tuple", "model output", "with text"])
def test_a_loss_with_the_wrong_sign_is_seen_behind_a_loss_that_comes_first(shape: str) -> None:
    """What is looked at are the logits: there the sign of the gradient can be read."""
    torch.manual_seed(0)
    model = Model(SHAPES[shape])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Guard(model, optimizer, run_dir=False) as guard:
        for i in range(8):
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(i))
            loss = -loss_in(model(x, labels=x[:, :4].argmax(1)))
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    assert [f.name for f in guard.findings] == ["diverging-loss"]
