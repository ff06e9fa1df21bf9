"""Which loss function a loss came from, and what an exception says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.guard.lane import told_by
from trimtab.sample.probes.forward import is_bounded, kind_of, squashed_by
from trimtab.sample.probes.linear_chain import linear_chain


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


def soft(*shape: int) -> Tensor:
    return logits(*shape).softmax(-1)


SQUASHED: list[tuple[str, str, Callable[[], Tensor]]] = [
    ("a softmax", "softmax", lambda: functional.cross_entropy(soft(4, 3), LABELS)),
    ("a sigmoid, in a sum", "sigmoid", lambda: functional.cross_entropy(logits(4, 3).sigmoid(), LABELS) + logits(1)[0]),
    ("a ReLU", "relu", lambda: functional.cross_entropy(logits(2, 2, 3).relu().reshape(4, 3), LABELS)),
    ("a tanh", "tanh", lambda: functional.binary_cross_entropy_with_logits(logits(4, 3).tanh(), HALF)),
    ("a sigmoid twice", "sigmoid", lambda: functional.binary_cross_entropy(logits(4, 3).sigmoid().sigmoid(), HALF)),
    ("by hand", "softmax", lambda: -soft(4, 3).log_softmax(-1).gather(1, LABELS[:, None]).mean()),
    (
        "as a policy",
        "softmax",
        lambda: -(torch.distributions.Categorical(logits=soft(4, 3)).log_prob(LABELS) * torch.ones(4)).mean(),
    ),
    ("logits", "", lambda: functional.cross_entropy(logits(4, 3), LABELS)),
    ("capped logits", "", lambda: functional.cross_entropy(30.0 * (logits(4, 3) / 30.0).tanh(), LABELS)),
    ("probabilities", "", lambda: functional.binary_cross_entropy(logits(4, 3).sigmoid(), HALF)),
    ("their logarithms", "", lambda: functional.nll_loss(soft(4, 3).log(), LABELS)),
    ("a policy", "", lambda: -torch.distributions.Categorical(probs=soft(4, 3)).log_prob(LABELS).mean()),
    ("a gate", "", lambda: (soft(4, 3) * functional.mse_loss(logits(4, 3).sigmoid(), HALF)).sum()),
    ("values", "", lambda: functional.mse_loss(logits(4, 3).relu(), HALF)),
    ("a teacher", "", lambda: functional.kl_div(logits(4, 3).log_softmax(-1), soft(4, 3).detach())),
]


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize(("by", "make"), [(k, m) for _, k, m in SQUASHED], ids=[n for n, _, _ in SQUASHED])
def test_an_activation_in_front_of_logits(by: str, make: Callable[[], Tensor]) -> None:
    loss = make()
    assert squashed_by(loss) == by
    loss.backward()
    assert squashed_by(loss) == by


def linear(*widths: int) -> list[nn.Module]:
    return [nn.Linear(a, b) for a, b in pairwise(widths)]


class Adapted(nn.Module):
    """A linear layer beside a low-rank one."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("shape", [(4, 8), (4, 5, 8)])
@pytest.mark.parametrize(
    ("num", "layers"),
    [
        (0, linear(8, 16, 3)),  # one layer in two factors
        (4, linear(8, 16, 16, 16, 3)),
        (3, [*linear(8, 16), nn.ReLU(), *linear(16, 16, 16, 3)]),
        (0, linear(8, 3)),
        (0, [*linear(8, 16), nn.ReLU(), *linear(16, 3)]),
        (0, [*linear(8, 16), nn.Tanh(), *linear(16, 16, 3)]),  # a projection behind the features
        (0, linear(8, 2, 8)),  # a linear autoencoder
        (0, [*linear(8, 16), nn.LayerNorm(16), *linear(16, 3)]),
        (0, [Adapted(), nn.ReLU(), *linear(8, 3)]),
        (0, [Adapted()]),
    ],
)
def test_linear_layers_in_a_row(num: int, layers: list[nn.Module], shape: tuple[int, ...]) -> None:
    out = nn.Sequential(*layers)(torch.randn(*shape))
    loss = functional.mse_loss(out, torch.zeros_like(out)) + 0.1
    assert linear_chain(loss) == num
    loss.backward()
    assert linear_chain(loss) == num
