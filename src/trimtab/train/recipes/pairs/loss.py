"""The loss of a pair, its answer and that of the swapped pair; and how well a model answers pairs it never saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from trimtab.sample.transfer import to_device
from trimtab.train.evaluation import classification_metrics
from trimtab.train.recipes.pairs.data import ANSWERS

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
