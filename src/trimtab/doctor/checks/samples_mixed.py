"""WIRE041: the output for one sample depends on the other samples of its batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.data import DataLoader, default_collate

from trimtab.doctor.batch_tensors import leaves, mapped
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.sample.transfer import number

VISIBLE = 1e-3
"""Part of an output's size: products of other shapes differ by less."""
Given = tuple[nn.Module, Sequence[object], Mapping[str, object]]


class SamplesMixed:
    """The output for one sample depends on the other samples of its batch.

    ## What it means
    A softmax, a mean or a recurrence runs over the samples instead of over features or time (`dim=0`, a recurrent or
    attention layer without `batch_first=True`, a reshape that tears samples apart). It trains, and is wrong.

    ## How it is checked
    In evaluation mode, where BatchNorm does not look at the batch, with one seed: the first sample is replaced by the
    second. The outputs of all others must stay. Asked only where the first dimension surely counts samples.

    ## What to try
    1. `batch_first=True`, or `x.transpose(0, 1)` before the layer.
    2. `dim=-1` in softmax and mean; `x.flatten(1)` instead of a reshape.
    """

    code: ClassVar[str] = "WIRE041"
    name: ClassVar[str] = "samples-mixed"
    title: ClassVar[str] = "samples do not depend on each other"
    causes: ClassVar[tuple[str, ...]] = ("not-learning", "targets-do-not-predict", "collapsed-output", "target-leak")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report outputs that move with another sample."""
        why = probe.no_experiments or _unsure(probe)
        if why:
            yield not_applicable(self, why)
            return
        size = probe.scan.size or 0
        with probe.trial(rates=False):
            given = [one for one in _given(probe) if _by_sample(probe, one, size)]
            probe.model.eval()
            shares = {probe.module_names[id(one[0])]: _share(probe, one, size) for one in given}
        moved = {name: share for name, share in shares.items() if share is not None}
        mixed = [name for name, share in moved.items() if share and share > VISIBLE]
        if mixed:
            yield failed(
                self,
                "the output for one sample depends on the other samples of its batch.",
                f"another first sample moves others in {', '.join(mixed)} by {moved[mixed[0]]:.2g} of their spread",
                "batch_first=True  # and dim=-1 in softmax and mean: dimension 0 counts samples",
                tuple(mixed),
            )
        elif moved:
            yield passed(self, f"another first sample changes no other output of {', '.join(list(moved)[:3])}")
        else:
            yield not_applicable(self, "no output with one row per sample was seen")


def _unsure(probe: Probe) -> str:
    """Why the first dimension may not count samples; empty where it does."""
    size, loader = probe.scan.size or 0, probe.target.loader
    if size < 3:
        return "fewer than three samples in a batch"
    stacked = isinstance(loader, DataLoader) and loader.collate_fn is default_collate and loader.batch_size == size
    if not stacked or probe.scan.num < 2:  # a single batch may be one thing, such as a graph
        return "nothing says that the first dimension counts samples of their own"
    norms = [m for m in probe.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return "a BatchNorm looks at the batch in evaluation, too" if any(m.running_mean is None for m in norms) else ""


def _given(probe: Probe) -> list[Given]:
    """What the outermost modules of the model are called with."""
    found: list[Given] = []
    inside: list[nn.Module] = []

    def enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if id(module) in probe.module_names:
            if not inside and all(module is not one[0] for one in found):
                found.append((module, args, kwargs))
            inside.append(module)

    def leave(module: nn.Module, args: object, output: object) -> None:
        if inside and inside[-1] is module:
            inside.pop()

    # Global hooks get no keyword arguments; hooks of the model's own modules do.
    hooks = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in probe.model.modules()]
    hooks.append(modules.register_module_forward_hook(leave))
    try:
        probe.run([probe.batch(0)], seeds=[0])
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _by_sample(probe: Probe, one: Given, size: int) -> bool:
    """Whether all it is given has one row per sample, and none could have been turned so that time comes first."""
    tensors = [t for _, t in leaves([one[1], one[2]]) if t.dim()]
    own = [t for _, t in leaves(probe.batch(0))]
    for t in tensors:
        plain = len(tensors) == 1 and any(t.shape == o.shape and t.dtype == o.dtype and torch.equal(t, o) for o in own)
        if t.shape[0] != size or (t.dim() > 1 and t.shape[1] == size and not plain):
            return False
    return bool(tensors)


def _share(probe: Probe, one: Given, size: int) -> float | None:
    """How far the other rows of the output move, as a part of its size; None where it has no rows."""
    module, args, kwargs = one
    try:
        plain, again = (_output(module, args, kwargs, size) for _ in range(2))
        other = _output(module, [_swapped(v) for v in args], {k: _swapped(v) for k, v in kwargs.items()}, size)
    except Exception:  # it cannot be called alone: nothing can be said
        return None
    if plain is None or again is None or other is None or plain.shape != other.shape:
        return None
    scale = number((plain - plain.mean(0)).abs().max())
    if not scale > 0 or number((plain - again).abs().max()) > 0.1 * VISIBLE * scale:
        return None  # it keeps state or draws random numbers: the same input gives another output anyway
    return number((plain[2:] - other[2:]).abs().max()) / scale


def _output(module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], size: int) -> Tensor | None:
    torch.manual_seed(0)
    with torch.no_grad():
        rows = [t for _, t in leaves([module(*args, **kwargs)]) if t.dim() and t.is_floating_point()]
    found = next((t for t in rows if t.shape[0] == size), None)
    if found is None or (found.dim() > 1 and found.shape[1] == size):  # every sample with every other: it is meant so
        return None
    return found.detach().double().reshape(size, -1)


def _swapped(value: object) -> object:
    """An argument with the second sample instead of the first."""

    def change(path: str, tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        new = tensor.detach().clone()
        new[0] = new[1]
        return new

    return mapped(value, change, depth=1)
