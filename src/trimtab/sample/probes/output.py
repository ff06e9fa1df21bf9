"""What the model answers: whether it still tells its inputs apart, and by how much a loss gradient was scaled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from trimtab.core.contain import Contained
from trimtab.sample.probes.answers import Answers, by_classes, by_values, by_yes_and_no
from trimtab.sample.probes.batch import tensors_in
from trimtab.sample.transfer import number, to_host
from trimtab.torchutil.patch import own_hook

NUM_OUTPUTS = 8
NUM_ROWS = 32
NUM_COLUMNS = 512
MAX_ROWS = 512
"""Answers of a cross-entropy that are compared in a look."""
MAX_COMPARED = 1 << 18
"""Numbers of other answers."""
SPREAD = "out_spread/varies"
"""The first of the two numbers that a device sends of it."""


class OutputProbe:
    """Looks at the root's output now and then; listens to the gradient that comes back into it when asked to."""

    def __init__(self, contained: Contained) -> None:
        self._contained = contained
        self._spread: dict[str, float | Tensor] = {}
        self._towers: list[float] = []
        self._num_towers = 0
        self._factor: float | None = None
        self._compared: Answers | None = None
        self._pair: tuple[Tensor, Tensor] | None = None  # answers and their gradient, until the loss is known
        self._loss: float | None = None
        self.wants_loss = False
        self.heard: Callable[[Answers], object] = id  # whoever wants to know what answers were compared with
        self.listen = self.wanted = False
        self.has_news = False  # whether anything was seen since the last step that asked
        self.loss_kind = ""
        self.num_answers = 0

    def look(self, output: object) -> None:
        """Called after each forward of the root that builds a graph."""
        if self.listen:
            self._listen(output)
        if self.wanted:
            self.wanted, self.has_news = False, True  # once a step: micro-batches look alike
            given = list(tensors_in(output))
            self.num_answers = _answers(given)
            found = [t for t in given if t.is_floating_point() and t.dim() >= 2 and t.shape[0] >= 4]
            spreads = [_spread(t.detach()) for t in found[:NUM_OUTPUTS] if t.numel()]
            self._spread = spreads[0] if spreads else {}
            alike = len(spreads) > 1 and len({t.shape for t in found}) == 1
            self._num_towers = len(found) if alike else 0
            if alike and found[0].is_cpu:
                self._towers = [number(s["out_spread"]) for s in spreads]

    def take(self) -> dict[str, float | Tensor]:
        """What was seen since the last step that asked."""
        self.has_news = False
        out, self._spread = self._spread, {}
        if self._num_towers:
            out["towers"] = float(self._num_towers)
            self._num_towers = 0
        if self._towers:
            out["towers_spread"], out["towers_widest"] = min(self._towers), max(self._towers)
            out["tower"] = float(self._towers.index(min(self._towers)))
            self._towers = []
        if self._factor is not None:
            out["loss_factor"] = self._factor
            self._factor = None
        if self._compared is not None:
            if math.isfinite(self._compared.blind):
                out["answer_ratio"] = self._compared.loss / self._compared.blind
            if self._compared.are_shares:
                out["normalised_twice"] = 1.0
            self._compared = None
        self._pair, self._loss, self.wants_loss = None, None, False
        return out

    def told(self, loss: Tensor) -> None:
        """The loss of answers that are listened to, where only it tells what their gradient means."""
        if loss.is_cpu and loss.numel() == 1:
            self._loss = number(loss)
            self._match()

    def _listen(self, output: object) -> None:
        """Find out how the loss was scaled before backward: 1 for a plain mean, 1/n where it was divided, below 0
        where it is climbed instead of descended."""
        if self.loss_kind not in ("nll", "bce", "mse"):
            return
        # The first that can be logits: a model that computes its own loss answers with that first.
        first = next((t for t in tensors_in(output) if t.dim() >= 1 and t.is_floating_point()), None)
        if first is None or not first.requires_grad or not first.is_cpu:
            return
        classes = 1 if first.dim() in (2, 4, 5) else -1
        logits, kind = first.detach(), self.loss_kind

        def arrived(grad: Tensor) -> None:
            with np.errstate(all="ignore"):
                back = grad.detach()
                self.has_news = True
                if kind == "mse":
                    self._pair = logits, back
                    self._match()
                    return
                self._factor = _bce_factor(logits, back) if kind == "bce" else _nll_factor(logits, back, classes)
                if self._factor is not None:
                    self._compare(logits, back, kind, classes, self._factor)

        hook = unserializable_hook(self._contained.hook("listening to the output's gradient", arrived))  # type: ignore[no-untyped-call]
        own_hook(first.register_hook(hook))  # type: ignore[no-untyped-call]
        self.wants_loss = kind == "mse"

    def _compare(self, logits: Tensor, grad: Tensor, kind: str, classes: int, factor: float) -> None:
        if kind == "bce":
            if grad.numel() <= MAX_COMPARED:
                self._hear(by_yes_and_no(_wide(logits), _wide(grad), factor=factor))
            return
        answers, back = _rows(logits, classes), _rows(grad, classes)
        every = max(len(back) // MAX_ROWS, 1)
        self._hear(by_classes(*(v[::every].astype(np.float64) for v in (answers, back)), upwards=factor < 0))

    def _match(self) -> None:
        if self._pair is None or self._loss is None or self._pair[1].numel() > MAX_COMPARED:
            return
        pair, self._pair = self._pair, None
        with np.errstate(all="ignore"):
            self._hear(by_values(_wide(pair[0]), _wide(pair[1]), self._loss))

    def _hear(self, found: Answers | None) -> None:
        self._compared = found
        if found is not None:
            self.has_news = True
            self.heard(found)


def _wide(tensor: Tensor) -> NDArray[np.float64]:
    return to_host(tensor.float()).astype(np.float64)


def _answers(given: list[Tensor]) -> int:
    """How many answers a softmax over this output chooses from; 0 where that is not plain to see.

    Two or more equal tensors are the towers of a contrastive model, which chooses among the samples of the batch.
    """
    found = [t for t in given if t.is_floating_point() and t.dim() >= 2]
    if len(found) > 1:
        return found[0].shape[0] if len({t.shape for t in found}) == 1 and found[0].dim() == 2 else 0
    if not found:
        return 0
    return found[0].shape[-1] if found[0].dim() <= 3 else found[0].shape[1]


def _nll_factor(logits: Tensor, grad: Tensor, classes: int) -> float | None:
    """From the gradient of a mean cross-entropy: for each row it is (softmax - target) / number of rows, times this."""
    answers, back = _rows(logits, classes), _rows(grad, classes)
    used = back.any(1)  # rows of ignored targets have no gradient
    num = int(used.sum())
    if num < 2:
        return None
    some = np.flatnonzero(used)[:NUM_ROWS]
    answers, back = answers[some].astype(np.float64), back[some].astype(np.float64)
    # Of each row one entry, the target's, has another sign than all the rest: which sign says whether the loss falls.
    upwards = back.shape[1] > 2 and float((back < 0).mean()) > 0.5
    back = -back if upwards else back
    target = back.argmin(1)
    rows = np.arange(len(back))
    shares = np.exp(answers - answers.max(1, keepdims=True))
    missing = 1.0 - (shares / shares.sum(1, keepdims=True))[rows, target]
    clear = missing > 1e-3
    factors = -back[rows, target][clear] / missing[clear] * num
    if factors.size < 2 or factors.std() > 0.05 * abs(factors.mean()):
        return None  # not a mean cross-entropy of these logits after all
    return float(-np.median(factors) if upwards else np.median(factors))


def _rows(tensor: Tensor, classes: int) -> NDArray[Any]:
    """One row of classes for each answer."""
    wide = tensor if classes == -1 or tensor.dim() == 2 else tensor.movedim(classes, -1)
    return to_host(wide.reshape(-1, wide.shape[-1]).float())


def _bce_factor(logits: Tensor, grad: Tensor) -> float | None:
    """The same for a mean binary cross-entropy with targets 0 and 1: an element is (sigmoid - target) / number."""
    num = grad.numel()
    answer, back = (to_host(t.reshape(-1)[:NUM_COLUMNS].float()).astype(np.float64) for t in (logits, grad))
    answer, back = 1.0 / (1.0 + np.exp(-answer)), back * num
    clear = (answer > 0.02) & (answer < 0.98) & (back != 0)
    answer, back = answer[clear], back[clear]
    if answer.size < 8:
        return None
    for sign in (1.0, -1.0):
        factors = np.where(sign * back > 0, sign * back / answer, -sign * back / (1.0 - answer))
        if factors.std() < 0.05 * factors.mean():
            return sign * float(factors.mean())
    return None


def _spread(output: Tensor) -> dict[str, float | Tensor]:
    """The share of the output's mean square that differs between samples: 0 when all of them get the same answer."""
    rows = output.reshape(-1, output.shape[-1]) if output.dim() == 3 else output.reshape(output.shape[0], -1)
    stride = max(rows.shape[0] // NUM_ROWS, 1)
    shape = min(-(-rows.shape[0] // stride), NUM_ROWS), min(rows.shape[1], NUM_COLUMNS)
    steps = rows.stride()
    rows = rows.as_strided(shape, (steps[0] * stride, steps[1])).float()  # one view instead of three
    if rows.is_cpu:
        values = to_host(rows).astype(np.float64)
        with np.errstate(all="ignore"):
            whole = float((values * values).mean())
            share = float(values.var(0).mean()) / max(whole, 1e-30)
        return {"out_spread": share if math.isfinite(share) and whole > 0 else 1.0}
    return spread_on_device(rows)


def spread_on_device(rows: Tensor) -> dict[str, float | Tensor]:
    """Two numbers that stay on the device until their step is judged: `spread_of` makes one of them on the host."""
    varies, means = torch.var_mean(rows, 0, correction=0)
    return {SPREAD: varies.sum(), "out_spread/means": torch.linalg.vector_norm(means)}


def spread_of(scalars: dict[str, float]) -> dict[str, float]:
    """The same dict, with the spread in place of the two numbers that a device sent."""
    if SPREAD in scalars:
        varies = scalars.pop(SPREAD)
        whole = varies + scalars.pop("out_spread/means") ** 2
        share = varies / max(whole, 1e-30)
        scalars["out_spread"] = share if math.isfinite(share) and whole > 0 else 1.0
    return scalars
