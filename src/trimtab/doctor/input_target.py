"""Inputs and targets: whether they belong together, whether one predicts the other, and batches with one replaced."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.doctor.batch_tensors import is_label_like, leaves, mapped, same_values
from trimtab.doctor.dropout_calls import WithoutDropout
from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Call
from trimtab.sample.transfer import number

SHIFTS = (1, 0, -1, 2)
"""Slips of the pen; what lies farther off is a task: copying after a pause, for one."""
CLEAR = 0.9
NUM_ROWS, MIN_ROWS = 400, 64
MAX_CLASSES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """How far the targets lie from the tokens they equal."""

    by: int
    share: float
    wrong: bool
    cause: str = ""
    lookup: tuple[nn.Embedding, Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How well targets follow from the inputs beside them, and from those `by` places on."""

    here: float
    there: float
    by: int

    @property
    def wrong(self) -> bool:
        """Whether they follow from others, and not from their own."""
        return self.by != 0 and self.here < 0.05 and self.there > 0.2


def misplaced(probe: Probe) -> str:
    """What is in another order than it was in the batch, in a sentence; empty where nothing is."""
    call, batch = probe.calls[0], dict(leaves(probe.batch(0)))
    compared = [t for t in call.facts.targets if t.numel() >= 8]
    given = [t for t in call.inputs if t.dim() and t.shape[0] >= 8]
    kept_x = any(same_values(leaf, g) for leaf in batch.values() for g in given if leaf.numel() == g.numel())
    for path, leaf in batch.items():
        if leaf.numel() < 8 or any(same_values(leaf, g) for g in given):
            continue
        if any(same_values(leaf, t) for t in compared):
            continue
        if kept_x and any(_same_set(leaf, t) for t in compared):
            return f"the loss gets the targets (tensor {path}) in another order than the inputs."
    kept_y = [p for p, leaf in batch.items() if any(same_values(leaf, t) for t in compared)]
    for path, leaf in batch.items():
        other = kept_y and path not in kept_y and leaf.dim() >= 2 and not any(same_values(leaf, g) for g in given)
        if other and any(g.shape == leaf.shape and _same_rows(leaf, g) for g in given):
            return f"the model gets the inputs (tensor {path}) in another order than the targets."
    return ""


def _same_set(a: Tensor, b: Tensor) -> bool:
    if a.numel() != b.numel() or a.is_complex():
        return False
    one, other = (t.detach().double().cpu().reshape(-1) for t in (a, b))
    return bool((one != one[0]).any()) and torch.equal(one.sort().values, other.sort().values)


def _same_rows(a: Tensor, b: Tensor) -> bool:
    """Whether one has the rows of the other, in another order."""
    one, other = (t.detach().double().cpu().reshape(t.shape[0], -1) for t in (a, b))
    keys = [sorted(map(tuple, t[:, :64].tolist())) for t in (one, other)]
    return keys[0] == keys[1]


def shift_of_tokens(probe: Probe) -> Shift | None:
    """By how many places targets and input tokens are apart; None where targets are no tokens of the input."""
    return probe.cached("shift", lambda: _shift(probe))


def _shift(probe: Probe) -> Shift | None:
    facts = probe.facts
    target = facts.target
    if facts.kind != "nll" or target is None:
        return None
    for module, tokens in probe.calls[0].lookups:
        if tokens.dim() != 2 or torch.unique(tokens).numel() < 4:
            continue
        for dim in (1, 0):
            size = tokens.shape[dim]
            short = [n for n in (size, size - 1) if n >= 4 and target.numel() == tokens.numel() // size * n]
            if not short:
                continue
            shape = (tokens.shape[0], short[0]) if dim else (short[0], tokens.shape[1])
            best = _best(tokens, target.reshape(shape), dim, facts.ignore_index)
            if best is not None:
                return _judged(probe, *best, module, tokens)
    return None


def _best(tokens: Tensor, target: Tensor, dim: int, ignore: int) -> tuple[int, float] | None:
    shares: dict[int, float] = {}
    for by in SHIFTS:
        num = min(target.shape[dim], tokens.shape[dim] - max(by, 0)) - max(-by, 0)
        if num < 2:
            continue
        mine = target.narrow(dim, max(-by, 0), num)
        theirs = tokens.narrow(dim, max(-by, 0) + by, num)
        valid = (mine != ignore) & (mine >= 0)
        if bool(valid.any()):
            shares[by] = number((mine == theirs)[valid].float().mean())
    if not shares:
        return None
    by = 1 if shares.get(1, 0.0) > CLEAR else max(shares, key=lambda k: shares[k])
    return (by, shares[by]) if shares[by] > CLEAR else None


def _judged(probe: Probe, by: int, share: float, module: nn.Embedding, tokens: Tensor) -> Shift:
    if by == 1:
        return Shift(by=1, share=share, wrong=False, lookup=(module, tokens))
    if by == 0:
        ahead = None if probe.no_experiments else sees_ahead(probe, module, tokens)
        cause = "the targets are the input tokens themselves, not the next ones: copying is all there is to learn."
        return Shift(by=0, share=share, wrong=ahead == 0.0, cause=cause)
    cause = f"the targets are the tokens {abs(by)} places {'on' if by > 0 else 'back'}, not the next ones."
    return Shift(by=by, share=share, wrong=True, cause=cause)


def sees_ahead(probe: Probe, module: nn.Embedding, tokens: Tensor) -> float | None:
    """The share of outputs before a changed token that change with it; None where outputs have no positions."""
    return probe.cached("ahead", lambda: _ahead(probe, module, tokens))


def _ahead(probe: Probe, module: nn.Embedding, tokens: Tensor) -> float | None:
    if tokens.dim() == 2 and is_label_like(tokens):
        changed = _with_one_changed(probe.batch(0), tokens, module.num_embeddings)
        if changed is None:
            return None
        plain, other = probe.once(probe.batch(0)), probe.once(changed)
        a, b = plain.output, other.output
        if a is None or b is None or a.shape != b.shape or a.dim() < 2:
            return None
        num = tokens.shape[1]
        dim = 1 if a.shape[1] in (num, num - 1) else 0 if a.shape[0] in (num, num - 1) else None
        if dim is None:
            return None
        at = num // 2
        before = [t.narrow(dim, 0, at).double() for t in (a, b)]
        after = [t.narrow(dim, at, a.shape[dim] - at).double() for t in (a, b)]
        if not bool((after[0] != after[1]).any()):
            return None  # it did not see the change at all
        apart = (before[0] - before[1]).abs() > 1e-4 * max(number(a.abs().max()), 1e-12)
        return number(apart.double().mean())
    return None


def _with_one_changed(batch: object, tokens: Tensor, size: int) -> object:
    """The batch with the middle one of its tokens replaced, for every sample."""
    done: list[str] = []
    at = tokens.shape[1] // 2

    def change(path: str, tensor: Tensor) -> Tensor:
        fits = tensor.dim() == 2 and tensor.shape[0] == tokens.shape[0] and tensor.shape[1] >= tokens.shape[1]
        if not fits or not is_label_like(tensor) or not same_values(tensor[:, : tokens.shape[1]], tokens):
            return tensor
        new = tensor.clone()
        new[:, at] = (new[:, at] + 1) % size
        done.append(path)
        return new

    out = mapped(batch, change)
    return out if done else None


def shifted_rows(probe: Probe) -> Rows | None:
    """Whether targets follow from the inputs of other samples; None where there are too few, or no relation at all."""
    if len(probe.roles.targets) != 1 or not probe.roles.inputs or not probe.roles.sure:
        return None
    try:
        pairs = _stored(probe)
    except Exception:  # an item that cannot be read is another check's business
        return None
    if pairs is None:
        return None
    x, y = pairs
    scores = {by: _score(x, y, by) for by in (0, 1, -1, 2, -2)}
    best = max(scores, key=lambda k: scores[k])
    if scores[best] < 0.05:
        return None
    return Rows(here=scores[0], there=scores[best], by=best if scores[0] < 0.05 else 0)


def _stored(probe: Probe) -> tuple[Tensor, Tensor] | None:
    """Inputs and targets in the order they are stored in, as numbers."""
    dataset = getattr(probe.target.loader, "dataset", None)
    items: list[dict[str, Tensor]] = []
    if dataset is not None and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        began = time.perf_counter()
        for i in range(min(len(dataset), NUM_ROWS)):
            items.append(dict(leaves(dataset[i])))
            if time.perf_counter() - began > 0.5:
                break
        columns = [[item.get(p) for item in items] for p in (probe.roles.inputs[0], probe.roles.targets[0])]
        if any(v is None for column in columns for v in column):
            return None
        try:
            x, y = (torch.stack([v for v in column if v is not None]) for column in columns)
        except RuntimeError:
            return None
    else:
        found = [dict(leaves(b)) for b in probe.scan.batches]
        try:
            x, y = (torch.cat([b[p] for b in found]) for p in (probe.roles.inputs[0], probe.roles.targets[0]))
        except (RuntimeError, KeyError):
            return None
    if x.shape[0] != y.shape[0] or x.shape[0] < MIN_ROWS or not x.is_floating_point():
        return None
    wanted = _wanted(y)
    return None if wanted is None else (_features(x), wanted)


def _features(x: Tensor) -> Tensor:
    """Columns that a line can be put through: the inputs, reduced in number, and some bends of them."""
    flat = torch.nan_to_num(x.detach().cpu().reshape(x.shape[0], -1).double())
    flat = (flat - flat.mean(0)) / flat.std(0).clamp_min(1e-9)
    generator = torch.Generator().manual_seed(0)
    if flat.shape[1] > 48:
        flat = (
            flat
            @ torch.randn(flat.shape[1], 48, generator=generator, dtype=torch.double, device="cpu")
            / flat.shape[1] ** 0.5
        )
    mixed = torch.randn(flat.shape[1], 32, generator=generator, dtype=torch.double, device="cpu") / flat.shape[1] ** 0.5
    bent = torch.relu(flat @ mixed)
    return torch.cat([flat, bent, torch.ones(len(flat), 1, dtype=torch.double, device=flat.device)], 1)


def _wanted(y: Tensor) -> Tensor | None:
    y = y.detach().cpu()
    if is_label_like(y) and y.dim() == 1 and 1 < torch.unique(y).numel() <= MAX_CLASSES:
        return torch.nn.functional.one_hot(y - y.min()).double()
    if y.is_floating_point():
        flat = torch.nan_to_num(y.reshape(y.shape[0], -1).double())
        return flat if flat.shape[1] <= 16 else None
    return None


def _score(x: Tensor, y: Tensor, by: int) -> float:
    """How much of the targets a ridge regression explains on samples that it was not fitted to."""
    num = len(x) - abs(by)
    a, b = (x[:num], y[by : by + num]) if by >= 0 else (x[-by : -by + num], y[:num])
    even = torch.arange(num, device="cpu") % 2 == 0
    scores = []
    for fit in (even, ~even):
        gram = a[fit].T @ a[fit] + 3.0 * torch.eye(a.shape[1], dtype=torch.double, device=a.device)
        guess = a[~fit] @ torch.linalg.solve(gram, a[fit].T @ b[fit])
        rest = (b[~fit] - guess).square().sum()
        total = (b[~fit] - b[fit].mean(0)).square().sum()
        scores.append(1.0 - number(rest / total.clamp_min(1e-12)))
    return min(scores)


NUM_STEPS, MIN_STEPS, TRAIN_S = 150, 60, 2.0
NUM_ORDERS = 12
SURE = 3.0
"""Standard deviations from what targets in any other order give."""
MIN_RELATION_ROWS = 150
STRUCTURE = 2.0
"""Squared correlations between columns, as a multiple of those of noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """How far the true pairs stand out from pairs in another order, for the model and for the nearest neighbours."""

    model: float
    neighbours: float
    line: float
    num_steps: int

    @property
    def none(self) -> bool:
        """Whether nothing leads from the inputs to the targets."""
        return self.model < SURE and self.neighbours < SURE and self.line < 0.02


def relation(probe: Probe) -> Relation | None:
    """What leads from inputs to targets; None where it cannot be asked: few samples, no numbers, too slow."""
    if probe.no_experiments or len(probe.scan.batches) < 4 or not _one_input(probe):
        return None
    if not _structured([dict(leaves(b))[probe.roles.inputs[0]] for b in probe.scan.batches]):
        return None  # random inputs: a trial of the code, with nothing to learn on purpose
    try:
        pairs = _stored(probe)
    except Exception:  # an item that cannot be read is another check's business
        return None
    if pairs is None or len(pairs[0]) < MIN_RELATION_ROWS:
        return None
    line, near = _score(*pairs, 0), _neighbours(*pairs)
    if line >= 0.02 or near >= SURE:  # there is something: no need to train
        return Relation(model=0.0, neighbours=near, line=line, num_steps=0)
    return _trained(probe, line, near)


FRESH = 0.5
"""Targets of which this part is another with another seed are drawn, not given; smoothed ones change by less."""


def redrawn(probe: Probe) -> float | None:
    """Which part of the targets changes with the random numbers, though all that the model sees stays the same.

    With one seed such a target is learned by heart; in training it is new each time. None where it cannot be asked, or
    where the model sees the noise as well, as in diffusion; a policy that samples its own actions weighs each of them.
    """
    facts = probe.calls[0].facts
    if probe.no_experiments or facts.target is None or facts.reduction not in ("mean", "sum"):
        return None
    with WithoutDropout():  # what it draws is seen by the model alone
        first, other = (probe.once(probe.batch(0), probe.options.seed + i) for i in range(2))
    if not _sees_the_same(first, other) or first.facts.target is None or other.facts.target is None:
        return None
    return _changed(first.facts.target, other.facts.target)


def _sees_the_same(first: Call, other: Call) -> bool:
    inputs = len(first.inputs) == len(other.inputs) > 0 and all(map(torch.equal, first.inputs, other.inputs))
    answers = first.output is not None and other.output is not None and first.output.shape == other.output.shape
    return inputs and answers and torch.allclose(first.output, other.output)  # type: ignore[arg-type]


def _changed(a: Tensor, b: Tensor) -> float | None:
    if a.shape != b.shape or not a.numel():
        return None
    if not a.is_floating_point():
        return number((a != b).double().mean())
    spread = number(a.double().var(unbiased=False) + b.double().var(unbiased=False))
    return number((a - b).double().square().mean()) / spread if spread > 0 else 0.0


def _one_input(probe: Probe) -> bool:
    """Whether targets are known, and all that the model is given is one tensor of the batch: else more may count."""
    batch, given = dict(leaves(probe.batch(0))), probe.calls[0].inputs
    seen = [p for p in probe.roles.inputs if any(same_values(batch[p], g) for g in given)]
    known = probe.roles.sure and len(probe.roles.targets) == 1
    return known and len(given) == 1 and seen == list(probe.roles.inputs[:1])


def _structured(inputs: list[Tensor]) -> bool:
    """Whether the columns of the inputs have more to do with each other than those of noise."""
    if len({x.shape[1:] for x in inputs}) > 1 or not inputs[0].is_floating_point() or inputs[0].dim() < 2:
        return False
    x = torch.nan_to_num(torch.cat([x.detach().cpu() for x in inputs]).flatten(1)[:, :256].double())
    x = x[:, x.std(0) > 0]
    if x.shape[1] < 3 or len(x) < 30:
        return False
    x = (x - x.mean(0)) / x.std(0)
    alike = (x.T @ x / len(x)).square()
    apart = ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    return number(alike[apart].mean()) * len(x) > STRUCTURE


def _trained(probe: Probe, line: float, near: float) -> Relation | None:
    """Train on some batches, then compare the loss of others with that of the same inputs and targets out of order."""
    num = probe.affordable(NUM_STEPS, seconds=TRAIN_S)
    if num < MIN_STEPS:
        return None
    held = probe.scan.batches[-3:]
    train = probe.scan.batches[:-3]
    with probe.trial():
        calls = probe.run([train[i % len(train)] for i in range(num)])
        probe.scale_rates(0.0)  # a step that trains by itself may be called, and changes nothing
        own = _losses(probe, held)
        others = [_losses(probe, [_reordered(probe, b, k) for b in held]) for k in range(NUM_ORDERS)]
    if calls[-1].failure is not None or own is None or any(o is None for o in others):
        return None
    null = torch.tensor([o for o in others if o is not None], dtype=torch.double, device="cpu")
    spread = number(null.std())
    if not spread > 0:
        return None
    return Relation(model=(number(null.mean()) - own) / spread, neighbours=near, line=line, num_steps=num)


def _losses(probe: Probe, batches: list[object]) -> float | None:
    calls = probe.run(batches, seeds=[0] * len(batches))
    losses = [c.loss for c in calls if c.loss is not None and c.failure is None]
    return sum(losses) / len(losses) if len(losses) == len(batches) else None


def _reordered(probe: Probe, batch: object, seed: int) -> object:
    def change(path: str, tensor: Tensor) -> Tensor:
        if path not in probe.roles.targets or not tensor.dim():
            return tensor
        order = torch.randperm(tensor.shape[0], generator=torch.Generator().manual_seed(seed), device="cpu")
        return tensor[order.to(tensor.device)]

    return mapped(batch, change)


def _neighbours(x: Tensor, y: Tensor) -> float:
    """How much closer the targets of nearest neighbours are than targets in another order: in standard deviations."""
    apart = torch.cdist(x, x)
    apart.fill_diagonal_(float("inf"))
    nearest = apart.argmin(1)
    generator = torch.Generator().manual_seed(0)

    def distance(order: Tensor) -> Tensor:
        mine = y[order]
        return (mine - mine[nearest]).square().sum(1).mean()

    null = torch.stack([distance(torch.randperm(len(y), generator=generator, device="cpu")) for _ in range(40)])
    spread = number(null.std())
    return (number(null.mean()) - number(distance(torch.arange(len(y), device="cpu")))) / spread if spread > 0 else 0.0


def other_inputs(probe: Probe) -> object:
    """The first batch with the inputs of other samples; None where nothing could be changed."""
    return _replaced(probe, probe.roles.inputs)


def other_targets(probe: Probe) -> object:
    """The first batch with one target for all its samples; None where nothing could be changed."""
    changed: list[str] = []

    def change(path: str, tensor: Tensor) -> Tensor:
        if path not in probe.roles.targets or tensor.numel() < 2 or not bool((tensor != tensor.reshape(-1)[0]).any()):
            return tensor
        changed.append(path)
        return torch.zeros_like(tensor) + tensor.reshape(-1)[0]

    out = mapped(probe.batch(0), change)
    return out if changed else None


def _replaced(probe: Probe, paths: tuple[str, ...]) -> object:
    batch = probe.batch(0)
    other = dict(leaves(probe.batch(1))) if len(probe.scan.batches) > 1 else {}
    changed: list[str] = []

    def change(path: str, tensor: Tensor) -> Tensor:
        if path not in paths:
            return tensor
        new = _another(tensor, other.get(path))
        if new is not tensor:
            changed.append(path)
        return new

    out = mapped(batch, change)
    return out if changed else None


def _another(tensor: Tensor, other: Tensor | None) -> Tensor:
    if tensor.numel() == 0 or tensor.is_meta:
        return tensor
    if tensor.is_floating_point() and tensor.numel() > 1:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            size = tensor.detach().float().std(correction=0)
            size = size if bool(torch.isfinite(size)) and bool(size > 0) else torch.ones_like(size)
            noise = torch.randn(tensor.shape, dtype=torch.float32, device="cpu") * size.cpu()
        return (tensor + noise.to(tensor.device, tensor.dtype)).detach()
    if is_label_like(tensor) or tensor.dtype is torch.uint8:
        for new in (tensor.roll(1, 0), other, tensor.flip(-1) if tensor.dim() else None):
            if new is not None and new.shape == tensor.shape and not torch.equal(new, tensor):
                return new
    return tensor
