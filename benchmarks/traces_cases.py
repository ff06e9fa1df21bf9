"""Seven small trainings, and what happens to them: nothing, rates, labels, spikes, slow growth."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from tests.faults.base import Case, Run, Task, set_lr
from tests.faults.families import digit_batches, held_out_digits, make_cnn, make_lm, make_mlp, make_rnn, shuffled
from tests.runs.programs import mlp
from torch import Tensor, nn, optim
from torch.nn import functional as F  # noqa: N812

STEPS, ONSET = 300, 100
PLAIN = "constant rate"
GROWTH = "growth of the rate"


class Variational(nn.Module):
    """Encoder, a sample, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 48, 16), mlp(8, 48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var


def elbo(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Squared error and the divergence from the prior, per sample."""
    out, mean, log_var = model(batch[0])
    apart = (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean() / 2
    return (out - batch[1]).square().sum(1).mean() + 0.1 * apart


def squared(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


class GraphNet(nn.Module):
    """Two rounds of messages along the edges of one graph."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)
        self.first, self.second = nn.Linear(12, 32), nn.Linear(32, 4)

    def forward(self, nodes: Tensor, chosen: Tensor) -> Tensor:
        hidden = F.relu(self.first(self.edges @ nodes))
        return self.second(self.edges @ hidden)[chosen]


@cache
def graph() -> tuple[Tensor, Tensor, Tensor]:
    """The edges, the nodes and their classes: nodes of a class are joined more often and point the same way."""
    chance = torch.Generator().manual_seed(5)
    classes = torch.arange(240) % 4
    joined = torch.rand(240, 240, generator=chance) < torch.where(classes[:, None] == classes, 0.06, 0.01)
    edges = (joined | joined.T | torch.eye(240).bool()).float()
    centres = torch.randn(4, 12, generator=chance)
    nodes = centres[classes] + 1.5 * torch.randn(240, 12, generator=chance)
    return edges / edges.sum(1, keepdim=True), nodes, classes


def make_gnn(seed: int) -> Task:
    """Classes of nodes, some of them at a time, under Adam."""
    torch.manual_seed(seed)
    edges, nodes, classes = graph()
    model, rows = GraphNet(edges), shuffled(180, 60, seed)

    def batch(step: int, micro: int) -> tuple[Tensor, ...]:
        chosen = rows(step, micro)
        return chosen, classes[chosen]

    def loss(net: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(net(nodes, batch[0]), batch[1])

    held_out = torch.arange(180, 240)
    adam = optim.Adam(model.parameters(), lr=5e-3)
    return Task("gnn", model, adam, batch, loss, (held_out, classes[held_out]), num_classes=4)


def make_vae(seed: int) -> Task:
    """A small VAE of digits under Adam."""
    torch.manual_seed(seed)
    model, whole = Variational(), digit_batches(32, seed)

    def batch(step: int, micro: int) -> tuple[Tensor, ...]:
        x = whole(step, micro)[0].flatten(1)
        return x, x

    x = held_out_digits()[0].flatten(1)
    return Task("vae", model, optim.Adam(model.parameters(), lr=2e-3), batch, elbo, (x, x))


def make_regression(seed: int) -> Task:
    """A smooth function of eight numbers and some noise, under SGD with momentum."""
    torch.manual_seed(seed)
    model = mlp(8, 48, 1)
    chance = torch.Generator().manual_seed(11)
    x = torch.randn(1200, 8, generator=chance)
    y = (torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(1200, 1, generator=chance)) / 1.5
    rows = shuffled(1000, 32, seed)

    def batch(step: int, micro: int) -> tuple[Tensor, ...]:
        chosen = rows(step, micro)
        return x[chosen], y[chosen]

    sgd = optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    return Task("regression", model, sgd, batch, squared, (x[1000:], y[1000:]))


TRAININGS: dict[str, Callable[[int], Task]] = {
    "mlp": make_mlp,
    "cnn": make_cnn,
    "lm": make_lm,
    "regression": make_regression,
    "vae": make_vae,
    "gnn": make_gnn,
    "rnn": make_rnn,
}
HELD_OUT = frozenset(("regression", "vae", "gnn", "rnn"))


def scheduled(name: str, factor: Callable[[int], float]) -> Case:
    """A healthy schedule."""

    def prepare(run: Run) -> None:
        run.scheduler = optim.lr_scheduler.LambdaLR(run.optimizer, factor)

    return Case(name, "healthy", prepare, steps=STEPS)


def ramp(step: int, num: int) -> float:
    return min(1.0, (step + 1) / num)


HEALTHY = (
    Case(PLAIN, "healthy", steps=STEPS),
    scheduled("warm-up over 80 steps, cosine", lambda s: ramp(s, 80) * (1 + math.cos(math.pi * s / STEPS)) / 2),
    scheduled("warm-up over 250 steps", lambda s: ramp(s, 250)),
    scheduled("warm-up by a factor over 120 steps", lambda s: min(1.0, 1e-3 * 1e3 ** (s / 120))),
    scheduled("two cycles", lambda s: 0.1 + 0.9 * abs((s / 75) % 2 - 1)),
    scheduled("half the rate every 100 steps", lambda s: 0.5 ** (s // 100)),
    scheduled("held low, then raised", lambda s: 0.1 if s < 50 else min(1.0, 0.1 + 0.9 * (s - 50) / 100)),
)
"""The first gives the spread; the others are looked at for false alarms alone."""


def rate(name: str, factor: Callable[[int], float], onset: int, group: str = "rate") -> Case:
    """The rate at a step is that of the recipe times a factor of the steps since the onset."""

    def at(run: Run) -> None:
        base = run.extra.setdefault("rate", run.optimizer.param_groups[0]["lr"])
        if run.step >= onset:
            set_lr(run.optimizer, base * factor(run.step - onset + 1))

    names = ("learning-rate", "exploding-gradient", "diverging-loss", "update-ratio", "loss-spike", "not-learning",
             "oscillating-loss", "nonfinite-loss", "nonfinite-gradient", "dead-units", "weight-jump")  # fmt: skip
    return Case(name, group, at=at, names=names, kind="drift", onset=onset, steps=STEPS)


def growing(by: float, onset: int) -> Case:
    """The rate is multiplied at every step; a rate of 1e6 stands for all above it."""
    since = f"from step {onset}" if onset else "from the start"
    return rate(f"rate +{by:.0%} a step {since}", lambda n: min((1 + by) ** n, 1e6), onset, GROWTH)


def relabelled(name: str, change: Callable[[Run, Tensor], Tensor], onset: int = ONSET) -> Case:
    """Targets are changed from a step on."""

    def prepare(run: Run) -> None:
        draw, chance = run.draw, torch.Generator().manual_seed(run.seed)
        run.extra["chance"] = chance

        def drawn() -> tuple[Tensor, ...]:
            batch = draw()
            return batch if run.step < onset else (*batch[:-1], change(run, batch[-1]))

        run.draw = drawn  # type: ignore[method-assign]

    names = ("diverging-loss", "targets-do-not-predict", "not-learning", "loss-spike", "outlier-batch", "label-range",
             "exploding-gradient")  # fmt: skip
    return Case(name, "labels", prepare, names=names, kind="drift", onset=onset, steps=STEPS)


def shuffled_targets(run: Run, y: Tensor) -> Tensor:
    flat = y.flatten() if y.ndim > 1 and not y.is_floating_point() else y
    return flat[torch.randperm(len(flat), generator=run.extra["chance"])].view_as(y)


def flipped_targets(run: Run, y: Tensor) -> Tensor:
    return -y if y.is_floating_point() else (run.task.num_classes or 1) - 1 - y


def spike(name: str, begin: Callable[[Run], None]) -> Case:
    names = ("outlier-batch", "exploding-gradient", "loss-spike", "weight-jump", "update-ratio", "diverging-loss",
             "nonfinite-loss", "nonfinite-gradient")  # fmt: skip
    return Case(name, "spike", begin, names=names, kind="abrupt", onset=ONSET, steps=STEPS)


def bad_batch(run: Run) -> None:
    """The inputs of one batch are far too large, or for tokens all the same; its targets are far too large."""
    draw = run.draw

    def drawn() -> tuple[Tensor, ...]:
        return tuple(_broken(part) for part in draw()) if run.step in (ONSET, ONSET + 1) else draw()

    run.draw = drawn  # type: ignore[method-assign]


def _broken(part: Tensor) -> Tensor:
    return 200.0 * part if part.is_floating_point() else torch.zeros_like(part)


def scaled_gradient(run: Run) -> None:
    """The gradients of three steps are multiplied, after any clipping of the loop's own."""
    after = run.after_backward

    def more() -> None:
        after()
        if ONSET <= run.step < ONSET + 3:
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(1000.0)

    run.after_backward = more  # type: ignore[method-assign]


def scaled_loss(run: Run) -> None:
    """The loss of every step from the onset on is multiplied."""
    forward = run.forward
    run.forward = lambda b: forward(b) * (100.0 if run.step >= ONSET else 1.0)  # type: ignore[method-assign]


def growing_weights(run: Run) -> None:
    if run.step >= ONSET:
        with torch.no_grad():
            for p in run.model.parameters():
                p.mul_(1.02)


def growing_noise(run: Run) -> None:
    """Noise on the gradients, 3 % larger at every step."""
    after, chance = run.after_backward, torch.Generator().manual_seed(run.seed)

    def more() -> None:
        after()
        if run.step >= ONSET:
            size = 0.05 * 1.03 ** (run.step - ONSET)
            for p in run.model.parameters():
                if p.grad is not None:
                    rms = p.grad.square().mean().sqrt()
                    p.grad.add_(size * rms * torch.randn(p.shape, generator=chance))

    run.after_backward = more  # type: ignore[method-assign]


def slow(name: str, *, prepare: Callable[[Run], None] = lambda run: None, at: Callable[[Run], None]) -> Case:
    names = ("weight-corrupted", "weight-jump", "exploding-gradient", "diverging-loss", "loss-spike", "update-ratio",
             "logits-out-of-range", "not-learning")  # fmt: skip
    return Case(name, "slow growth", prepare, at, names=names, kind="drift", onset=ONSET, steps=STEPS)


def nothing(run: Run) -> None:
    """At a step nothing is done."""


FAULTS = (
    *(rate(f"rate x{k} from the start", lambda n, k=k: float(k), 0) for k in (10, 30, 100, 300)),
    *(rate(f"rate x{k} from step {ONSET}", lambda n, k=k: float(k), ONSET) for k in (3, 10, 30, 100, 300)),
    *(growing(by, ONSET) for by in (0.01, 0.02, 0.05, 0.10)),
    *(growing(by, 0) for by in (0.02, 0.05, 0.10)),
    rate(f"rate + a tenth of it each step from step {ONSET}", lambda n: 1 + 0.1 * n, ONSET, GROWTH),
    rate(f"rate x1.5 every 10 steps from step {ONSET}", lambda n: 1.5 ** (n // 10), ONSET, GROWTH),
    relabelled("targets shuffled", shuffled_targets),
    relabelled("targets shifted by one row", lambda run, y: y.roll(1, 0)),
    relabelled("targets flipped", flipped_targets),
    relabelled("targets shuffled from the start", shuffled_targets, 0),
    spike("bad batch", bad_batch),
    spike("gradient x1000 for three steps", scaled_gradient),
    spike("loss x100", scaled_loss),
    slow("weights +2% a step", at=growing_weights),
    slow("noise in the gradients +3% a step", prepare=growing_noise, at=nothing),
)
