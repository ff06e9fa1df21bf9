"""Makes one step of somebody's training under observation, whoever runs the backward pass: they or we."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.checks.events import Call, Failure
from trimtab.checks.target import Target
from trimtab.checks.target_steps import raw_loss
from trimtab.checks.watch import Watch
from trimtab.guard.attach import _needs_closure
from trimtab.sample.transfer import number

OURS = str(Path(__file__).parents[1])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the steps are made: as `trimtab doctor` was asked to."""

    max_steps: int = 3
    batch_size: int | None = None
    amp_dtype: str = "auto"
    grad_log_interval: int = 1
    detect_anomaly: bool = False
    clip_grad_norm: float = 0.0
    seed: int = 0
    full: bool = False


def as_loss(value: Any) -> Any:
    """The loss in what a step returned: itself, or the part that is called so.

    Example:
        >>> as_loss({"loss": 1.0, "accuracy": 0.5})
        1.0
    """
    if isinstance(value, Mapping):
        return value.get("loss", next((v for v in value.values() if isinstance(v, Tensor) and v.numel() == 1), None))
    if isinstance(getattr(value, "loss", None), Tensor):
        return value.loss
    if isinstance(value, list | tuple):
        return next((v for v in value if isinstance(v, Tensor | float)), None)
    return value


def make_call(target: Target, batch: Any, watch: Watch, options: Options, *, ours: bool | None) -> tuple[Call, bool]:
    """One call on a batch; says whether backward and step were ours to run. `ours` is None while nobody knows."""
    call = watch.begin()
    before = _weights(target, watch)
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as heard, _surroundings(target, options):
        warnings.simplefilter("always")
        try:
            value = as_loss(raw_loss(target, batch))
            if ours is None:
                ours = not (call.of("backward") or call.of("step"))
            _note_loss(call, value)
            if ours and any(_wants_closure(one) for one in target.optimizers):
                _step_by_closure(target, batch)
                _follow(target)
            elif ours:
                _step(target, value, options, call)
                _follow(target)
        except Exception as error:  # whatever it is, it is the user's training that raised it
            call.failure = failure_of(error, call, watch)
    call.seconds = time.perf_counter() - began
    call.warnings = list(dict.fromkeys(" ".join(str(w.message).split()) for w in heard))
    call.changes = {key: _change(p, old) for key, (p, old) in before.items()}
    call.rates = {id(o): tuple(float(g.get("lr", math.nan)) for g in o.param_groups) for o in target.optimizers}
    _note_norms(call)
    return call, bool(ours)


@contextmanager
def _surroundings(target: Target, options: Options) -> Iterator[None]:
    with ExitStack() as stack:
        dtype = amp_dtype(target, options)
        if dtype is not None:
            device = next(target.model.parameters()).device.type
            stack.enter_context(torch.autocast(device, dtype=dtype))
        if options.detect_anomaly:
            stack.enter_context(torch.autograd.detect_anomaly())
        yield


def scaler_is_on(scaler: Any) -> bool:
    """Whether a scaler does anything."""
    return bool(scaler.is_enabled()) if hasattr(scaler, "is_enabled") else scaler is not None


def amp_dtype(target: Target, options: Options) -> torch.dtype | None:
    """What a forward pass runs in: as asked, else float16 where there is a scaler and the step is ours."""
    if options.amp_dtype == "auto":
        ours = target.step_fn is None and target.scaler is not None and scaler_is_on(target.scaler)
        half = any(p.dtype is torch.float16 for p in target.model.parameters())
        return torch.float16 if ours and not half else None
    return DTYPES.get(options.amp_dtype)


def _step(target: Target, loss: Any, options: Options, call: Call) -> None:
    """Backward, unscale, clip, step, update: the order in which it is right."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        return  # the checks say what is wrong with it
    scaler = target.scaler
    for one in target.optimizers:
        one.zero_grad()
    with torch.autocast(loss.device.type, enabled=False):
        (loss if scaler is None else scaler.scale(loss)).backward()
    if options.clip_grad_norm > 0:
        for one in target.optimizers:
            if scaler is not None:
                scaler.unscale_(one)
        params = [p for o in target.optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(params, options.clip_grad_norm)
    for one in target.optimizers:
        if scaler is not None:
            scaler.step(one)
        else:
            one.step()
    if scaler is not None:
        scaler.update()
        call.scale = float(scaler.get_scale())


def _wants_closure(optimizer: Any) -> bool:
    kind: Any = type(optimizer)
    return _needs_closure(kind)


def _step_by_closure(target: Target, batch: Any) -> None:
    def closure() -> Any:
        for one in target.optimizers:
            one.zero_grad()
        loss = as_loss(raw_loss(target, batch))
        loss.backward()
        return loss

    for one in target.optimizers:
        one.step(closure)


def _follow(target: Target) -> None:
    """What a loop does after a step, and nobody else does here: move the schedule and the average."""
    scheduler = target.scheduler
    if scheduler is not None and hasattr(scheduler, "step") and not hasattr(scheduler, "num_bad_epochs"):
        scheduler.step()
    update = getattr(target.ema, "update_parameters", None) or getattr(target.ema, "update", None)
    if callable(update):
        try:
            update(target.model)
        except TypeError:
            update()


def _weights(target: Target, watch: Watch) -> dict[int, tuple[Tensor, Tensor]]:
    found: dict[int, Tensor] = {id(p): p for p in target.model.parameters()}
    for optimizer in watch.optimizers.values():
        found |= {id(p): p for g in optimizer.param_groups for p in g["params"]}
    return {key: (p, p.detach().clone()) for key, p in found.items() if not p.is_meta}


def _change(now: Tensor, before: Tensor) -> tuple[float, float]:
    """How far a weight went, and how large it was."""
    if now.shape != before.shape:
        return math.inf, math.inf
    if torch.equal(now, before):
        return 0.0, number(torch.linalg.vector_norm(before.abs().double()))
    moved = (now.detach() - before).abs().double()
    return number(torch.linalg.vector_norm(moved)), number(torch.linalg.vector_norm(before.abs().double()))


def _note_loss(call: Call, value: Any) -> None:
    call.loss_kind = type(value).__name__
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        call.loss, call.loss_shape = float(value), ()
    elif isinstance(value, Tensor):
        call.loss_shape, call.requires_grad = tuple(value.shape), value.requires_grad
        call.loss_device, call.loss_dtype = str(value.device), value.dtype
        if value.numel() == 1 and not value.is_meta:
            call.loss = number(value.detach().abs() if value.is_complex() else value.detach().double())


def _note_norms(call: Call) -> None:
    clips = [e for e in call.of("clip") if e.facts["num"]]
    steps = call.of("step")
    if steps:
        norms = [v for e in steps for v in e.facts["gradients"].present.values()]
        call.norm_after = math.sqrt(sum(v * v for v in norms)) if all(map(math.isfinite, norms)) else math.nan
        call.norm_before = call.norm_after
    if clips:
        call.norm_before = clips[-1].facts["norm"]


def failure_of(error: Exception, call: Call, watch: Watch) -> Failure:
    """What an exception says, and where it was raised: the innermost line of the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(OURS) and "site-packages/torch" not in f.filename]
    at = theirs[-1] if theirs else None
    where = f"{Path(at.filename).name}:{at.lineno} ({(at.line or '').strip()[:80]})" if at is not None else ""
    kinds = [e.kind for e in call.events]
    phase = "forward" if watch.running else "step" if "step" in kinds else "backward" if "backward" in kinds else "loss"
    return Failure(
        kind=type(error).__name__,
        text=" ".join(str(error).split())[:600],
        where=where,
        module=watch.running[-1] if watch.running else "",
        phase=phase,
        trace="".join(traceback.format_exception(error))[-4000:],
    )
