"""ActivationMonitor: statistics of every layer's output, dead and saturated units, shifts, and activations to try."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.core.errors import InputError
from trimtab.sample.probes.activations import Activity, Hook, bounds_of, empty, mark_of, recorded, take_in, unit_dim
from trimtab.sample.probes.batch import tensors_in
from trimtab.sample.transfer import to_host
from trimtab.torchutil.patch import own_hook

log = logging.getLogger("trimtab")

WINDOW = 50
"""Forwards of one window; units are judged over the window under way and the one before it."""
EVIDENCE = 256
"""Values of a unit that must have been seen before it can be called dead or saturated."""
SATURATED = 0.95
"""Share of a unit's values at the bounds of its activation from which on it is saturated."""
SHIFT_IN_STD, SHIFT_IN_SCALE = 3.0, 3.0
"""How far a mean may move, in standard deviations of its first window, and by which factor a spread may change."""


@dataclass(slots=True, eq=False)
class _Layer:
    floor: float | None
    bounds: tuple[float, float] | None
    shape: tuple[int, ...] = ()
    width: int = 0  # units, if they are distinguished
    windows: list[Activity] = field(default_factory=list)  # the first, the one before, the one under way


class LayerActivations(TypedDict):
    """The outputs of one layer over the last forwards."""

    mean: float
    std: float
    max: float
    min: float
    sparsity: float
    shape: tuple[int, ...]


class ActivationMonitor:
    """Watches the outputs of all layers of a model; nothing waits for the device until you read a result.

    A context manager: hooks are on inside `with`, or between `register_hooks()` and `remove_hooks()`. What was seen can
    be read afterwards. A copied or saved model carries nothing of it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from trimtab import ActivationMonitor
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> with torch.no_grad():
        ...     _ = model[0].bias[3].fill_(-100.0)
        >>> with ActivationMonitor(model) as monitor:
        ...     for _ in range(20):
        ...         _ = model(torch.randn(32, 2))
        >>> monitor.detect_dead_neurons()
        {'1': [3]}
        >>> sorted(monitor.get_statistics()["1"])
        ['max', 'mean', 'min', 'shape', 'sparsity', 'std']
    """

    def __init__(self, model: nn.Module, *, window: int = WINDOW) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
        if window < 1:
            raise InputError(f"window is {window}; expected a number of forwards, at least 1")
        self._model, self._window = model, window
        self._layers: dict[str, _Layer] = {}
        self._undo: list[Callable[[], None]] = []
        self._broken = False

    def register_hooks(self) -> None:
        """Install the hooks; a second call changes nothing."""
        if self._undo:
            return
        for name, module in self._model.named_modules():
            if not any(module.children()) or isinstance(module, nn.MultiheadAttention):
                hook = Hook(partial(self._look, name or type(module).__name__), self._fail)
                self._undo.append(own_hook(module.register_forward_hook(hook), listed=False).remove)

    def remove_hooks(self) -> None:
        """Remove the hooks; the statistics stay."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def __enter__(self) -> Self:
        self.register_hooks()
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove_hooks()

    def __getstate__(self) -> dict[str, object]:
        # A module that keeps its monitor is copied and saved with it: the copy has seen nothing and listens to nothing.
        return {**self.__dict__, "_layers": {}, "_undo": []}

    # -- what was seen -------------------------------------------------------------------------------------------

    def get_statistics(self) -> dict[str, LayerActivations]:
        """Per layer `mean`, `std`, `max`, `min`, `sparsity` (share of zeros) and `shape` (of the last output).

        They are over the last forwards: the window under way and the one before.
        """
        moments = self._moments({n: x.windows[-2:] for n, x in self._layers.items()})
        return {
            name: {
                "mean": mean,
                "std": std,
                "max": high,
                "min": low,
                "sparsity": zero,
                "shape": self._layers[name].shape,
            }
            for name, (mean, std, low, high, zero) in moments.items()
        }

    def detect_dead_neurons(self, threshold: float = 1e-6) -> dict[str, list[int]]:
        """Per layer the units of its activation that never got further than `threshold` from silence.

        Asked are activations that can die (ReLU, ReLU6, ELU, GELU, SiLU), about every value of a unit in the last
        windows, once there are enough of them: a healthy ReLU, half of whose outputs are zero, has no dead unit.
        """
        found = self._units(lambda window: window.loudest, torch.maximum)
        return {name: np.flatnonzero(loud <= threshold).tolist() for name, loud in found if (loud <= threshold).any()}

    def detect_saturation(self, share: float = SATURATED) -> dict[str, list[int]]:
        """Per layer the units of a bounded activation (Sigmoid, Tanh, ...) that are at its bounds more than `share`.

        At the bounds hardly any gradient passes. The last sigmoid of a good classifier saturates, and should.
        """
        found = self._units(lambda window: window.at_bounds, torch.add, per_value=True)
        return {name: np.flatnonzero(part > share).tolist() for name, part in found if (part > share).any()}

    def detect_distribution_shift(
        self, threshold: float = SHIFT_IN_STD, factor: float = SHIFT_IN_SCALE
    ) -> dict[str, dict[str, float]]:
        """Layers whose last finished window is unlike their first: `mean_shift` in its stds, `std_ratio` to its std.

        A layer is listed if its mean moved by more than `threshold`, if its spread changed by more than `factor` either
        way, or if it became non-finite. There is nothing to compare before two windows are over.
        """
        over = {name: [w for w in x.windows if w.num_forwards >= self._window] for name, x in self._layers.items()}
        ready = [name for name, windows in over.items() if len(windows) >= 2]
        first = self._moments({name: over[name][:1] for name in ready})
        last = self._moments({name: over[name][-1:] for name in ready})
        out = {}
        for name in ready:
            (mean, std, *_), (now, spread, *_) = first[name], last[name]
            with np.errstate(all="ignore"):
                shift = float(np.float64(abs(now - mean)) / std) if now != mean else 0.0
                ratio = float(np.float64(spread) / std) if spread != std else 1.0
            if not (shift <= threshold and 1.0 / factor <= ratio <= factor):
                out[name] = {"mean_shift": shift, "std_ratio": ratio}
        return out

    def reset(self) -> None:
        """Delete all statistics."""
        self._layers.clear()

    # -- reading -------------------------------------------------------------------------------------------------

    def _moments(self, chosen: dict[str, list[Activity]]) -> dict[str, tuple[float, ...]]:
        """Mean, std, min, max and share of zeros of the chosen windows of each layer, with one transfer."""
        rows = [
            torch.cat(
                [
                    torch.stack([w.sums for w in windows]).sum(0),
                    torch.stack([w.low for w in windows]).amin(0, keepdim=True),
                    torch.stack([w.high for w in windows]).amax(0, keepdim=True),
                ]
            )
            for windows in chosen.values()
        ]
        if not rows:
            return {}
        table = to_host(torch.stack([row.to(rows[0]) for row in rows]))
        out: dict[str, tuple[float, ...]] = {}
        for (name, windows), row in zip(chosen.items(), table.astype(np.float64), strict=True):
            total, square, zero, low, high = row.tolist()
            count = sum(w.num_values for w in windows)
            mean = total / count
            with np.errstate(all="ignore"):
                spread = float(np.sqrt(np.maximum(square - count * mean * mean, 0.0) / max(count - 1, 1)))
            out[name] = (mean, spread, low, high, zero / count)
        return out

    def _units(
        self,
        column: Callable[[Activity], Tensor | None],
        join: Callable[[Tensor, Tensor], Tensor],
        per_value: bool = False,
    ) -> list[tuple[str, NDArray[np.float64]]]:
        """One number a unit over the last windows, for layers that have it and were seen often enough."""
        out = []
        for name, layer in self._layers.items():
            windows = [w for w in layer.windows[-2:] if column(w) is not None]
            values = [v for v in map(column, windows) if v is not None]
            num = sum(w.num_per_unit for w in windows)
            if not values or num < EVIDENCE:
                continue
            joined = values[0] if len(values) == 1 else join(values[0], values[1])
            out.append((name, to_host(joined).astype(np.float64) / (num if per_value else 1)))
        return out

    # -- listening -----------------------------------------------------------------------------------------------

    def _look(self, name: str, module: nn.Module, args: object, output: object) -> None:
        if not self._broken:
            with torch.no_grad():
                for i, tensor in enumerate(tensors_in(output)):
                    self._add(name if i == 0 else f"{name}[{i}]", module, tensor)

    def _fail(self, error: Exception) -> None:
        """Log a failure once and switch the monitor off, instead of breaking the forward pass."""
        self._broken = True
        log.error("trimtab: looking at activations failed; training continues without it", exc_info=error)

    def _add(self, name: str, module: nn.Module, output: Tensor) -> None:
        if not output.is_floating_point() or not output.numel() or recorded(output):
            return
        values: Any = output.detach()
        values = values.to_local() if hasattr(values, "to_local") else values
        unit = unit_dim(output) if values.dim() >= 2 else None
        width = values.shape[unit] if unit is not None else 0
        layer = self._layers.get(name)
        if layer is not None and layer.width and width and width != layer.width:  # one activation for several layers
            name = f"{name} ({width} units)"
            layer = self._layers.get(name)
        if layer is None:
            layer = self._layers[name] = _Layer(*_limits_of(module))
            layer.width = width if layer.floor is not None or layer.bounds is not None else 0
        layer.shape = tuple(output.shape)
        if not layer.windows or layer.windows[-1].num_forwards >= self._window:
            if len(layer.windows) == 3:
                del layer.windows[1]
            layer.windows.append(empty(values))
        take_in(layer.windows[-1], values, unit, layer.floor, layer.bounds)


def _limits_of(module: nn.Module) -> tuple[float | None, tuple[float, float] | None]:
    """Where a unit of an activation is when it is dead, and outside of what it saturates; None where it does not."""
    mark, bounded = mark_of(module)
    if mark is None or bounded:
        return None, bounds_of(module)
    return (-module.alpha if isinstance(module, nn.ELU) else 0.0), None


_FAMILIES = {
    "transformer": ("transformer", "attention", "encoder", "decoder"),
    "conv": ("conv", "resnet", "unet"),
    "rnn": ("rnn", "lstm", "gru", "recurrent"),
}
_ADVICE: dict[str, dict[str, tuple[str, ...]]] = {
    "vanishing": {
        "transformer": ("GELU: smooth, and normalisation before each block keeps its inputs where it is steep",),
        "conv": ("ReLU or SiLU after BatchNorm: neither flattens for large inputs",),
        "rnn": ("keep tanh inside, but use LSTM or GRU: their gates carry the gradient past it",),
        "": (
            "GELU, SiLU or ReLU instead of Sigmoid and Tanh, whose slope is at most 0.25 and 1",
            "residual connections and normalisation, so that the gradient does not depend on every slope on its way",
            "Kaiming initialisation with ReLU-like functions, Xavier with tanh",
        ),
    },
    "exploding": {
        "transformer": ("GELU with normalisation before each block, and residual branches that start small",),
        "conv": ("ReLU6 or Hardswish, which are bounded above or nearly so, after BatchNorm",),
        "rnn": ("tanh or a gated cell instead of ReLU: unbounded units feed themselves",),
        "": (
            "a function that does not grow faster than its input: Tanh and Softsign are bounded, GELU and SiLU linear",
            "normalisation before the activation; no activation replaces clipping and a lower learning rate",
        ),
    },
    "dead_neurons": {
        "transformer": ("GELU: smooth, with a gradient below zero; what transformers are usually built with",),
        "conv": ("LeakyReLU(0.01) or SiLU after BatchNorm: a negative input still passes a gradient",),
        "rnn": ("tanh in the cell: ReLU units that fall silent do so for the whole sequence",),
        "": (
            "LeakyReLU, ELU, GELU, SiLU or Mish instead of ReLU: units can come back",
            "a lower learning rate and warm-up: one large step is what usually kills units",
        ),
    },
}


def get_activation_function_recommendations(layer_type: str, problem: str) -> list[str]:
    """Which activation functions to try for a kind of layer, the best first, and what else helps.

    `problem` is `vanishing`, `exploding` or `dead_neurons`; `layer_type` such as `linear`, `conv`, `transformer`,
    `attention`, `rnn` or the name of a module class: where nothing special is known, the advice is the general one.

    Example:
        >>> get_activation_function_recommendations("transformer", "dead_neurons")[0]
        'GELU: smooth, with a gradient below zero; what transformers are usually built with'
    """
    if problem not in _ADVICE:
        raise InputError(f"problem is {problem!r}; expected one of {', '.join(_ADVICE)}")
    kind = layer_type.lower()
    family = next((name for name, words in _FAMILIES.items() if any(word in kind for word in words)), None)
    special = () if family is None else _ADVICE[problem][family]
    return [*special, *_ADVICE[problem][""]]
