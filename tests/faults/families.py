"""Six small families of training: different data, layers, losses and optimizers, all of it following from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pydoc_data import topics

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F  # noqa: N812

from tests.faults.base import Task
from tests.runs.programs import CausalLM, digits, mlp

CHARS = "\0\n abcdefghijklmnopqrstuvwxyz.,:;()'\"_*`-=0123456789[]"  # \0 stands for all others
WINDOW = 32


@cache
def split() -> tuple[Tensor, Tensor]:
    """Rows of the digits to train on and to hold out: every fifth is held out."""
    rows = torch.arange(len(digits()[0]))
    return rows[rows % 5 != 0], rows[rows % 5 == 0]


@cache
def text() -> Tensor:
    """Python's own documentation as tokens of a small alphabet."""
    joined = "\n".join(topics.topics[key] for key in sorted(topics.topics))[:60_000].lower()
    return torch.tensor([max(CHARS.find(char), 0) for char in joined])


@cache
def upscaled() -> tuple[Tensor, Tensor]:
    """Noisy 16x16 digits, and which pixels of them are ink."""
    clean = F.interpolate(digits()[0].view(-1, 1, 8, 8), scale_factor=2, mode="bilinear", align_corners=False)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    return clean + 0.4 * noise, (clean > 0.4).float()


def shuffled(count: int, size: int, seed: int) -> Callable[[int, int], Tensor]:
    """Which of `count` samples are in the batch of a step: epochs, each in its own order, another for each micro."""

    @cache
    def order(epoch: int, micro: int) -> Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 100_003 + epoch * 101 + micro))

    def rows(step: int, micro: int) -> Tensor:
        epoch, place = divmod(step, count // size)
        return order(epoch, micro)[place * size : (place + 1) * size]

    return rows


def digit_batches(size: int, seed: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Digits and their classes from the training split."""
    (x, y), train = digits(), split()[0]
    rows = shuffled(len(train), size, seed)

    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        chosen = train[rows(step, micro)]
        return x[chosen], y[chosen]

    return batch


def held_out_digits() -> tuple[Tensor, Tensor]:
    """The held-out digits and their classes."""
    return digits()[0][split()[1]], digits()[1][split()[1]]


def text_batches(size: int, seed: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Windows of the first nine tenths of the text, and the same one character further."""
    tokens = text()[: len(text()) * 9 // 10]
    windows = tokens[: (len(tokens) - 1) // WINDOW * WINDOW + 1]
    before, after = windows[:-1].view(-1, WINDOW), windows[1:].view(-1, WINDOW)
    rows = shuffled(len(before), size, seed)
    return lambda step, micro: (before[rows(step, micro)], after[rows(step, micro)])


def held_out_text() -> tuple[Tensor, Tensor]:
    """Windows of the last tenth of the text."""
    tokens = text()[len(text()) * 9 // 10 :][: 64 * WINDOW + 1]
    return tokens[:-1].view(-1, WINDOW), tokens[1:].view(-1, WINDOW)


def classify(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy over the last dimension."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def agree(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Symmetric cross entropy between the two sides of a batch."""
    left, right = model(*batch)
    logits = left @ right.T * model.logit_scale.exp()
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def separate(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Binary cross entropy per pixel."""
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


class Recurrent(nn.Module):
    """Embedding, GRU, dropout, head."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width // 2)
        self.cell = nn.GRU(width // 2, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.cell(self.embed(tokens))[0]))


class Towers(nn.Module):
    """Two towers with normalised outputs and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(32, 64, 32), mlp(32, 64, 32)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)


def convolution(fan_in: int, fan_out: int, stride: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(fan_out), nn.ReLU()
    )


class UNet(nn.Module):
    """One level down, one up, one skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = convolution(1, 6), convolution(6, 12, stride=2)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.join, self.head = convolution(12, 6), nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.enter(x)
        return self.head(self.join(torch.cat([skip, self.up(self.down(skip))], dim=1)))


def make_mlp(seed: int) -> Task:
    """A classifier under Adam."""
    torch.manual_seed(seed)
    model = mlp(64, 48, 48, 10)
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    return Task("mlp", model, optimizer, digit_batches(32, seed), classify, held_out_digits(), num_classes=10)


def make_cnn(seed: int) -> Task:
    """Convolutions with BatchNorm and dropout under momentum SGD with weight decay."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        convolution(1, 8), nn.MaxPool2d(2), convolution(8, 16), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return Task("cnn", model, optimizer, digit_batches(32, seed), classify, held_out_digits(), num_classes=10)


def make_rnn(seed: int) -> Task:
    """A character model with a GRU under RMSprop."""
    torch.manual_seed(seed)
    model = Recurrent(len(CHARS), 48)
    optimizer = optim.RMSprop(model.parameters(), lr=3e-3)
    return Task("rnn", model, optimizer, text_batches(12, seed), classify, held_out_text(), num_classes=len(CHARS))


def make_lm(seed: int) -> Task:
    """A small GPT, its head tied to its embedding, under AdamW."""
    torch.manual_seed(seed)
    model = CausalLM(len(CHARS), 32, 2, 4, WINDOW)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    return Task("lm", model, optimizer, text_batches(8, seed), classify, held_out_text(), num_classes=len(CHARS))


def make_contrastive(seed: int) -> Task:
    """Two towers learn which left and right halves of digits belong together, under AdamW."""
    torch.manual_seed(seed)
    model = Towers()
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    whole = digit_batches(32, seed)

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = x.view(-1, 8, 8).chunk(2, dim=2)
        return left.flatten(1), right.flatten(1)

    return Task(
        "contrastive", model, optimizer, lambda step, micro: halves(whole(step, micro)[0]), agree,
        halves(held_out_digits()[0][:64]),
    )  # fmt: skip


def make_segment(seed: int) -> Task:
    """A small U-Net with BatchNorm finds the ink in noisy digits, under Adam."""
    torch.manual_seed(seed)
    model = UNet()
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    (x, y), (train, held_out) = upscaled(), split()
    rows = shuffled(len(train), 16, seed)

    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        chosen = train[rows(step, micro)]
        return x[chosen], y[chosen]

    return Task("segment", model, optimizer, batch, separate, (x[held_out[:64]], y[held_out[:64]]))


FAMILIES: dict[str, Callable[[int], Task]] = {
    "mlp": make_mlp,
    "cnn": make_cnn,
    "rnn": make_rnn,
    "lm": make_lm,
    "contrastive": make_contrastive,
    "segment": make_segment,
}
