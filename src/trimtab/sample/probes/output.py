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
from trimtab.sample.probes.answers import Answers, by_classes, by_sure_ones, by_values, by_yes_and_no
from trimtab.sample.probes.batch import MIN_LABELS, can_be_sent, tensors_in
from trimtab.sample.transfer import Later, Notes, is_here, number, sent, to_host
from trimtab.torchutil.patch import own_hook

NUM_OUTPUTS = 8
NUM_ROWS = 32
NUM_COLUMNS = 512
MAX_ROWS = 512
"""Answers of a cross-entropy that are compared in a look."""
MAX_SENT = 1 << 16
"""Numbers of an answer on a device up to which all of it is sent to the host."""
MAX_COMPARED = 1 << 18
"""Numbers of other answers."""
MIN_OVER_BATCH = 8
SPREAD = "out_spread/varies"
"""The first of the two numbers that a device sends of it."""
TOWER = "tower/"
SURE = 0.005
"""Loss of yes and no below which every answer is sure and right; guessing has 0.69."""


class OutputProbe:
    """Looks at the root's output now and then; listens to the gradient that comes back into it when asked to."""

    def __init__(self, contained: Contained) -> None:
        self._contained = contained
        self._spread: dict[str, float | Tensor] = {}
        self._towers: list[float] = []
        self._num_towers = 0
        self._factor: float | None = None
        self._compared: Answers | None = None
        self.answer_loss: float | None = None  # of the answers that were compared last
        self._pair: tuple[Tensor, Tensor] | None = None  # answers and their gradient, until the loss is known
        self._loss: float | None = None
        self.wants_loss = False
        self.heard: Callable[[Answers], object] = id  # whoever wants to know what answers were compared with
        self._waiting: list[Later] = []  # each makes facts of what a device sent
        self._sides: dict[float, float] = {}  # the loss of answers that should all be yes (1), or no (0)
        self._num_sure = 0
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
            if found and len(found[0]) >= MIN_OVER_BATCH and found[0].dim() == 2 and found[0].numel() <= MAX_SENT:
                self._spread |= told_by_columns(found[0].detach())
            alike = len(spreads) > 1 and len({t.shape for t in found}) == 1
            self._num_towers = len(found) if alike else 0
            if alike and is_here(found[0]):
                self._towers = [number(s["out_spread"]) for s in spreads]
            elif alike:
                self._spread |= {f"{TOWER}{i}/{k}": v for i, s in enumerate(spreads) for k, v in s.items()}

    def take(self) -> dict[str, float | Tensor]:
        """What was seen since the last step that asked."""
        self.has_news = False
        out, self._spread = self._spread, {}
        if self._num_towers:
            out["towers"] = float(self._num_towers)
            self._num_towers = 0
        if self._towers:
            out |= told_by_towers(self._towers)
            self._towers = []
        if self._factor is not None:
            out["loss_factor"] = self._factor
            self._factor = None
        if self._compared is not None:
            out |= told_by_answers(self._compared)
            self._compared = None
        if self._sides:
            out |= self._told_by_sides()
        self._pair, self._loss, self.wants_loss = None, None, False
        return out

    @property
    def waits(self) -> bool:
        """Whether a device has sent something since the last step that asked."""
        return len(self._waiting) > 0

    def _told_by_sides(self) -> dict[str, float]:
        """How many looks in a row a judge of true and made samples was sure and right about both."""
        sides, self._sides = self._sides, {}
        if len(sides) < 2:
            return {}
        self._num_sure = self._num_sure + 1 if max(sides.values()) < SURE else 0
        return {"judge_sure": float(self._num_sure)} if self._num_sure else {}

    def told(self, loss: Tensor) -> None:
        """The loss of answers that are listened to, where only it tells what their gradient means."""
        if is_here(loss) and loss.numel() == 1:
            self._loss = number(loss)
            self._match()

    def delayed(self, *, climbs: bool) -> Later | None:
        """What the gradient at the output tells, once it has arrived from its device; None where nothing was sent.

        `climbs`: the optimizer goes up where the gradient points, so that the factor has the other sign.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return None

        def later(facts: dict[str, float], notes: Notes) -> None:
            with np.errstate(all="ignore"):
                for one in waiting:
                    one(facts, notes)
            facts |= self._told_by_sides()
            if climbs and "loss_factor" in facts:
                facts["loss_factor"] = -facts["loss_factor"]

        return later

    def _listen(self, output: object) -> None:
        """Find out how the loss was scaled before backward: 1 for a plain mean, 1/n where it was divided, below 0
        where it is climbed instead of descended."""
        if self.loss_kind not in ("nll", "bce", "mse"):
            return
        # The first that can be logits: a model that computes its own loss answers with that first.
        first = next((t for t in tensors_in(output) if t.dim() >= 1 and t.is_floating_point()), None)
        if first is None or not first.requires_grad:
            return
        classes = 1 if first.dim() in (2, 4, 5) else -1
        logits, kind = first.detach(), self.loss_kind

        def arrived(grad: Tensor) -> None:
            with np.errstate(all="ignore"):
                back = grad.detach()
                if not is_here(back):
                    if can_be_sent(back) and (later := self._send(logits, back, kind, classes)) is not None:
                        self._waiting = [*self._waiting[1 - NUM_OUTPUTS :], later]
                    return
                self.has_news = True
                if kind == "mse":
                    self._pair = logits, back
                    self._match()
                    return
                factor, found = _compared(logits, back, kind, classes)
                if factor is not None:  # of several modules side by side the others are no answers
                    self._factor = factor
                if factor is not None or found is not None:
                    self._hear(found)

        hook = unserializable_hook(self._contained.hook("listening to the output's gradient", arrived))  # type: ignore[no-untyped-call]
        own_hook(first.register_hook(hook))  # type: ignore[no-untyped-call]
        self.wants_loss = kind == "mse"

    def _send(self, logits: Tensor, grad: Tensor, kind: str, classes: int) -> Later | None:
        """Have a device's answers looked at on the host: as they are where they are few, else what says most."""
        if grad.numel() > MAX_SENT:
            if kind == "mse":
                return None
            return _bce_later(logits, grad) if kind == "bce" else _nll_later(logits, grad, classes)
        copies = sent(logits), sent(grad)

        def later(facts: dict[str, float], notes: Notes) -> None:
            answers, back = (torch.from_numpy(to_host(copy)) for copy in copies)
            found = None
            if kind == "mse":
                if "loss" in facts:
                    found = by_values(_wide(answers), _wide(back), facts["loss"])
            else:
                factor, found = _compared(answers, back, kind, classes)
                if factor is not None:
                    facts["loss_factor"] = factor
            self.answer_loss = None if found is None else found.loss
            if found is not None:
                self._note(found)
                facts |= told_by_answers(found)

        return later

    def _match(self) -> None:
        if self._pair is None or self._loss is None or self._pair[1].numel() > MAX_COMPARED:
            return
        pair, self._pair = self._pair, None
        with np.errstate(all="ignore"):
            self._hear(by_values(_wide(pair[0]), _wide(pair[1]), self._loss))

    def _hear(self, found: Answers | None) -> None:
        self.answer_loss = None if found is None else found.loss
        if found is not None:  # what another module's answers were compared with stays
            self._compared, self.has_news = found, True
            self._note(found)

    def _note(self, found: Answers) -> None:
        if found.side is not None:
            self._sides[found.side] = found.loss
        self.heard(found)


def told_by_answers(found: Answers) -> dict[str, float]:
    """How the loss of answers compares with that of guessing blindly, and whether they are probabilities already."""
    out = {"answer_ratio": found.loss / found.blind} if math.isfinite(found.blind) else {}
    if found.are_shares:
        out["normalised_twice"] = 1.0
    if found.labels is not None and found.labels.size >= MIN_LABELS and (found.labels == found.labels[0]).all():
        out["labels_flat"] = 1.0
    if found.zeros:
        out["rectified_logits"] = found.zeros
    if found.one_target is not None:
        out["one_target"] = found.one_target
    return out


def _compared(logits: Tensor, grad: Tensor, kind: str, classes: int) -> tuple[float | None, Answers | None]:
    """By how much the loss was scaled, and what the answers were compared with; None where it is another loss."""
    if kind == "bce":
        factor = _bce_factor(logits, grad)
        if grad.numel() > MAX_COMPARED:
            return factor, None
        if factor is None:  # also where every answer is sure
            return None, by_sure_ones(_wide(logits), _wide(grad))
        return factor, by_yes_and_no(_wide(logits), _wide(grad), factor=factor)
    answers, back = _rows(logits, classes), _rows(grad, classes)
    factor = _nll_factor(answers, back)
    if factor is None:
        return None, None
    every = max(len(back) // MAX_ROWS, 1)
    return factor, by_classes(*(v[::every].astype(np.float64) for v in (answers, back)), upwards=factor < 0)


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


def _nll_factor(answers: NDArray[Any], back: NDArray[Any]) -> float | None:
    """From the gradient of a mean cross-entropy: for each row it is (softmax - target) / number of rows, times this."""
    used = np.logical_or.reduce(back, 1)  # rows of ignored targets have no gradient
    num = int(np.count_nonzero(used))
    if num < 2:
        return None
    some = slice(NUM_ROWS) if num == len(used) else used.nonzero()[0][:NUM_ROWS]
    answers, back = answers[some].astype(np.float64), back[some].astype(np.float64)
    # Of each row one entry, the target's, has another sign than all the rest: which sign says whether the loss falls.
    upwards = back.shape[1] > 2 and int(np.count_nonzero(back < 0)) > 0.5 * back.size
    back = -back if upwards else back
    target = back.argmin(1)
    rows = np.arange(len(back))
    shares = np.exp(answers - np.maximum.reduce(answers, 1, keepdims=True))
    missing = 1.0 - shares[rows, target] / np.add.reduce(shares, 1)
    return _nll_median(missing, -back[rows, target] * num, upwards=upwards)


def _nll_later(logits: Tensor, grad: Tensor, classes: int) -> Later:
    """The same on a device, which sends three numbers of each row: a row may have as many as there are words."""
    answers, back = _device_rows(logits, classes), _device_rows(grad, classes)
    used = back.ne(0).any(1)
    some = torch.argsort(used.to(torch.uint8), descending=True, stable=True)[:NUM_ROWS]
    answers, back, mine = answers[some].double(), back[some].double(), used[some].double()
    minus = ((back < 0).double().mean(1) * mine).sum() / mine.sum() if back.shape[1] > 2 else back.new_zeros(())
    signed = torch.where(minus > 0.5, -back, back)
    value, target = signed.min(1)
    missing = 1.0 - answers.softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    numbers = sent(torch.cat([torch.stack([used.sum().double(), minus]), missing, -value, mine]))

    def later(facts: dict[str, float], notes: Notes) -> None:
        values = to_host(numbers)
        num, upwards = float(values[0]), float(values[1]) > 0.5
        missing, value, mine = np.split(values[2:], 3)
        there = mine > 0
        factor = _nll_median(missing[there], value[there] * num, upwards=upwards) if num >= 2 else None
        if factor is not None:
            facts["loss_factor"] = factor

    return later


def _device_rows(tensor: Tensor, classes: int) -> Tensor:
    wide = tensor if classes == -1 or tensor.dim() == 2 else tensor.movedim(classes, -1)
    return wide.reshape(-1, wide.shape[-1])


def _nll_median(missing: NDArray[Any], value: NDArray[Any], *, upwards: bool) -> float | None:
    clear = missing > 1e-3
    if clear.sum() < 2:
        clear = missing > 1e-5  # all answers are nearly right: what is left still tells
    factors = np.sort(value[clear] / missing[clear])
    num = factors.size
    mean = float(np.add.reduce(factors)) / max(num, 1)
    if math.isnan(mean):
        return mean
    apart = factors - mean
    if num < 2 or math.sqrt(float(np.vdot(apart, apart)) / num) > 0.05 * abs(mean):
        return None  # not a mean cross-entropy of these logits after all
    middle = float(factors[num // 2] + factors[(num - 1) // 2]) / 2
    return -middle if upwards else middle


def _rows(tensor: Tensor, classes: int) -> NDArray[Any]:
    """One row of classes for each answer."""
    wide = tensor if classes == -1 or tensor.dim() == 2 else tensor.movedim(classes, -1)
    return to_host(wide.reshape(-1, wide.shape[-1]).float())


def _bce_factor(logits: Tensor, grad: Tensor) -> float | None:
    """The same for a mean binary cross-entropy with targets 0 and 1: an element is (sigmoid - target) / number."""
    parts = (to_host(t.reshape(-1)[:NUM_COLUMNS].float()).astype(np.float64) for t in (logits, grad))
    return _bce_mean(*parts, num=grad.numel())


def _bce_later(logits: Tensor, grad: Tensor) -> Later:
    parts, num = [sent(t.reshape(-1)[:NUM_COLUMNS].float()) for t in (logits, grad)], grad.numel()

    def later(facts: dict[str, float], notes: Notes) -> None:
        factor = _bce_mean(*(to_host(part).astype(np.float64) for part in parts), num=num)
        if factor is not None:
            facts["loss_factor"] = factor

    return later


def _bce_mean(answer: NDArray[Any], back: NDArray[Any], *, num: int) -> float | None:
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
    if output.dtype is torch.float32 and is_here(output):
        answers = to_host(output)
        answers = answers.reshape(-1, answers.shape[-1]) if answers.ndim == 3 else answers.reshape(len(answers), -1)
        some = answers[:: max(len(answers) // NUM_ROWS, 1)][:NUM_ROWS, :NUM_COLUMNS]
        return {"out_spread": _share_that_varies(some.astype(np.float64))}
    rows = output.reshape(-1, output.shape[-1]) if output.dim() == 3 else output.reshape(output.shape[0], -1)
    stride = max(rows.shape[0] // NUM_ROWS, 1)
    shape = min(-(-rows.shape[0] // stride), NUM_ROWS), min(rows.shape[1], NUM_COLUMNS)
    steps = rows.stride()
    rows = rows.as_strided(shape, (steps[0] * stride, steps[1])).float()  # one view instead of three
    if is_here(rows):
        return {"out_spread": _share_that_varies(to_host(rows).astype(np.float64))}
    return spread_on_device(rows)


def _share_that_varies(values: NDArray[np.float64]) -> float:
    with np.errstate(all="ignore"):  # no products of wide vectors: those of a few pages wake NumPy's other threads
        whole = float(np.add.reduce(values * values, None)) / values.size
        values -= np.add.reduce(values, 0) / len(values)
        share = float(np.add.reduce(values * values, None)) / values.size / max(whole, 1e-30)
    return share if math.isfinite(share) and whole > 0 else 1.0


def told_by_columns(answers: Tensor) -> dict[str, float | Tensor]:
    """Whether answers, or what they are logarithms of, add up to 1 over the samples, and not over the choices."""
    if answers.shape[1] < 2:
        return {}
    if is_here(answers):
        values = to_host(answers.float())
        lowest, highest = values.min(), values.max()
        if not (lowest >= 0.0 and highest <= 1.0) and not highest <= 0.0:
            return {}  # neither shares nor logarithms of shares: nearly always
        with np.errstate(all="ignore"):
            shares = values if lowest >= 0.0 else np.exp(values)
            over_batch, over_choices = (float(np.abs(shares.sum(i) - 1.0).max()) for i in (0, 1))
        return {"batch_softmax": 1.0} if over_batch < 1e-3 < over_choices else {}
    wide = answers.float()
    parts = torch.where(wide.min() < 0.0, wide.exp(), wide)
    per_column, per_row = ((parts.sum(i) - 1.0).abs().amax() for i in (0, 1))
    fits = (wide.max() <= 0.0) | ((wide.min() >= 0.0) & (wide.max() <= 1.0))
    return {"batch_softmax": (fits & (per_column < 1e-3) & (per_row > 1e-3)).float()}


def spread_on_device(rows: Tensor) -> dict[str, float | Tensor]:
    """Two numbers that stay on the device until their step is judged: `spread_of` makes one of them on the host."""
    varies, means = torch.var_mean(rows, 0, correction=0)
    return {SPREAD: varies.sum(), "out_spread/means": torch.linalg.vector_norm(means)}


def spread_of(scalars: dict[str, float]) -> dict[str, float]:
    """The same dict, with the spread in place of the two numbers that a device sent."""
    if SPREAD in scalars:
        scalars["out_spread"] = _share(scalars, "out_spread")
        if f"{TOWER}0/{SPREAD}" in scalars:
            num = int(min(scalars["towers"], NUM_OUTPUTS))
            scalars |= told_by_towers([_share(scalars, f"{TOWER}{i}/out_spread") for i in range(num)])
    return scalars


def _share(scalars: dict[str, float], name: str) -> float:
    varies = scalars.pop(f"{name}/varies")
    whole = varies + scalars.pop(f"{name}/means") ** 2
    share = varies / max(whole, 1e-30)
    return share if math.isfinite(share) and whole > 0 else 1.0


def told_by_towers(spreads: list[float]) -> dict[str, float]:
    """How much the narrowest and the widest of several equal outputs vary, and which one is the narrowest."""
    return {
        "towers_spread": min(spreads),
        "towers_widest": max(spreads),
        "tower": float(spreads.index(min(spreads))),
    }
