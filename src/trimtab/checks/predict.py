"""Whether anything at all leads from inputs to targets: neighbours, a line, or the model itself after some training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.checks.alignment import _score, _stored
from trimtab.checks.leaves import leaves, mapped
from trimtab.checks.probe import Probe
from trimtab.checks.roles import same_values
from trimtab.sample.transfer import number

NUM_STEPS, MIN_STEPS, TRAIN_S = 150, 60, 2.0
NUM_ORDERS = 12
SURE = 3.0
"""Standard deviations from what targets in any other order give."""
MIN_ROWS = 150
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
    if probe.no_steps or probe.too_slow or len(probe.scan.batches) < 4 or not _one_input(probe):
        return None
    if not _structured([dict(leaves(b))[probe.roles.inputs[0]] for b in probe.scan.batches]):
        return None  # inputs drawn at random: somebody tries his code, and knows that there is nothing to learn
    try:
        pairs = _stored(probe)
    except Exception:  # an item that cannot be read is another check's business
        return None
    if pairs is None or len(pairs[0]) < MIN_ROWS:
        return None
    line, near = _score(*pairs, 0), _neighbours(*pairs)
    if line >= 0.02 or near >= SURE:  # there is something: no need to train
        return Relation(model=0.0, neighbours=near, line=line, num_steps=0)
    return _trained(probe, line, near)


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


def _losses(probe: Probe, batches: list[Any]) -> float | None:
    calls = probe.run(batches, seeds=[0] * len(batches))
    losses = [c.loss for c in calls if c.loss is not None and c.failure is None]
    return sum(losses) / len(losses) if len(losses) == len(batches) else None


def _reordered(probe: Probe, batch: Any, seed: int) -> Any:
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
