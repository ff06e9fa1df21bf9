"""Healthy runs with problems of their own, II: losses of odd sizes and shapes, and odd ways of stepping."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn, optim
from torch.nn import functional as F  # noqa: N812

from tests.faults.base import Run
from tests.faults.healthy_players import some_digits
from tests.faults.healthy_tools import alone, fell, healthy, mean, schedule
from tests.runs.programs import digits, mlp


@healthy("mlp")
def attacked_on_purpose(run: Run) -> None:
    """Each batch is made as bad as possible by the gradient of the loss itself, so that the loss falls slowly."""
    torch.manual_seed(run.seed)
    model = mlp(64, 64, 10)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), batch[1]), x)
        return F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), batch[1])

    alone(run, model, optim.Adam(model.parameters(), lr=3e-3), some_digits(32), loss, lambda: fell(run, 0.6))


def walk(generator: Generator) -> tuple[Tensor, ...]:
    """Numbers and a smooth function of them with little noise."""
    x = torch.randn(64, 4, generator=generator)
    return x, x[:, 0].sin() + 0.03 * torch.randn(64, generator=generator)


@healthy("cnn", steps=240)
def likelihood_below_zero(run: Run) -> None:
    """The loss crosses zero and goes on down, and jumps where a sharp prediction is wrong once."""
    torch.manual_seed(run.seed)
    model = mlp(4, 32, 2, act=nn.Tanh)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        centre, spread = model(batch[0]).unbind(-1)
        return F.gaussian_nll_loss(centre, batch[1], F.softplus(spread) ** 2, eps=1e-4)

    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    alone(run, model, optimizer, walk, loss, lambda: mean(run.losses[-20:]) < -0.5)


@healthy("rnn", steps=240)
def residual_to_nothing(run: Run) -> None:
    """A realisable problem in float64 whose loss and gradients fall by ten orders: this is convergence."""
    torch.manual_seed(run.seed)
    model = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), nn.Linear(5, 1, dtype=torch.float64))
    truth = torch.randn(5, 1, dtype=torch.float64)

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        x = torch.randn(32, 5, generator=generator, dtype=torch.float64)
        return x, x @ truth

    optimizer = optim.SGD(model.parameters(), lr=0.08, momentum=0.5)
    alone(
        run, model, optimizer, batch, lambda model, b: F.mse_loss(model(b[0]), b[1]),
        lambda: mean(run.losses[-10:]) < 1e-8,
    )  # fmt: skip


@healthy("lm")
def hinge_at_zero(run: Run) -> None:
    """A separable problem under a hinge loss: loss and gradients are exactly zero for the rest of the run."""
    torch.manual_seed(run.seed)
    model = mlp(2, 16, 1)

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        side = torch.randint(2, (24, 1), generator=generator) * 2.0 - 1
        return torch.randn(24, 2, generator=generator) * 0.3 + 1.5 * side, side

    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alone(
        run, model, optimizer, batch, lambda model, b: (1 - b[1] * model(b[0])).relu().mean(),
        lambda: run.losses[-1] == 0.0,
    )  # fmt: skip


@healthy("contrastive", steps=200)
def triplets_all_satisfied(run: Run) -> None:
    """More and more batches hold no active triplet: the loss is zero on them and a jump on the others."""
    torch.manual_seed(run.seed)
    model = mlp(64, 48, 16)

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        x, y = digits()
        pair = torch.randperm(10, generator=generator)[:2]
        own, other = ((y == label).nonzero().squeeze(-1) for label in pair)
        draw = [pool[torch.randint(len(pool), (8,), generator=generator)] for pool in (own, own, other)]
        return x[draw[0]], x[draw[1]], x[draw[2]]

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.triplet_margin_loss(model(batch[0]), model(batch[1]), model(batch[2]), margin=1.0)

    alone(run, model, optim.Adam(model.parameters(), lr=3e-3), batch, loss, lambda: fell(run, 0.3))


@healthy("mlp", steps=120)
def lbfgs_closure(run: Run) -> None:
    """Several evaluations inside one step, on the same batch for ever, and no step like the one before."""
    torch.manual_seed(run.seed)
    model = mlp(64, 12, 10, act=nn.Tanh)
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
    alone(
        run, model, optimizer, lambda _: (digits()[0][:256], digits()[1][:256]),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * sum(
            (p**2).sum() for p in model.parameters()
        ), lambda: fell(run, 0.6),
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = run.forward(run.next_batch())
        loss.backward()
        return loss

    def one_step() -> None:
        run.losses.append(float(optimizer.step(closure).detach()))  # type: ignore[arg-type]

    run.one_step = one_step  # type: ignore[method-assign]


@healthy("cnn")
def targets_in_thousands(run: Run) -> None:
    """Targets of a few thousand, never normalised: losses of ten million and gradients of thousands that fall."""
    torch.manual_seed(run.seed)
    model = mlp(64, 32, 1)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.mse_loss(model(batch[0]).squeeze(-1), 1000.0 * batch[1])

    alone(run, model, optim.Adam(model.parameters(), lr=0.3), some_digits(32), loss, lambda: fell(run, 0.2))


@healthy("rnn", steps=240)
def heavy_tailed_targets(run: Run) -> None:
    """Log-normal targets under a squared loss: a few samples own the loss and the gradient, and always will."""
    torch.manual_seed(run.seed)
    model = mlp(6, 24, 1)

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        x = torch.randn(32, 6, generator=generator)
        return x, (x[:, :1] + 0.8 * torch.randn(32, 1, generator=generator)).exp()

    optimizer = optim.Adam(model.parameters(), lr=2e-3)

    def follows() -> bool:
        x = torch.randn(500, 6, generator=Generator().manual_seed(1))
        return float(torch.corrcoef(torch.stack([model(x)[:, 0].detach(), x[:, 0].exp()]))[0, 1]) > 0.7

    alone(run, model, optimizer, batch, lambda model, b: F.mse_loss(model(b[0]), b[1]), follows)


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(1, 24, 24, 1, act=nn.Tanh)

    def forward(self, t: Tensor) -> Tensor:
        return 1 + t * self.net(t)  # the initial value is built in


@healthy("cnn", steps=240)
def differential_equation(run: Run) -> None:
    """The loss is a residual of u' = -3u, through a second backward; the last layer's bias matters little."""
    torch.manual_seed(run.seed)
    model = _Field()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        t = batch[0].clone().requires_grad_()
        u = model(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return F.mse_loss(slope, -3 * u)

    def learned() -> bool:
        t = torch.linspace(0, 1, 20)[:, None]
        return float((model(t) - (-3 * t).exp()).detach().abs().max()) < 0.1

    alone(
        run, model, optim.Adam(model.parameters(), lr=1e-2), lambda g: (torch.rand(32, 1, generator=g),), loss, learned
    )
    schedule(run, lambda i: 0.5 * (1 + math.cos(math.pi * i / 240)))


@healthy("rnn", steps=300)
def floor_of_noise(run: Run) -> None:
    """The loss stands still from step 40 on, because what is left is the noise in the targets: nothing to repair."""
    torch.manual_seed(run.seed)
    model = nn.Linear(6, 1)
    truth = torch.randn(6, 1)

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        x = torch.randn(32, 6, generator=generator)
        return x, x @ truth + torch.randn(32, 1, generator=generator)

    alone(
        run, model, optim.SGD(model.parameters(), lr=0.05), batch, lambda model, b: F.mse_loss(model(b[0]), b[1]),
        lambda: 0.8 < mean(run.losses[-50:]) < 1.25,
    )  # fmt: skip
