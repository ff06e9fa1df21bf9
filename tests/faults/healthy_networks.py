"""Healthy runs with problems of their own, III: networks in which gradients are missing, zero, tiny or complex."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn, optim
from torch.nn import functional as F  # noqa: N812

from tests.faults.base import Run
from tests.faults.healthy_players import some_digits
from tests.faults.healthy_tools import alone, fell, healthy, mean
from tests.runs.programs import mlp


class _Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(64, count)
        self.experts = nn.ModuleList(mlp(64, 16, 10) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        out = x.new_zeros(len(x), 10)
        for i, expert in enumerate(self.experts):
            rows = (gates.argmax(-1) == i).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, gates[rows, i, None] * expert(x[rows]))
        return out


@healthy("contrastive")
def routed_experts(run: Run) -> None:
    """On every step some experts have no gradient at all: nothing was routed to them, and other steps will."""
    torch.manual_seed(run.seed)
    model = _Experts(8)
    alone(
        run, model, optim.Adam(model.parameters(), lr=5e-3), some_digits(6),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), lambda: fell(run, 0.6),
    )  # fmt: skip


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(64, 48, 32)
        self.heads = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 1), nn.Linear(32, 64)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](self.trunk(x).relu())


@healthy("segment", steps=240)
def tasks_by_turns(run: Run) -> None:
    """Three tasks by turns, with losses of 2, 8 and 0.2: the loss jumps at every step, and two heads always rest."""
    torch.manual_seed(run.seed)
    model = _Heads()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, y = batch
        task = run.step % 3
        target = (y, y[:, None] - 4.5, x)[task]
        return (F.cross_entropy, F.mse_loss, F.mse_loss)[task](model(x, task), target)

    def learned() -> bool:
        return all(mean(run.losses[-30 + i :: 3]) < 0.8 * mean(run.losses[i:9:3]) for i in range(3))

    alone(run, model, optim.Adam(model.parameters(), lr=3e-3), some_digits(32), loss, learned)


class _Phasor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(33, dtype=torch.complex64) * 0.1)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=64)


@healthy("segment")
def complex_weights(run: Run) -> None:
    """Complex weights and gradients, some of whose imaginary parts have no influence at all."""
    torch.manual_seed(run.seed)
    model = _Phasor()
    alone(
        run, model, optim.Adam(model.parameters(), lr=2e-2), some_digits(16),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[0].roll(3, dims=1)), lambda: fell(run, 0.2),
    )  # fmt: skip


@healthy("lm", steps=240)
def bag_of_words_sparse(run: Run) -> None:
    """Sparse gradients of a table whose rows are mostly untouched, beside a dense optimizer on the same loss."""
    torch.manual_seed(run.seed)
    model = nn.Sequential(nn.EmbeddingBag(400, 16, mode="mean", sparse=True), nn.Tanh(), nn.Linear(16, 4))
    ways = {
        "sparse": optim.SparseAdam([model[0].weight], lr=3e-2),
        "dense": optim.Adam(model[2].parameters(), lr=1e-2),
    }

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        words = torch.randint(200, (32, 6), generator=generator)  # the other half is never seen
        return words, (words % 4).mode(dim=1).values

    alone(
        run, model, ways, batch, lambda model, b: F.cross_entropy(model(b[0]), b[1]), lambda: fell(run, 0.6)
    )  # fmt: skip

    def update() -> None:
        for optimizer in ways.values():
            optimizer.step()

    run.update = update  # type: ignore[method-assign]
    run.zero_grad = lambda: model.zero_grad()  # type: ignore[method-assign]


@healthy("contrastive")
def deep_tanh_orthogonal(run: Run) -> None:
    """Thirty plain tanh layers: gradients change along the depth, and yet it trains, being orthogonal at first."""
    torch.manual_seed(run.seed)
    model = mlp(64, *[32] * 30, 10, act=nn.Tanh)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, 1.05)
    alone(
        run, model, optim.Adam(model.parameters(), lr=1e-3), some_digits(32),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), lambda: fell(run, 0.5),
    )  # fmt: skip


class _Gated(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(mlp(width, width, width) for _ in range(depth))
        self.gates = nn.ParameterList(torch.zeros(()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block, gate in zip(self.blocks, self.gates, strict=True):
            x = x + gate * block(x)
        return self.head(x)


@healthy("segment")
def gates_from_zero(run: Run) -> None:
    """ReZero: behind gates of zero, sixteen of eighteen layers have gradients of exactly zero on the first step."""
    torch.manual_seed(run.seed)
    model = _Gated(16, 32)
    alone(
        run, model, optim.Adam(model.parameters(), lr=2e-3), some_digits(32),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), lambda: fell(run, 0.4),
    )  # fmt: skip


@healthy("mlp", steps=240)
def saddle_then_fall(run: Run) -> None:
    """A nearly linear network from small weights: a long flat beginning with tiny gradients, then a sudden fall."""
    torch.manual_seed(run.seed)
    model = mlp(64, 32, 32, 10, act=nn.Softsign)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.025)
            nn.init.zeros_(module.bias)
    alone(
        run, model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9), some_digits(32),
        lambda model, batch: F.cross_entropy(model(batch[0] - 0.3), batch[1]), lambda: fell(run, 0.4),
    )  # fmt: skip


@healthy("lm")
def one_hot_inputs(run: Run) -> None:
    """Inputs that are almost all zero, and levels that never occur: columns whose gradients are zero for ever."""
    torch.manual_seed(run.seed)
    model = mlp(64 * 12, 32, 10)

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        x, y = some_digits(32)(generator)
        return F.one_hot((x * 8).long(), 12).flatten(1).float(), y

    alone(
        run, model, optim.Adagrad(model.parameters(), lr=0.03), batch,
        lambda model, b: F.cross_entropy(model(b[0]), b[1]), lambda: fell(run, 0.3),
    )  # fmt: skip


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(mlp(32, 32, 32) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.6:
                x = x + block(x.relu())
        return self.head(x)


@healthy("contrastive")
def layers_dropped_at_random(run: Run) -> None:
    """Stochastic depth: at every step other blocks are left out, and have no gradient on that step."""
    torch.manual_seed(run.seed)
    model = _Dropping()
    alone(
        run, model, optim.Adam(model.parameters(), lr=2e-3), some_digits(32),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), lambda: fell(run, 0.5),
    )  # fmt: skip
