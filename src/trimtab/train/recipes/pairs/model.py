"""A small fusion transformer: two images as tokens, then a question; the answer is read off the last token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TOKENS = 2
"""Of each image."""
POOLED = 4
SMALL = 16
"""Images of fewer pixels a side are not made smaller at once."""


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor, last: bool = False) -> Tensor:
        """The same tokens, each having looked at those before it; with `last` only the last of them."""
        seen = self.norm(hidden)
        kept, asking = (hidden[:, -1:], seen[:, -1:]) if last else (hidden, seen)
        key, value = self.key_value(seen).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.query(asking), key, value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=not last)
        kept = kept + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = kept + self.feed(kept)
        return result


class PairFusion(nn.Module):
    """Two images and a question in, scores of First, Second and Similar out.

    `vision` sees each image, `projector` makes tokens of it, `blocks` fuse them with the words. With `both` the answer
    for the swapped images comes along, `[batch, 2, 3]`, and each image is still looked at only once.

    Example:
        >>> model = PairFusion(size=(1, 8, 8), num_words=9, max_words=5, width=16, depth=2, heads=2)
        >>> images, prompt = torch.rand(2, 4, 1, 8, 8), torch.ones(4, 5, dtype=torch.long)
        >>> model(*images, prompt).shape, model(*images, prompt, both=True).shape
        (torch.Size([4, 3]), torch.Size([4, 2, 3]))
    """

    def __init__(
        self, *, size: tuple[int, int, int], num_words: int, max_words: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.vision = nn.Sequential(
            *_convolution(size[0], 16, 1 if min(size[1:]) < SMALL else 2),
            *_convolution(16, 64, 2),
            nn.AdaptiveAvgPool2d(POOLED),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(
            nn.Linear(64 * POOLED**2, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, TOKENS * width),
        )
        self.words = nn.Embedding(num_words, width)
        self.places = nn.Parameter(0.5 * torch.randn(3 * TOKENS + max_words, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, first: Tensor, second: Tensor, prompt: Tensor, both: bool = False) -> Tensor:
        """Scores `[batch, 3]`, or `[batch, 2, 3]` with `both`."""
        seen = self.projector(self.vision(torch.cat([first, second]))).unflatten(1, (TOKENS, -1))
        (one, two), words = seen.chunk(2), self.words(prompt)
        hidden = torch.cat([one, two, one - two, words], dim=1)
        if both:
            hidden = torch.cat([hidden, torch.cat([two, one, two - one, words], dim=1)])
        hidden = hidden + self.places
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(self.blocks[-1](hidden, last=True)[:, 0]))
        return torch.stack(scores.chunk(2), dim=1) if both else scores


def _convolution(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )
