"""A small fusion transformer: two images as tokens, then a question; the answer is read off the last token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from trimtab.sample.transfer import to_device
from trimtab.train.evaluation import classification_metrics
from trimtab.train.recipes.pairs.data import ANSWERS

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


W_SIM = 1.2
SWAP_WEIGHTS = (5.0, 20.0)
RAMP_FRAC = 0.5
SWAPPED = (1, 0, 2)
"""Where each answer goes when the images change places."""


def ramp(done_frac: float) -> float:
    """The weight of the swap term, growing over the first half of the run.

    Example:
        >>> ramp(0.0), ramp(0.25), ramp(0.9)
        (5.0, 12.5, 20.0)
    """
    begin, end = SWAP_WEIGHTS
    return begin + (end - begin) * min(done_frac / RAMP_FRAC, 1.0)


def swap_divergence(scores: Tensor, swapped: Tensor) -> Tensor:
    """The symmetric KL divergence between the answers to a pair and to the swapped pair, First and Second exchanged.

    Example:
        >>> scores = torch.tensor([[2.0, 0.0, 1.0]])
        >>> float(swap_divergence(scores, scores[:, [1, 0, 2]]))
        0.0
    """
    p, q = log_softmax(scores, -1), log_softmax(swapped[..., list(SWAPPED)], -1)
    there = kl_div(p, q, log_target=True, reduction="batchmean")
    back = kl_div(q, p, log_target=True, reduction="batchmean")
    return 0.5 * (there + back)


class PairLoss:
    """`step_fn` of the training: weighted cross-entropy and the swap term, whose weight follows the run.

    `done_frac` returns how much of the tuning is over. It is called at every step, so that a resumed run continues with
    the right weight. It is None in the training before, which has no swap term: there both orders are examples.
    """

    def __init__(self, w_sim: float = W_SIM) -> None:
        self.w_sim = w_sim
        self.done_frac: Callable[[], float | None] = lambda: 0.0

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of one batch."""
        done, labels = self.done_frac(), batch["labels"]
        scores, swapped = model(batch["first"], batch["second"], batch["prompt"], both=True).unbind(1)
        if done is None:
            other = labels.new_tensor(SWAPPED)[labels]
            return self.answers(torch.cat([scores, swapped]), torch.cat([labels, other]))
        return self.answers(scores, labels) + ramp(done) * swap_divergence(scores, swapped)

    def answers(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy, Similar weighing more than First and Second."""
        return cross_entropy(scores.float(), labels, weight=scores.new_tensor([1.0, 1.0, self.w_sim]).float())


@torch.no_grad()
def evaluate_pairs(loss: PairLoss, model: nn.Module, loader: Iterable[object]) -> dict[str, float]:
    """Loss, accuracy in all and by answer, and how often swapped images get the swapped answer."""
    device = next(model.parameters()).device
    was = {module: module.training for module in model.modules()}
    model.eval()
    try:
        answers, labels = [], []
        for batch in loader:
            there = to_device(batch, device)
            answers.append(model(there["first"], there["second"], there["prompt"], both=True).float().cpu())
            labels.append(there["labels"].cpu())
    finally:
        for module, mode in was.items():
            module.training = mode
    scores, swapped = torch.cat(answers).unbind(1)
    wanted = torch.cat(labels)
    found = classification_metrics(scores, wanted)
    sound = scores.isfinite().all(-1) & swapped.isfinite().all(-1)
    consistent = (scores.argmax(-1) == swapped[:, list(SWAPPED)].argmax(-1)) & sound
    return {
        "loss": float(loss.answers(scores, wanted)),
        "accuracy": found["accuracy"],
        "f1": found["f1"],
        **{f"accuracy_{name}": found.get(f"accuracy_class_{i}", float("nan")) for i, name in enumerate(ANSWERS)},
        "swap_consistency": float(consistent.float().mean()),
    }
