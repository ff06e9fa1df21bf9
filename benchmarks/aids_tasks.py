"""Small trainings for `benchmarks/aids.py`, each as a target with its own validation data; all follows from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pydoc_data import topics

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F  # noqa: N812

from trimtab.data import load_digits
from trimtab.doctor.target import Target

WINDOW = 32
Pairs = tuple[Tensor, Tensor]


class Batches:
    """Random batches, another order in every epoch, drawn from a generator of its own as a DataLoader would."""

    def __init__(self, data: Pairs, size: int, seed: int) -> None:
        self.data, self.size = data, size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Pairs]:
        order = torch.randperm(len(self.data[0]), generator=self.generator)
        for rows in order[: len(order) // self.size * self.size].split(self.size):
            yield self.data[0][rows], self.data[1][rows]


@cache
def digits() -> tuple[Pairs, Pairs]:
    images, classes = load_digits()
    x, y = torch.from_numpy(images).float() / 16.0, torch.from_numpy(classes).long()
    held = torch.arange(len(y)) % 5 == 0
    return (x[~held], y[~held]), (x[held], y[held])


@cache
def text() -> tuple[Pairs, Pairs, int]:
    joined = "\n".join(topics.topics[key] for key in sorted(topics.topics))[:120_000].lower()
    known = sorted(set(joined))
    place = {char: i for i, char in enumerate(known)}
    tokens = torch.tensor([place[char] for char in joined])
    rows = tokens[: (len(tokens) - 1) // WINDOW * WINDOW + 1]
    x, y = rows[:-1].view(-1, WINDOW), rows[1:].view(-1, WINDOW)
    cut = len(x) * 9 // 10
    return (x[:cut], y[:cut]), (x[cut : cut + 128], y[cut : cut + 128]), len(known)


@cache
def table() -> tuple[Pairs, Pairs]:
    """A regression whose features have scales from 0.01 to 30, and heavy-tailed noise."""
    some = torch.Generator().manual_seed(7)
    x = torch.randn(2400, 12, generator=some)
    hidden = torch.tanh(x @ torch.randn(12, 6, generator=some) / 3.0)
    y = hidden @ torch.randn(6, 1, generator=some) + 0.1 * torch.randn(2400, 1, generator=some)
    x = x * torch.logspace(-2, 1.5, 12)
    return (x[:2000], y[:2000]), (x[2000:], y[2000:])


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        num, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(num, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(num, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocab: int, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, width), nn.Parameter(0.02 * torch.randn(WINDOW, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=True) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.place)).transpose(1, 2)


class Lstm(nn.Module):
    def __init__(self, vocab: int, width: int = 48) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(vocab, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(tokens))[0]).transpose(1, 2)


class Gru(nn.Module):
    def __init__(self, vocab: int, width: int = 40) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.cell(self.embed(tokens))[0])).transpose(1, 2)


class Vit(nn.Module):
    """Patches of 2x2 pixels of an 8x8 digit."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(1, width, 2, 2), nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x.view(-1, 1, 8, 8)).flatten(2).transpose(1, 2) + self.place
        return self.head(self.blocks(tokens).mean(1))


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def plain_cnn() -> nn.Module:
    """Without any normalisation."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


Optimizer = Callable[[nn.Module, float], optim.Optimizer]


def adam(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=lr)


def adamw(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=lr)


def sgd(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=lr)


def momentum(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def rmsprop(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.RMSprop(model.parameters(), lr=lr)


Make = Callable[[], tuple[nn.Module, Pairs, Pairs, Callable[[Tensor, Tensor], Tensor]]]


def _on_digits(model: Callable[[], nn.Module]) -> Make:
    return lambda: (model(), *digits(), F.cross_entropy)


def _autoencoder() -> tuple[nn.Module, Pairs, Pairs, Callable[[Tensor, Tensor], Tensor]]:
    (x, _), (held_out, _) = digits()
    return mlp(64, 48, 12, 48, 64), (x, x), (held_out, held_out), F.mse_loss


def _on_text(model: Callable[[int], nn.Module]) -> Make:
    return lambda: (model(text()[2]), text()[0], text()[1], F.cross_entropy)


def _on_table(*widths: int) -> Make:
    return lambda: (mlp(12, *widths, 1), *table(), F.mse_loss)


# name: model and data, optimizer, batch size, whether it was looked at while the aids were made
TASKS: dict[str, tuple[Make, Optimizer, int, bool]] = {
    "digits MLP, Adam": (_on_digits(lambda: mlp(64, 64, 64, 10)), adam, 32, True),
    "digits CNN, SGD momentum": (_on_digits(cnn), momentum, 32, True),
    "GPT on text, AdamW": (_on_text(Gpt), adamw, 8, True),
    "badly scaled regression, SGD": (_on_table(32, 32), sgd, 32, True),
    "LSTM on text, Adam": (_on_text(Lstm), adam, 8, True),
    "ViT on digits, AdamW": (_on_digits(Vit), adamw, 32, True),
    "deep digits MLP, SGD": (_on_digits(lambda: mlp(64, 48, 48, 48, 48, 10)), sgd, 32, True),
    "GRU on text, SGD momentum": (_on_text(Gru), momentum, 8, False),
    "digits autoencoder, RMSprop": (_autoencoder, rmsprop, 32, False),
    "plain CNN on digits, Adam": (_on_digits(plain_cnn), adam, 16, False),
}


def build(name: str, seed: int, lr: float) -> Target:
    """One task, ready to train."""
    make, optimizer, size, _ = TASKS[name]
    torch.manual_seed(seed)
    model, train, held_out, loss_fn = make()
    return Target(
        model=model,
        optimizer=optimizer(model, lr),
        loader=Batches(train, size, seed),
        loss_fn=loss_fn,
        val_loader=[held_out],
    )
