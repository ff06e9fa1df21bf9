"""What the gradients of a layer tell of what went through it: inputs that are all alike, dead units, units that are
copies of one another.

For outputs W h + b the gradient of b is the sum of d over all samples, that of W the sum of d times h. If h is the same
for every sample, the gradient of W is that of b times h: one direction, and nothing is left beside it. A unit whose
output nothing depends on has a gradient of exactly 0 at its bias. So no hook is needed, and no forward is slowed down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.sample.transfer import Later, Notes, is_here, sent, to_host

EVERY, FIRST = 20, 10
"""In which steps layers are looked at."""
NUM_LAYERS = 8
NUM_NAMED = 4
MIN_UNITS, MIN_INPUTS = 4, 4
MAX_READ = 1 << 16
"""Elements of a weight that are read: those of its first units. What holds for all of them holds for these."""
ALIKE, VARIED = 1e-3, 0.05
"""Shares of a gradient's square beside the one direction that equal inputs leave: hardly any, and clearly some."""
STILL, TURNED = 0.05, 0.98
WINDOW = 6
"""Looks after which a unit that had no gradient in any of them is dead."""
MIN_TOLD, MIN_COUNTED = 0.5, 16
NUM_TWIN_LOOKS, NUM_SIZE_LOOKS = 2, 3
Facts = tuple[dict[str, float], Notes]


@dataclass(slots=True)
class _Layer:
    """A weight with its bias. Arrays are kept where the gradients are, numbers on the host."""

    name: str
    weight: Tensor
    bias: Tensor
    width: int = 0  # inputs of a unit, as of the last look
    before: tuple[Any, Any] | None = None
    asleep: Any = None
    norms: tuple[float, float] | None = None  # of the last look: squares of the bias' gradient and of what follows
    streak: int = 0
    num_varied: int = 0
    num_twins: int = 0
    gain: float | None = None  # of the weights at the start
    smallest: float = math.inf  # of the sizes of the input in the looks so far, and the largest
    largest: float = 0.0

    @property
    def num_inputs(self) -> int:
        return self.weight.numel() // max(len(self.bias), 1) if self.weight.dim() > 1 else 0

    @property
    def num_read(self) -> int:
        """How many units are read."""
        return _num_read(len(self.bias), self.num_inputs)

    def read(self, *, twins: bool) -> list[Any] | None:
        """Count the units asleep since the window began; sums over the gradients; how far units differ."""
        slope, back = self.weight.grad, self.bias.grad
        if slope is None or back is None or slope.layout is not torch.strided:
            self.before = self.norms = self.asleep = None
            return None
        b = _array(back)
        asleep = b == 0
        self.asleep = asleep if self.asleep is None else self.asleep & asleep
        out = [self.asleep.sum()]
        units, shape = len(b), slope.shape
        self.width = math.prod(shape) // max(units, 1) if len(shape) > 1 else 0
        if self.width < MIN_INPUTS:
            return out
        num = _num_read(units, self.width)
        b, g = b[:num], _array(slope, num).reshape(num, -1)
        flat, through = g.reshape(-1), b @ g
        old, self.before = self.before or (through, b), (through, b * 1.0)
        out += [flat.dot(flat), b.dot(b), through.dot(through), through.dot(old[0]), b.dot(old[1])]
        if twins:
            w = _array(self.weight, num).reshape(num, -1)
            apart, whole = (w - w[:1]).reshape(-1), w.reshape(-1)
            out += [apart.dot(apart), whole.dot(whole)]
        return out

    def start(self) -> Any:
        """The sum over the squares of the weights."""
        whole = _array(self.weight, self.num_read).reshape(-1)
        return whole.dot(whole)

    def hear(self, values: Sequence[float]) -> None:
        """Judge the sums of one look: whether the layer's input was the same for all samples, and since when."""
        whole, b, through, same_way, same_b = values[:5]
        last, self.norms = self.norms, (b, through)
        if not all(map(math.isfinite, values)) or not b > 0:
            self.norms, self.streak = None, 0
            return
        if len(values) > 5:
            self.num_twins += values[5] <= 1e-12 * values[6] and values[6] > 0 and whole > 0
        size = math.sqrt(whole / b / self.width)
        self.smallest, self.largest = min(self.smallest, size), max(self.largest, size)
        beside = 1.0 - through / (b * whole) if whole > 0 else 0.0
        if beside > VARIED:
            self.num_varied += 1
        if beside > ALIKE or last is None or not last[0] > 0:
            self.streak = 0
            return
        now, then, both = through / b / b, last[1] / last[0] / last[0], same_way / b / last[0]
        if now + then - 2.0 * both > STILL**2 * max(now, then):
            self.streak = 0  # another input than in the last look: a batch of one sample, or gradients of one direction
        elif abs(same_b) < TURNED * math.sqrt(b * last[0]):
            self.streak += 1  # else the layer feeds a single output, whose gradient has one direction for any input


def _num_read(units: int, width: int) -> int:
    return min(units, max(MAX_READ // max(width, 1), 2 * MIN_UNITS))


def _array(tensor: Tensor, num: int | None = None) -> Any:
    """The values, or those of the first `num` rows, where they are: as numpy on the host, which is quicker if few."""
    if is_here(tensor):
        return to_host(tensor)[:num].astype(np.float32, copy=False)
    return tensor.detach()[:num].float()


class LayerProbe:
    """Looks at some layers of one optimizer, spread over the model."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        known = dict(zip(names, params, strict=True))
        found = [
            _Layer(name.rpartition(".")[0] or name, weight, bias)
            for name, weight in known.items()
            if (bias := known.get(_bias_of(name))) is not None and bias is not weight and _can_be_read(weight, bias)
        ]
        one_dimensional = [name for name, p in known.items() if p.dim() == 1 and p.numel() >= MIN_UNITS]
        self._is_normed = any(not _is_bias(name) for name in one_dimensional)
        every = -(-len(found) // NUM_LAYERS) if found else 1
        self._layers = found[::-1][::every][::-1]  # the last one is always among them
        self._judged = [layer for layer in self._layers if layer.num_inputs >= MIN_INPUTS]
        self._on_host = all(is_here(layer.weight) for layer in self._layers)
        self._num_read = self._num_heard = 0

    def is_due(self, step: int) -> bool:
        """Whether layers are looked at in this step."""
        return (step % EVERY == FIRST or step == 0) and len(self._layers) > 0

    def look(self, step: int) -> Facts:
        """What the gradients of this step tell; nothing where they are on a device."""
        if not self._on_host:
            return {}, {}
        if step == 0:
            self._begin([float(layer.start()) for layer in self._judged])
            return {}, {}
        with np.errstate(all="ignore"):
            read = self._read()
            return self._tell([None if values is None else [float(v) for v in values] for values in read])

    def delayed(self, step: int) -> Later | None:
        """The same for gradients on a device, once the sums have arrived."""
        if self._on_host:
            return None
        if step == 0:
            return self._begin_later()
        read = self._read()
        values = [value.double() for some in read if some is not None for value in some]
        copy = sent(torch.stack(values)) if values else None
        sizes = [None if some is None else len(some) for some in read]

        def later(facts: dict[str, float], notes: Notes) -> None:
            numbers = iter([] if copy is None else to_host(copy).tolist())
            split = [None if size is None else [next(numbers) for _ in range(size)] for size in sizes]
            found, named = self._tell(split)
            facts |= found
            notes |= named

        return later

    def _begin(self, squares: list[float]) -> None:
        for layer, square in zip(self._judged, squares, strict=True):
            layer.gain = math.sqrt(square / layer.num_read)

    def _begin_later(self) -> Later | None:
        if not self._judged:
            return None
        copy = sent(torch.stack([layer.start() for layer in self._judged]))
        return lambda facts, notes: self._begin(to_host(copy).tolist())

    def _read(self) -> list[list[Any] | None]:
        twins = self._num_read < NUM_TWIN_LOOKS
        self._num_read += 1
        read = [layer.read(twins=twins) for layer in self._layers]
        if self._num_read % WINDOW == 0:
            for layer in self._layers:
                layer.asleep = None
        return read

    def _tell(self, read: list[list[float] | None]) -> Facts:
        facts: dict[str, float] = {}
        notes: Notes = {}
        self._num_heard += 1
        for layer, values in zip(self._layers, read, strict=True):
            if values is None:
                layer.streak = 0
            elif len(values) > 1:
                layer.hear(values[1:])
        self._alike(facts, notes)
        if self._num_heard == NUM_TWIN_LOOKS:
            twins = [layer.name for layer in self._layers if layer.num_twins == NUM_TWIN_LOOKS]
            if twins:
                facts["twin_units"], notes["twin_units"] = float(len(twins)), tuple(twins[:NUM_NAMED])
        if self._num_heard == NUM_SIZE_LOOKS and not self._is_normed:
            self._sizes(facts, notes)
        if self._num_heard % WINDOW == 0:
            self._dead(facts, notes, read)
        return facts, notes

    def _alike(self, facts: dict[str, float], notes: Notes) -> None:
        judged = self._judged
        longest = max((layer.streak for layer in judged), default=0)
        if longest < 2:
            return
        most = [layer for layer in judged if layer.streak == longest]
        facts["same_input"] = float(longest)
        facts["same_input_share"] = sum(layer.streak > 0 for layer in judged) / len(judged)
        facts["same_input_varied"] = float(max(layer.num_varied for layer in most))
        notes["same_input"] = tuple(layer.name for layer in most[:NUM_NAMED])

    def _sizes(self, facts: dict[str, float], notes: Notes) -> None:
        """How far weights amplify at the start, and the largest and smallest input of a layer.

        The size of an input is that of the weights' gradient over that of the bias, per input: exact where all samples
        pull in one direction, and of the right order where they do not.
        """
        gains = [layer.gain for layer in self._judged if layer.gain]
        if len(gains) > 1:
            facts["start_gain"] = median(gains)
        known = [layer for layer in self._judged if math.isfinite(layer.smallest)]
        if known:
            largest = max(known, key=lambda layer: layer.smallest)
            facts["layer_input"], notes["layer_input"] = largest.smallest, (largest.name,)
            facts["layer_input_least"] = min(layer.largest for layer in known)

    def _dead(self, facts: dict[str, float], notes: Notes, read: list[list[float] | None]) -> None:
        shares = [
            (values[0] / len(layer.bias), layer)
            for layer, values in zip(self._layers, read, strict=True)
            if values is not None and len(layer.bias) >= MIN_COUNTED and values[0] < len(layer.bias)
        ]
        share, layer = max(shares, key=lambda one: one[0], default=(0.0, None))
        if layer is not None and share >= MIN_TOLD:
            facts["asleep_share"], facts["asleep_of"] = share, float(len(layer.bias))
            notes["asleep"] = (layer.name,)


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2]


def _bias_of(name: str) -> str:
    path, dot, last = name.rpartition(".")
    return path + dot + last.replace("weight", "bias") if "weight" in last else ""


def _can_be_read(weight: Tensor, bias: Tensor) -> bool:
    plain = not hasattr(weight, "to_local") and not hasattr(bias, "to_local")
    fits = bias.dim() == 1 and len(bias) >= MIN_UNITS and weight.dim() >= 1 and weight.shape[0] == len(bias)
    return plain and fits and weight.is_floating_point()
