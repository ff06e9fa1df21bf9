"""Healthy training programs, as different from each other as they can be while staying small.

Each program is a function of one argument, a `Loop`, through which it makes its optimizer steps; what it returns is
compared too. It seeds itself and trains on the CPU. Driven in two ways, it must give the same bits, and on these
programs every finding is a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F  # noqa: N812
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

Optimizers = optim.Optimizer | dict[str, optim.Optimizer]


@dataclass(frozen=True)
class Setup:
    """What a program trains: all that a guard is built from."""

    model: nn.Module
    optimizers: Optimizers
    scaler: torch.amp.GradScaler | None = None


@dataclass(frozen=True)
class Ready:
    """Gradients are in place: the losses they came from (one per micro-batch), and which optimizer is to step.

    A program whose optimizer needs a closure gives that instead, and no losses.
    """

    losses: tuple[Tensor, ...] = ()
    optimizer: optim.Optimizer | None = None
    closure: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Result:
    """Everything a guard could have disturbed: losses, weights, buffers, optimizer and scaler state, the RNG."""

    losses: list[float]
    state: list[Tensor]


Step = Callable[[Ready], Tensor]
"""Makes one optimizer step and returns the loss it belongs to."""


class Loop:
    """The program's side of the seam: it calls `begin` once, then `step` where it would have called the optimizer's."""

    def __init__(self, make: Callable[[Setup], Step]) -> None:
        self._make = make
        self._setup: Setup | None = None
        self._losses: list[float] = []

    def begin(self, model: nn.Module, optimizers: Optimizers, scaler: torch.amp.GradScaler | None = None) -> None:
        """Say what is trained; the way of stepping is built from it."""
        self._setup = Setup(model, optimizers, scaler)
        self._step = self._make(self._setup)

    def backward(self, loss: Tensor) -> None:
        """Call `loss.backward()`, scaled where there is a scaler."""
        scaler = self._setup.scaler if self._setup else None
        (loss if scaler is None else scaler.scale(loss)).backward()

    def step(self, *losses: Tensor, name: str = "", closure: Callable[[], Tensor] | None = None) -> None:
        """Make one optimizer step; `name` says which one where there are several."""
        assert self._setup is not None
        several = self._setup.optimizers
        optimizer = several[name] if isinstance(several, dict) else None
        self._losses.append(float(self._step(Ready(losses, optimizer, closure)).detach()))

    def note(self, value: Tensor) -> None:
        """Keep a figure that is no training loss beside the losses, to be compared as they are."""
        self._losses.append(float(value))

    def result(self, extra: Any) -> Result:
        """Collect what the run left behind."""
        assert self._setup is not None
        setup = self._setup
        tensors = [*setup.model.parameters(), *setup.model.buffers()]  # non-persistent buffers too
        optimizers = setup.optimizers.values() if isinstance(setup.optimizers, dict) else [setup.optimizers]
        scaler = [] if setup.scaler is None else [setup.scaler.state_dict()]
        states = [optimizer.state_dict() for optimizer in optimizers]
        return Result(self._losses, [*flat([tensors, states, scaler, extra]), torch.get_rng_state()])


Program = Callable[[Loop], Any]
PROGRAMS: dict[str, Program] = {}


def program(run: Program) -> Program:
    """List a program under its own name."""
    PROGRAMS[run.__name__] = run
    return run


def drive(run: Program, make: Callable[[Setup], Step]) -> Result:
    """Run a program, with the way of stepping that `make` builds for it."""
    loop = Loop(make)
    return loop.result(run(loop))


def unguarded(setup: Setup, ready: Ready) -> Tensor:
    """Step as a plain loop does."""
    optimizer = ready.optimizer or setup.optimizers
    assert isinstance(optimizer, optim.Optimizer)
    if ready.closure is not None:
        loss = optimizer.step(ready.closure)  # type: ignore[arg-type, func-returns-value]
        assert isinstance(loss, Tensor)
        return loss
    if setup.scaler is not None:
        setup.scaler.step(optimizer)
        setup.scaler.update()
    else:
        optimizer.step()
    return ready.losses[-1]


def flat(value: Any) -> Iterator[Tensor]:
    """Every tensor and number of a nested state, in order, as tensors."""
    if isinstance(value, Tensor):
        yield value.detach().clone()
    elif isinstance(value, int | float):
        yield torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, dict):
        for key in value:
            yield from flat(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)


# ------------------------------------------------------------------------------------------------------------- data


@cache
def digits() -> tuple[Tensor, Tensor]:
    """The bundled 8x8 digits in [0, 1], or a stand-in of the same shape where they are not there."""
    bundled = resources.files("trimtab").joinpath("data", "digits.npz")
    if bundled.is_file():
        with bundled.open("rb") as file:
            stored = np.load(file)
            x, y = stored["x"], stored["y"]
        return torch.from_numpy(x.astype(np.float32) / 16), torch.from_numpy(y.astype(np.int64))
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 1797)
    x = (rng.random((10, 64)) > 0.5)[y] * 0.6 + rng.random((1797, 64)) * 0.4
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def digit_batches(num_steps: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches of digits; the generator is its own, so that the global one shows what the guard does to it."""
    x, y = digits()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        rows = torch.randint(len(x), (batch_size,), generator=generator)
        yield x[rows], y[rows]


def sequences(num_steps: int, batch_size: int, length: int, max_stride: int = 3, vocab: int = 24) -> Iterator[Tensor]:
    """Token sequences with something to learn: an arithmetic walk with a random stride and a few random tokens."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(num_steps):
        start = torch.randint(vocab, (batch_size, 1), generator=generator)
        stride = torch.randint(1, max_stride + 1, (batch_size, 1), generator=generator)
        tokens = (start + stride * torch.arange(length)) % vocab
        noise = torch.rand(tokens.shape, generator=generator) < 0.05
        yield torch.where(noise, torch.randint(vocab, tokens.shape, generator=generator), tokens)


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        layers += [act()] * (i > 0) + [nn.Linear(fan_in, fan_out)]
    return nn.Sequential(*layers)


# --------------------------------------------------------------------------------------------------------- programs


@program
def mlp_adam(loop: Loop) -> None:
    """The plainest of all: a classifier under Adam."""
    torch.manual_seed(0)
    model = mlp(64, 48, 10)
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    loop.begin(model, optimizer)
    for x, y in digit_batches(200, 32):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)


@program
def cnn_batchnorm_cosine(loop: Loop) -> None:
    """BatchNorm, momentum and weight decay under a cosine, with an evaluation in eval mode now and then."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 120)
    loop.begin(model, optimizer)
    for i, (x, y) in enumerate(digit_batches(120, 32)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)
        scheduler.step()
        if i % 25 == 24:
            model.eval()
            with torch.no_grad():
                loop.note(F.cross_entropy(model(digits()[0][:200]), digits()[1][:200]))
            model.train()


class _Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], vocab: int = 24, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.cell = cell(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.cell(self.embed(tokens))[0]))


def _recurrent(loop: Loop, cell: type[nn.RNNBase], make: Callable[[nn.Module], optim.Optimizer]) -> None:
    torch.manual_seed(2)
    model = _Recurrent(cell)
    optimizer = make(model)
    loop.begin(model, optimizer)
    for tokens in sequences(100, 16, 12):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loop.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the usual companion of a recurrent network
        loop.step(loss)


@program
def lstm_adagrad(loop: Loop) -> Any:
    """An LSTM with dropout, clipped by the loop itself, under Adagrad."""
    return _recurrent(loop, nn.LSTM, lambda model: optim.Adagrad(model.parameters(), lr=0.05))


@program
def gru_rmsprop(loop: Loop) -> Any:
    """A GRU under centred RMSprop with momentum."""
    return _recurrent(loop, nn.GRU, lambda m: optim.RMSprop(m.parameters(), lr=2e-3, momentum=0.5, centered=True))


class CausalLM(nn.Module):
    """A small GPT: the head shares the embedding, and a -inf mask is a buffer, infinite by design and not by fault."""

    mask: Tensor

    def __init__(self, vocab: int, width: int, depth: int, heads: int, length: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.02)  # or the positions drown the tokens
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1))
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.embed(tokens) + self.place.weight[:length]
        for block in self.blocks:
            mask = self.mask[:length, :length]
            hidden = checkpoint(block, hidden, mask, use_reentrant=False) if self.checkpointed else block(hidden, mask)
        return self.head(self.norm(hidden))


@program
def transformer_onecycle(loop: Loop) -> None:
    """A causal language model with tied embeddings under AdamW and OneCycle (which moves the betas too)."""
    torch.manual_seed(3)
    model = CausalLM(24, 32, 2, 4, 15)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)
    loop.begin(model, optimizer)
    for tokens in sequences(100, 8, 16, max_stride=1):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)
        scheduler.step()


@program
def transformer_warmup_checkpointed(loop: Loop) -> None:
    """Linear warm-up from almost nothing, decay groups, and activation checkpointing (forward again in backward)."""
    torch.manual_seed(4)
    model = CausalLM(24, 32, 2, 4, 15, checkpointed=True)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=5e-3)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 40, 1.0))
    loop.begin(model, optimizer)
    for tokens in sequences(80, 8, 16, max_stride=1):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)
        scheduler.step()


@program
def sparse_embedding_two_optimizers(loop: Loop) -> None:
    """Sparse gradients under SparseAdam beside a dense Adam: one loss, two optimizers."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.EmbeddingBag(500, 16, mode="mean", sparse=True), nn.Tanh(), nn.Linear(16, 4))
    optimizers = {
        "sparse": optim.SparseAdam([model[0].weight], lr=2e-2),
        "dense": optim.Adam(model[2].parameters(), lr=1e-2),
    }
    loop.begin(model, optimizers)
    generator = torch.Generator().manual_seed(5)
    for _ in range(120):
        words = torch.randint(500, (16, 8), generator=generator)
        loss = F.cross_entropy(model(words), (words % 4).mode(dim=1).values)
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loop.backward(loss)
        for name in optimizers:
            loop.step(loss, name=name)


@program
def gan_alternating(loop: Loop) -> None:
    """Two players with an optimizer each; the discriminator's spectral norm moves buffers at every forward."""
    torch.manual_seed(6)
    critic = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(64, 32)), nn.LeakyReLU(0.2),
        nn.utils.parametrizations.spectral_norm(nn.Linear(32, 1)),
    )  # fmt: skip
    maker = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    model = nn.ModuleDict({"maker": maker, "critic": critic})  # its own forward is never called
    optimizers: dict[str, optim.Optimizer] = {
        "maker": optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.99)),
        "critic": optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99)),
    }
    loop.begin(model, optimizers)
    for x, _ in digit_batches(100, 16):
        fake = maker(torch.randn(16, 8))
        loss = F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()
        optimizers["critic"].zero_grad()
        loop.backward(loss)
        loop.step(loss, name="critic")
        loss = F.softplus(-critic(fake)).mean()
        optimizers["maker"].zero_grad()
        loop.backward(loss)
        loop.step(loss, name="maker")


@program
def accumulation(loop: Loop) -> None:
    """Four micro-batches to a step."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 10))
    optimizer = optim.NAdam(model.parameters(), lr=5e-3)
    loop.begin(model, optimizer)
    micro: list[Tensor] = []
    for i, (x, y) in enumerate(digit_batches(400, 8)):
        micro.append(F.cross_entropy(model(x), y))
        loop.backward(micro[-1] / 4)
        if i % 4 == 3:
            loop.step(*micro)
            optimizer.zero_grad()
            micro.clear()


def _scaled(loop: Loop, make: Callable[[nn.Module], optim.Optimizer]) -> Any:
    torch.manual_seed(8)
    model = mlp(64, 48, 10)
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=20)  # overflows first, and again later
    loop.begin(model, optimizer, scaler)
    scales = []
    for x, y in digit_batches(120, 32):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)
        scales.append(scaler.get_scale())
    drops = sum(after < before for before, after in pairwise(scales))
    assert drops > 8, f"the scale dropped only {drops} times: this program no longer shows routine overflows"
    return scales


@program
def float16_scaler_adam(loop: Loop) -> Any:
    """float16 autocast whose scale really overflows: a routine skip is the scaler's business, not an incident."""
    return _scaled(loop, lambda model: optim.Adam(model.parameters(), lr=3e-3))


@program
def float16_scaler_fused(loop: Loop) -> Any:
    """The same under a fused optimizer, where the scaler steps with scaled gradients and `found_inf`."""
    return _scaled(loop, lambda model: optim.AdamW(model.parameters(), lr=3e-3, fused=True))


@program
def bfloat16_weights(loop: Loop) -> None:
    """Weights and gradients in bfloat16, the loss in float32."""
    torch.manual_seed(9)
    model = mlp(64, 48, 10).to(torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    loop.begin(model, optimizer)
    for x, y in digit_batches(150, 32):
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)


@program
def progressive_unfreeze(loop: Loop) -> None:
    """A head on a frozen backbone, whose layers join the optimizer one by one in the middle of the run."""
    torch.manual_seed(10)
    model = mlp(64, 48, 32, 10, act=nn.Tanh)
    linears = [model[0], model[2], model[4]]
    for layer in linears[:2]:
        layer.requires_grad_(False)
    optimizer = optim.AdamW(linears[2].parameters(), lr=5e-3)
    loop.begin(model, optimizer)
    for i, (x, y) in enumerate(digit_batches(160, 32)):
        if i in (60, 110):
            layer = linears[1 if i == 60 else 0]
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
        if i == 140:  # and one is frozen again, its state staying behind in the optimizer
            linears[1].requires_grad_(False)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)


class _TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(32, 32, 16), mlp(32, 32, 16)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.normalize(self.left(x[:, :32]), dim=-1), F.normalize(self.right(x[:, 32:]), dim=-1)
        return self.log_scale.exp() * left @ right.T


@program
def contrastive_temperature(loop: Loop) -> None:
    """Two towers matched within the batch, with a learnable temperature of its own group."""
    torch.manual_seed(11)
    model = _TwoTowers()
    towers = [*model.left.parameters(), *model.right.parameters()]
    optimizer = optim.AdamW([{"params": towers}, {"params": [model.log_scale], "weight_decay": 0.0}], lr=3e-3)
    loop.begin(model, optimizer)
    for x, _ in digit_batches(150, 32):
        logits, labels = model(x), torch.arange(32)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)
        with torch.no_grad():
            model.log_scale.clamp_(0, math.log(100))  # as CLIP does: a weight changed outside the optimizer


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 6)
        self.experts = nn.ModuleList(mlp(64, 16, 10) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        best = gates.argmax(-1)
        out = x.new_zeros(len(x), 10)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero().squeeze(-1)
            if len(rows):  # an expert without rows takes no part: its gradients stay None
                out = out.index_add(0, rows, gates[rows, i, None] * expert(x[rows]))
        return out


@program
def mixture_of_experts(loop: Loop) -> None:
    """Routed experts on tiny batches: on most steps some of them get no gradient at all."""
    torch.manual_seed(12)
    model = _Experts()
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    loop.begin(model, optimizer)
    idle = 0
    for x, y in digit_batches(150, 4):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loop.backward(loss)
        idle += sum(expert[0].weight.grad is None for expert in model.experts)
        loop.step(loss)
    assert idle > 100, f"only {idle} expert steps were idle: this program no longer shows missing gradients"


@program
def batch_of_one(loop: Loop) -> None:
    """One sample at a time with Student-t noise in the targets: single losses jump by orders of magnitude."""
    torch.manual_seed(13)
    model = mlp(8, 16, 1, act=nn.Tanh)
    optimizer = optim.SGD(model.parameters(), lr=2e-3)
    loop.begin(model, optimizer)
    rng = np.random.default_rng(13)
    for _ in range(400):
        x = torch.from_numpy(rng.standard_normal((1, 8)).astype(np.float32))
        loss = F.mse_loss(model(x), x[:, :1] * 2 + 0.3 * float(rng.standard_t(3)))
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)


@program
def lbfgs_closure(loop: Loop) -> None:
    """LBFGS: several evaluations inside one step, and state in lists."""
    torch.manual_seed(14)
    model = mlp(64, 12, 10, act=nn.Tanh)
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    loop.begin(model, optimizer)
    x, y = digits()[0][:256], digits()[1][:256]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(25):
        loop.step(closure=closure)


class _Phasor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(33, dtype=torch.complex64) * 0.1)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=64)


@program
def complex_weights(loop: Loop) -> None:
    """A filter learnt in the frequency domain: complex64 parameters and gradients beside a scalar."""
    torch.manual_seed(15)
    model = _Phasor()
    optimizer = optim.Adam(model.parameters(), lr=2e-2)
    loop.begin(model, optimizer)
    for x, _ in digit_batches(150, 16):
        loss = F.mse_loss(model(x), x.roll(3, dims=1))
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)


class _Oddities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(64, 24, 10)
        self.wide = nn.Linear(10, 10, dtype=torch.float64)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.unused = nn.Parameter(torch.randn(7))
        self.zero = nn.Parameter(torch.zeros(10))  # initialised to nothing, as residual gains are
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("scratch", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen[int(self.calls) % 3] = True
        return self.wide(self.body(x).double() + self.empty.sum()) + self.zero


@program
def odd_tensors(loop: Loop) -> None:
    """A zero-element, a never-used and a zero-initialised parameter, float64 beside float32, integer buffers."""
    torch.manual_seed(16)
    model = _Oddities()
    optimizer = optim.Adam(model.parameters(), lr=3e-3, amsgrad=True)
    loop.begin(model, optimizer)
    for x, y in digit_batches(150, 32):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)


@program
def gaussian_nll_below_zero(loop: Loop) -> None:
    """A likelihood whose loss starts above zero, crosses it and stays below: ratios of losses mean nothing here."""
    torch.manual_seed(17)
    model = mlp(4, 32, 2, act=nn.Tanh)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    loop.begin(model, optimizer)
    generator = torch.Generator().manual_seed(17)
    for _ in range(250):
        x = torch.randn(64, 4, generator=generator)
        target = x[:, 0].sin() + 0.05 * torch.randn(64, generator=generator)
        mean, spread = model(x).unbind(-1)
        loss = F.gaussian_nll_loss(mean, target, F.softplus(spread) ** 2, eps=1e-4)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)
    assert loss < 0


@program
def converges_to_nothing(loop: Loop) -> None:
    """A realisable regression in float64 driven to 1e-12 and below: tiny losses and gradients are success here."""
    torch.manual_seed(18)
    model = nn.Linear(6, 1, dtype=torch.float64)
    optimizer = optim.SGD(model.parameters(), lr=0.15, momentum=0.5)
    loop.begin(model, optimizer)
    generator = torch.Generator().manual_seed(18)
    truth = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    for _ in range(200):
        x = torch.randn(32, 6, generator=generator, dtype=torch.float64)
        loss = F.mse_loss(model(x), x @ truth)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)
    assert loss < 1e-12


@program
def restarts_and_batch_jumps(loop: Loop) -> None:
    """Cosine warm restarts, then a tenfold cut of the rate, then a batch ten times as large."""
    torch.manual_seed(19)
    model = mlp(64, 32, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30)
    loop.begin(model, optimizer)
    small, large = digit_batches(180, 12), digit_batches(60, 120, seed=1)
    for i in range(240):
        if i == 120:  # the schedule ends; the rate is set by hand from here on
            optimizer.param_groups[0]["lr"] = 0.03
        x, y = next(small if i < 180 else large)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)
        if i < 120:
            scheduler.step()


@program
def fused_adamw_dropout(loop: Loop) -> None:
    """A fused optimizer, where the guard's gate is on the device, and dropout, which would show a touched RNG."""
    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 10))
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    loop.begin(model, optimizer)
    for x, y in digit_batches(150, 32):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)


@program
def label_noise_regression(loop: Loop) -> None:
    """Half of the labels are wrong, so the loss stays high and flat: not learning more is right here."""
    torch.manual_seed(21)
    model = mlp(64, 32, 1)
    optimizer = optim.Adadelta(model.parameters(), lr=0.5)
    loop.begin(model, optimizer)
    generator = torch.Generator().manual_seed(21)
    for x, y in digit_batches(150, 16):
        wrong = torch.rand(16, generator=generator) < 0.5
        target = torch.where(wrong, torch.randint(10, (16,), generator=generator), y).float()
        loss = F.huber_loss(model(x).squeeze(-1), target)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(64, 32, 16), mlp(8, 32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = self.encode(x).chunk(2, dim=-1)
        code = mean + torch.randn_like(mean) * (log_var / 2).exp()
        kl = (mean**2 + log_var.exp() - 1 - log_var).sum(-1) / 2
        return self.decode(code), kl


@program
def variational_autoencoder(loop: Loop) -> None:
    """A VAE with its KL term faded in: the loss rises for a good reason."""
    torch.manual_seed(22)
    model = _Variational()
    optimizer = optim.Adamax(model.parameters(), lr=5e-3)
    loop.begin(model, optimizer)
    for i, (x, _) in enumerate(digit_batches(150, 32)):
        logits, kl = model(x)
        likelihood = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(-1)
        loss = (likelihood + min(i / 100, 1.0) * kl).mean()
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)


@program
def policy_gradient_noise(loop: Loop) -> None:
    """A policy gradient, maximised: the objective is noisy, changes sign at will and need not fall."""
    torch.manual_seed(23)
    model = mlp(6, 24, 4, act=nn.Tanh)
    optimizer = optim.Adam(model.parameters(), lr=5e-3, maximize=True)
    loop.begin(model, optimizer)
    baseline, rewards = 0.0, []
    for _ in range(250):
        x = torch.randn(12, 6)
        log_policy = model(x).log_softmax(-1)
        action = torch.multinomial(log_policy.exp(), 1)
        reward = (action.squeeze(-1) == x[:, :4].argmax(-1)).float() + 0.5 * torch.randn(12)
        objective = (log_policy.gather(1, action).squeeze(-1) * (reward - baseline)).mean()
        baseline = 0.95 * baseline + 0.05 * float(reward.mean())
        optimizer.zero_grad()
        loop.backward(objective)
        loop.step(objective)
        rewards.append(float(reward.mean()))
    assert np.mean(rewards[-50:]) > np.mean(rewards[:50]) + 0.2


@program
def averaged_copy_and_teacher(loop: Loop) -> Any:
    """A deep copy of the guarded model as an EMA teacher, called beside it: only the student is trained."""
    torch.manual_seed(24)
    student = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = optim.SGD(student.parameters(), lr=0.1, momentum=0.9, fused=True)
    loop.begin(student, optimizer)
    teacher = optim.swa_utils.AveragedModel(student, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for x, y in digit_batches(120, 32):
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        logits = student(x)
        loss = F.cross_entropy(logits, y) + 0.1 * F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loop.backward(loss)
        loop.step(loss)
        teacher.update_parameters(student)
    return teacher.state_dict()
