"""Which parameters a gradient reached, over all the steps that were seen and some more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from trimtab.core.stats.row_history import routed
from trimtab.doctor.batch_tensors import leaves
from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Call
from trimtab.torchutil.optimizers import params_of

Norm = float | None


def active(probe: Probe) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters that are held by an optimizer which is really stepped."""
    stepped = {e.who for e in probe.events("step")}
    held = {id(p) for o in probe.optimizers if id(o) in stepped for p in params_of(o)}
    return {n: p for n, p in probe.trainable.items() if id(p) in held}


def never(
    probe: Probe, params: Mapping[str, Tensor], fits: Callable[[Norm], bool], *, more: bool = False
) -> dict[str, Tensor]:
    """Those of whom no gradient, at no step, ever fitted; `more` makes further steps to be sure."""
    calls: Iterable[Call] = (*probe.calls, *probe.varied) if more else probe.calls
    good: set[int] = set()
    for call in calls:
        for event in call.of("step"):
            good |= {key for key, norm in event.facts["gradients"].norms.items() if fits(norm)}
    return {n: p for n, p in params.items() if id(p) not in good}


def without_routed(lacking: Mapping[str, Tensor], among: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Less the experts that nothing was sent to: numbered modules with a twin that does get gradients."""
    names = tuple(among)
    alive = np.array([n not in lacking for n in names], np.bool_)
    if not lacking or not alive.any():
        return dict(lacking)
    spare = routed(names, np.array([p.numel() for p in among.values()], np.float64), alive)
    return {n: p for n, p in lacking.items() if not spare[names.index(n)] or _is_depth(n, lacking, names)}


def _is_depth(name: str, lacking: Mapping[str, Tensor], names: tuple[str, ...]) -> bool:
    """Whether its number is one of a stack of layers, of which everything up to some depth lacks a gradient."""
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return False
    head = ".".join(parts[:at]) + "." if at else ""
    mine = [n for n in names if n.startswith(head) and n[len(head) :].partition(".")[0].isdigit()]
    bad = {int(n[len(head) :].partition(".")[0]) for n in mine if n in lacking}
    fine = {int(n[len(head) :].partition(".")[0]) for n in mine if n not in lacking}
    if bad & fine or not fine:
        return True
    front = [n for n in names[: names.index(mine[0])] if n not in lacking]
    return max(bad) < min(fine) and not front  # a trunk: nothing in front of it gets a gradient either


def ran_without_grad(probe: Probe, name: str) -> bool:
    """Whether the module of a parameter was only ever called with gradients off."""
    modes = probe.modes_of(probe.model.get_submodule(name.rpartition(".")[0]))
    return bool(modes) and not any(grad for _, grad in modes)


def was_called(probe: Probe, name: str) -> bool:
    """Whether the module of a parameter was called at all, or is none that is called."""
    module = probe.model.get_submodule(name.rpartition(".")[0])
    return bool(probe.modes_of(module)) or type(module).forward is torch.nn.Module.forward


def learns(model: torch.nn.Module, name: str) -> bool:
    """Whether a layer belongs to a part that learns: its own weights do, or, without any, those around it."""
    at = name
    while True:
        wants = [p.requires_grad for p in model.get_submodule(at).parameters()]
        if wants or not at:
            return any(wants)
        at = at.rpartition(".")[0]


def hidden_leaves(probe: Probe) -> list[str]:
    """Tensors in the graph of the loss that require a gradient, outlive a step, and are in no model or optimizer."""
    calls = [c for c in probe.calls if c.facts.leaves]
    if len(calls) < 2:
        return []
    mine = {id(p) for p in probe.model.parameters()} | set(probe.held)
    lasting = {id(t): t for t in calls[0].facts.leaves}
    for call in calls[1:]:
        lasting = {key: t for key, t in lasting.items() if any(t is u for u in call.facts.leaves)}
    moved = {k: t for k, t in lasting.items() if k not in mine and not _is_data(probe, t)}
    modules = {id(p): type(m).__name__ for c in calls for m in c.strangers for p in m.parameters()}
    return [
        f"{'a weight of ' + modules[k] if k in modules else 'a tensor'} of shape {tuple(t.shape)}"
        for k, t in moved.items()
    ]


def _is_data(probe: Probe, tensor: Tensor) -> bool:
    return any(tensor.data_ptr() == t.data_ptr() for batch in probe.scan.batches for _, t in leaves(batch))
