"""Which loss function a loss came from, and what an exception says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trimtab.guard.lane import told_by
from trimtab.sample.probes.forward import is_bounded, kind_of


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


LABELS = torch.tensor([0, 2, 1, 1])
SCENES = torch.randint(0, 3, (4, 5, 5))
HALF = torch.full((4, 3), 0.5)

KINDS: list[tuple[str, str, Callable[[], Tensor]]] = [
    ("cross-entropy", "nll", lambda: functional.cross_entropy(logits(4, 3), LABELS)),
    ("of pixels", "nll", lambda: functional.cross_entropy(logits(4, 3, 5, 5), SCENES)),
    ("summed", "nll", lambda: functional.cross_entropy(logits(4, 3), LABELS, reduction="sum") / 4),
    ("of each sample", "nll", lambda: functional.cross_entropy(logits(4, 3), LABELS, reduction="none").mean()),
    ("divided", "nll", lambda: functional.cross_entropy(logits(4, 3), LABELS) / 8),
    (
        "a sum of two",
        "nll",
        lambda: functional.cross_entropy(logits(4, 3), LABELS) + functional.nll_loss(logits(4, 3), LABELS),
    ),
    ("binary", "bce", lambda: functional.binary_cross_entropy_with_logits(logits(4, 3), HALF)),
    ("of probabilities", "bce", lambda: functional.binary_cross_entropy(logits(4, 3).sigmoid(), HALF)),
    ("squared error", "mse", lambda: functional.mse_loss(logits(4, 3), HALF)),
    ("with a penalty", "mse", lambda: functional.mse_loss(logits(4, 3), HALF) + 0.1 * logits(3).square().sum()),
    ("two kinds", "", lambda: functional.mse_loss(logits(4, 3), HALF) + functional.cross_entropy(logits(4, 3), LABELS)),
    ("by hand", "", lambda: (logits(4, 3) - HALF).square().mean()),
    ("something else", "", lambda: functional.l1_loss(logits(4, 3), HALF)),
    ("a leaf", "", lambda: logits(1).sum()),
    ("behind another function", "", lambda: functional.mse_loss(logits(4, 3), HALF).exp()),
]


@pytest.mark.parametrize(("kind", "make"), [(k, m) for _, k, m in KINDS], ids=[n for n, _, _ in KINDS])
def test_the_kind_is_read_off_the_graph(kind: str, make: Callable[[], Tensor]) -> None:
    loss = make()
    assert kind_of(loss) == kind
    loss.backward()
    assert kind_of(loss) == kind  # the graph is freed, its names are not


def test_a_long_graph_is_not_followed_for_ever() -> None:
    loss = functional.mse_loss(logits(4, 3), HALF)
    for _ in range(200):
        loss = loss + 1.0
    assert kind_of(loss) in ("", "mse")


def test_detached_losses() -> None:
    loss = functional.mse_loss(logits(4, 3), HALF)
    assert kind_of(loss.detach()) == ""
    assert not is_bounded(loss.detach())


@pytest.mark.parametrize(
    ("bounded", "make"),
    [
        (True, lambda: functional.cross_entropy(logits(4, 3), LABELS)),
        (True, lambda: functional.cross_entropy(logits(4, 3), LABELS) / 4),
        (True, lambda: functional.binary_cross_entropy_with_logits(logits(4, 3), HALF)),
        (False, lambda: (functional.cross_entropy(logits(4, 3), LABELS, reduction="none") * torch.randn(4)).mean()),
        (False, lambda: functional.mse_loss(logits(4, 3), HALF)),
    ],
)
def test_a_loss_that_cannot_be_negative(bounded: bool, make: Callable[[], Tensor]) -> None:
    assert is_bounded(make()) is bounded


def failing(call: Callable[[], object]) -> str:
    with pytest.raises((IndexError, RuntimeError)) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("fact", "call"),
    [
        ("label_error", lambda: functional.cross_entropy(logits(4, 3), torch.tensor([0, 1, 2, 3]))),
        ("label_error", lambda: functional.cross_entropy(logits(4, 3), torch.tensor([0, 1, 2, -1]))),
        ("label_error", lambda: functional.embedding(torch.tensor([12]), torch.randn(10, 4))),
        ("label_error", lambda: functional.binary_cross_entropy(torch.tensor([1.5]), torch.tensor([1.0]))),
        ("no_grad_error", lambda: torch.tensor(1.0).backward()),
        ("no_grad_error", lambda: logits(3).sum().detach().backward()),
    ],
)
def test_what_pytorch_says_is_understood(fact: str, call: Callable[[], object]) -> None:
    assert set(told_by(RuntimeError(failing(call)))[0]) == {"exception", fact}


@pytest.mark.parametrize("text", ["", "CUDA out of memory", "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"])
def test_other_errors_say_nothing(text: str) -> None:
    assert set(told_by(RuntimeError(text))[0]) == {"exception"}
