"""Whether a training repeats itself: saved by its state_dicts, loaded and continued, or built twice with one seed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.doctor.observed_step import Options, in_order, make_call, may_reorder
from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Watch
from trimtab.doctor.target import Target
from trimtab.torchutil.undo import remembered

BEFORE = 2
"""Steps before the save."""
ROUNDING = 1e-3
"""Of a step: what may differ on an accelerator. A lost moment makes a difference of about a whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The next loss without and with a resume, and how the weights compare after it."""

    loss: float | None = None
    again: float | None = None
    same_weights: bool = True
    num_different: int = 0
    difference: float = 0.0
    num_keys: int = 0
    unsaved: tuple[str, ...] = ()
    per_sample: bool = False
    error: str = ""


def resumed(probe: Probe) -> Resumed:
    """Make some steps, save, go on; come back, load, go on again."""
    return probe.cached("resumed", lambda: _try(probe))


def _try(probe: Probe) -> Resumed:
    target = probe.target
    with in_order(probe.device), probe.trial(rates=False):
        start = remembered(target)
        calls = probe.run([probe.batch(i) for i in range(BEFORE)])
        if any(c.failure is not None for c in calls) or any(not c.of("step") for c in probe.through):
            return Resumed()  # gradients that wait for more are in no checkpoint
        kept = {key: copy.deepcopy(one.state_dict()) for key, one in _parts(probe).items()}
        plain = _plain_tensors(probe)
        here = remembered(target, deep=True)
        before = [p.detach().clone() for p in probe.model.parameters()]
        first = probe.run([probe.batch(BEFORE)], seeds=[BEFORE])[0]
        weights = [p.detach().clone() for p in probe.model.parameters()]
        here.undo()
        start.undo()
        unsaved = tuple(n for n, t in _plain_tensors(probe).items() if n in plain and not torch.equal(t, plain[n]))
        gone = [n for n in plain if n in _plain_tensors(probe)]
        try:
            for key, one in _parts(probe).items():
                one.load_state_dict(copy.deepcopy(kept[key]))
        except Exception as error:
            return Resumed(error=f"{type(error).__name__}: {str(error)[:200]}")
        second = probe.run([probe.batch(BEFORE)], seeds=[BEFORE])[0]
        pairs = list(zip(weights, [p.detach().clone() for p in probe.model.parameters()], strict=True))
    apart = [float((a - b).abs().max()) for a, b in pairs if not torch.equal(a, b)]
    steps = [float((a - b).abs().max()) for a, b in zip(weights, before, strict=True) if a.numel()]
    if may_reorder(probe.device) and max(apart, default=0.0) < ROUNDING * max(steps, default=0.0):
        apart = []  # not all operations have an algorithm of a fixed order
    sizes = {probe.scan.size}
    return Resumed(
        loss=first.loss if first.loss == first.loss else None,
        again=second.loss,
        same_weights=not apart,
        num_different=len(apart),
        difference=max(apart, default=0.0),
        num_keys=len(kept["model"]),
        unsaved=unsaved,
        per_sample=not unsaved or any(set(plain[n].shape) & sizes for n in unsaved if n in gone),
    )


def _parts(probe: Probe) -> dict[str, Any]:
    target = probe.target
    found: dict[str, Any] = {"model": target.model}
    found |= {f"optimizer {i}": one for i, one in enumerate(probe.optimizers)}
    found |= {f"scheduler {i}": one for i, one in enumerate(probe.schedulers)}
    found |= {"scaler": target.scaler, "ema": target.ema}
    return {k: v for k, v in found.items() if hasattr(v, "state_dict") and hasattr(v, "load_state_dict")}


def _plain_tensors(probe: Probe) -> dict[str, Tensor]:
    """Tensors that modules keep as plain attributes, or as buffers that are not saved."""
    found: dict[str, Tensor] = {}
    for name, module in probe.model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{name}.{key}" if name else key] = value.detach().clone()
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if buffer is not None:
                found[f"{name}.{key}" if name else key] = buffer.detach().clone()
    return found


def two_builds_agree(
    build: Callable[[], Target], options: Options, doctor_steps: bool, seed: Callable[[], None], num: int
) -> bool:
    """Whether the losses of the first steps are bit-identical."""
    seen: list[list[float | None]] = []
    for _ in range(2):
        seed()
        target = build()
        seed()
        watch, losses = Watch(target.model), list[float | None]()
        with watch.listening():
            for _, batch in zip(range(num), target.loader, strict=False):
                call, _ = make_call(target, batch, watch, options, doctor_steps=doctor_steps)
                losses.append(call.loss)
        seen.append(losses)
    return seen[0] == seen[1]
