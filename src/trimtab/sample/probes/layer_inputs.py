"""What goes into layers in the first steps: how large it is, how far from zero, and how far a layer amplifies it.

Hooks are put on a few layers after the first step and taken off three steps later, so nothing of it is left on the
usual path. A layer whose input needs no gradient is fed with data; what others get comes from the layers before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from trimtab.core.contain import Contained
from trimtab.sample.probes.activations import Hook, recorded
from trimtab.sample.probes.batch import can_be_sent
from trimtab.sample.transfer import Later, Notes, is_here, sent, to_host
from trimtab.torchutil.patch import own_hook

LOOKS = 3
NUM_LAYERS = 8
MIN_ROWS = 8
NUM_ROWS, NUM_COLUMNS = 64, 512
MIN_INPUTS = 4
"""Of which a layer's gain is judged: a single number may be anything."""


@dataclass(slots=True, eq=False)
class _Layer:
    """One layer, and in each look so far: squares of its input, their part that all rows share, and of its output."""

    name: str
    num_inputs: int
    of_data: bool = True
    seen: list[Tensor] = field(default_factory=list)
    is_fresh: bool = True  # not looked at in this step


class LayerInputs:
    """Looks at the inputs of some layers in the first steps after the first one."""

    def __init__(self, model: nn.Module, contained: Contained) -> None:
        self._contained = contained
        self._layers: list[_Layer] = []
        self._undo: list[Callable[[], None]] = []
        self._num = 0
        try:
            self._begin(model)
        except Exception as error:
            self._failed(error)

    def _begin(self, model: nn.Module) -> None:
        found = [(name, m) for name, m in model.named_modules() if _can_be_read(m)]
        every = -(-len(found) // NUM_LAYERS) if found else 1
        for name, module in found[::every]:
            weight: Any = module._parameters["weight"]
            layer = _Layer(name or type(module).__name__, weight[0].numel())
            self._layers.append(layer)
            look = Hook(partial(self._look, layer), self._failed)
            self._undo.append(own_hook(module.register_forward_hook(look), listed=False).remove)

    @property
    def over(self) -> bool:
        """Whether nothing is looked at any more."""
        return not self._undo

    def _look(self, layer: _Layer, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        given = args[0] if args else None
        if not layer.is_fresh or not torch.is_grad_enabled():
            return
        if not isinstance(given, Tensor) or not isinstance(output, Tensor) or not given.is_floating_point():
            return
        rows, answers = _rows(given, module), _rows(output, module)
        if len(rows) < MIN_ROWS or not output.numel() or recorded(output) or not can_be_sent(given):
            return
        with torch.no_grad():
            varies, means = torch.var_mean(rows, 0, correction=0)
            shared = means.square().mean()
            layer.seen.append(torch.stack([varies.mean() + shared, shared, answers.square().mean()]))
        layer.of_data &= not given.requires_grad
        layer.is_fresh = False

    def step_done(self) -> tuple[dict[str, float], Notes, Later | None]:
        """A step was made. After the last look: what was seen, at once or once it has arrived from a device."""
        self._num += 1
        for layer in self._layers:
            layer.is_fresh = True
        if self._num < LOOKS:
            return {}, {}, None
        self.remove()
        known = [layer for layer in self._layers if len(layer.seen) == LOOKS]
        if not known:
            return {}, {}, None
        values = torch.stack([torch.stack(layer.seen) for layer in known])
        if is_here(values):
            return *_told(known, to_host(values).tolist()), None
        copy = sent(values)

        def later(facts: dict[str, float], notes: Notes) -> None:
            found, named = _told(known, to_host(copy).tolist())
            facts |= found
            notes |= named

        return {}, {}, later

    def remove(self) -> None:
        """Take every hook off."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _failed(self, error: Exception) -> None:
        self.remove()
        self._contained.report("looking at the inputs of layers", error)


def _can_be_read(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear | _ConvNd) or isinstance(module, torch.jit.ScriptModule):
        return False
    # Not as an attribute: a parametrization (spectral norm) computes it again, and moves its buffers.
    weight: Any = module._parameters.get("weight")
    plain = isinstance(weight, Tensor) and not hasattr(weight, "to_local") and weight.dim() >= 2 and len(weight) > 0
    return plain and weight.requires_grad and weight.is_leaf


def _rows(values: Tensor, module: nn.Module) -> Tensor:
    """Some of the samples, and of each some of its numbers; every position of a sequence is a sample."""
    wide = (
        values.detach().reshape(-1, values.shape[-1]) if isinstance(module, nn.Linear) else values.detach().flatten(1)
    )
    return wide[:: max(len(wide) // NUM_ROWS, 1), :: max(wide.shape[1] // NUM_COLUMNS, 1)].float()


def _told(layers: list[_Layer], values: list[list[list[float]]]) -> tuple[dict[str, float], Notes]:
    """Sizes that hold in every look: of data that goes into a layer, and of what layers make of it."""
    facts: dict[str, float] = {}
    notes: Notes = {}
    gains, sizes = [], []
    for layer, looks in zip(layers, values, strict=True):
        if not all(math.isfinite(v) for look in looks for v in look):
            continue
        size = [math.sqrt(whole) for whole, *_ in looks]
        if layer.of_data and min(size) > 0:
            _keep(facts, notes, "data_size", min(size), layer.name, larger=True)
            _keep(facts, notes, "data_least", max(size), layer.name, larger=False)
            offset = min(math.sqrt(both / max(whole - both, 1e-12 * whole)) for whole, both, _ in looks)
            _keep(facts, notes, "data_offset", offset, layer.name, larger=True)
        if min(size) > 0 and layer.num_inputs >= MIN_INPUTS:
            gains.append(median(math.sqrt(out / whole) for whole, _, out in looks))
            sizes.append(median(size))
    if len(gains) > 1:
        facts["first_gain"], facts["first_size"], facts["first_least"] = median(gains), max(sizes), min(sizes)
    return facts, notes


def _keep(facts: dict[str, float], notes: Notes, name: str, value: float, layer: str, *, larger: bool) -> None:
    if name not in facts or (value > facts[name]) is larger:
        facts[name], notes[name] = value, (layer,)
