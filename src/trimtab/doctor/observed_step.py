"""Makes one step of a user's training under observation, and says what an exception in it means."""

from __future__ import annotations

import math
import re
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.doctor.checklist import Check, Line, failed, not_applicable, passed
from trimtab.doctor.recording import Call, Failure, Watch
from trimtab.doctor.target import Target, backward, raw_loss
from trimtab.sample.transfer import number
from trimtab.torchutil.optimizers import needs_closure, params_of, rates_of

if TYPE_CHECKING:
    from trimtab.doctor.probe import Probe


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


def as_loss(value: object) -> object:
    """The loss in what a step returned: itself, or the part that is called so.

    Example:
        >>> as_loss({"loss": 1.0, "accuracy": 0.5})
        1.0
    """
    if isinstance(value, Mapping):
        return value.get("loss", next((v for v in value.values() if isinstance(v, Tensor) and v.numel() == 1), None))
    if isinstance(own := getattr(value, "loss", None), Tensor):
        return own
    if isinstance(value, list | tuple):
        return next((v for v in value if isinstance(v, Tensor | float)), None)
    return value


def make_call(
    target: Target, batch: object, watch: Watch, options: Options, *, doctor_steps: bool | None
) -> tuple[Call, bool]:
    """Make one call on a batch; also returns whether doctor had to run backward and step, as `step_fn` does not.

    `doctor_steps` is None while that is not known yet.
    """
    call = watch.begin()
    before = _weights(target, watch)
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as heard, _surroundings(target, options):
        warnings.simplefilter("always")
        try:
            value = as_loss(raw_loss(target, batch))
            if doctor_steps is None:
                doctor_steps = not (call.of("backward") or call.of("step"))
            _note_loss(call, value)
            if doctor_steps and any(needs_closure(one) for one in target.optimizers):
                _step_by_closure(target, batch)
                update_schedule_and_ema(target)
            elif doctor_steps:
                _step(target, value, options, call)
                update_schedule_and_ema(target)
        except Exception as error:  # whatever it is, it is the user's training that raised it
            call.failure = failure_of(error, call, watch)
    call.seconds = time.perf_counter() - began
    call.warnings = list(dict.fromkeys(" ".join(str(w.message).split()) for w in heard))
    call.changes = {key: _change(p, old) for key, (p, old) in before.items()}
    call.rates = {id(o): tuple(rates_of(o, missing=math.nan, wait=True)) for o in target.optimizers}
    _note_norms(call)
    return call, bool(doctor_steps)


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


def scaler_is_on(scaler: object) -> bool:
    """Whether a scaler does anything."""
    return bool(scaler.is_enabled()) if hasattr(scaler, "is_enabled") else scaler is not None


def amp_dtype(target: Target, options: Options) -> torch.dtype | None:
    """What a forward pass runs in: as asked, else float16 where there is a scaler and no `step_fn`."""
    if options.amp_dtype == "auto":
        scaled = target.step_fn is None and target.scaler is not None and scaler_is_on(target.scaler)
        half = any(p.dtype is torch.float16 for p in target.model.parameters())
        return torch.float16 if scaled and not half else None
    return DTYPES.get(options.amp_dtype)


def _step(target: Target, loss: object, options: Options, call: Call) -> None:
    """Backward, unscale, clip, step, update: the order in which it is right."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        return  # the checks say what is wrong with it
    scaler = target.scaler
    for one in target.optimizers:
        one.zero_grad()
    with torch.autocast(loss.device.type, enabled=False):
        backward(loss if scaler is None else scaler.scale(loss))
    if options.clip_grad_norm > 0:
        for one in target.optimizers:
            if scaler is not None:
                scaler.unscale_(one)
        params = [p for p in params_of(*target.optimizers) if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(params, options.clip_grad_norm)
    for one in target.optimizers:
        if scaler is not None:
            scaler.step(one)
        else:
            one.step()
    if scaler is not None:
        scaler.update()
        call.scale = float(scaler.get_scale())


def _step_by_closure(target: Target, batch: object) -> None:
    def closure() -> Any:
        for one in target.optimizers:
            one.zero_grad()
        loss = as_loss(raw_loss(target, batch))
        backward(loss)
        return loss

    for one in target.optimizers:
        one.step(closure)


def update_schedule_and_ema(target: Target) -> None:
    """Step the schedule and update the average, as a loop does after its step."""
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
        found |= {id(p): p for p in params_of(optimizer)}
    return {key: (p, p.detach().clone()) for key, p in found.items() if not p.is_meta}


def _change(now: Tensor, before: Tensor) -> tuple[float, float]:
    """How far a weight went, and how large it was."""
    if now.shape != before.shape:
        return math.inf, math.inf
    if torch.equal(now, before):
        return 0.0, number(torch.linalg.vector_norm(before.abs().double()))
    moved = (now.detach() - before).abs().double()
    return number(torch.linalg.vector_norm(moved)), number(torch.linalg.vector_norm(before.abs().double()))


def _note_loss(call: Call, value: object) -> None:
    call.loss_kind = type(value).__name__
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        call.loss, call.loss_shape = float(value), ()
    elif isinstance(value, Tensor):
        call.loss_shape, call.requires_grad = tuple(value.shape), value.requires_grad
        call.loss_device = str(value.device)
        if value.numel() == 1 and not value.is_meta:
            call.loss = number(value.detach().abs() if value.is_complex() else value.detach().double())


def _note_norms(call: Call) -> None:
    clips = [e for e in call.of("clip") if e.facts["num"]]
    if call.of("step"):
        norms = call.grad_norms
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


PATTERNS: tuple[tuple[str, str], ...] = (
    ("label-range", r"^target -?\d+ is out of bounds|target out of|index out of range in self|class values must be"),
    ("label-range", r"should be between 0 and 1|all elements of (target|input) should be between"),
    ("label-range", r"device-side assert"),
    ("in-place-hazard", r"modified by an inplace operation|in-place operation"),
    ("loss-not-scalar", r"implicitly created only for scalar outputs"),
    ("no-grad", r"inference tensor"),
    ("loss-detached", r"does not require grad"),
    ("graph-reused", r"backward through the graph a second time"),
    ("device-placement", r"same device|meta tensor|meta device|device meta|expected device|on device"),
    (
        "dtype-mismatch",
        r"same dtype|expected scalar type|scalar types|not implemented for '|input type .* and (weight|bias) type",
    ),
    (
        "dtype-mismatch",
        r"must have the same dtype|expected .*dtype|result type .* can't be cast|expected floating point",
    ),
    (
        "scaler-order",
        r"unscale_\(\) (has already|is being)|since the last update|no inf checks were recorded|_scale is none",
    ),
    ("shape-mismatch", r"shapes cannot be multiplied|size mismatch|must match the size|expected input batch_size"),
    ("shape-mismatch", r"expected \d+d|expected .* channels|invalid for input of size|shape .* is invalid"),
    (
        "shape-mismatch",
        r"sizes? .* doesn't match|same shape|normalized_shape|same size|must be equal to the size|cannot be broadcast",
    ),
    ("label-range", r"index \d+ is out of bounds for dimension"),
)


def trouble_of(failure: Failure) -> str:
    """The name of the check that an exception belongs to; `step-exception` where none does.

    Example:
        >>> trouble_of(Failure("IndexError", "Target 10 is out of bounds.", "", "", "loss"))
        'label-range'
    """
    text = failure.text.lower()
    if failure.kind == "NotImplementedError" and "meta" in text:
        return "device-placement"
    return next((name for name, pattern in PATTERNS if re.search(pattern, text)), "step-exception")


def failure_lines(check: Check, probe: Probe, what: str, fix: str) -> Iterator[Line]:
    """The line of a check for an exception of the first steps; `what` is the cause, `fix` a line of code."""
    failure = probe.failure
    if failure is not None and probe.failed_as == check.name:
        where = f" in {failure.module}" if failure.module else ""
        yield failed(
            check,
            f"{what}{where}: {failure.text[:200]}",
            f"in the {failure.phase} pass of call {len(probe.calls) - 1}, at {failure.where or 'unknown'}",
            fix,
            (failure.module,) if failure.module else (),
        )
    elif not probe.through:
        yield not_applicable(check, probe.no_steps)
    else:
        yield passed(check, f"{len(probe.through)} calls came to their end")


LOST = ("device-side assert", "unspecified launch failure", "illegal memory access")


def may_reorder(device: torch.device) -> bool:
    """Whether the same sum may come out differently the next time."""
    return device.type not in ("cpu", "meta")


@contextmanager
def in_order(device: torch.device) -> Iterator[None]:
    """With algorithms whose order is fixed, wherever there are such; nothing changes on a CPU."""
    if not may_reorder(device):
        yield
        return
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def is_lost(text: object) -> bool:
    """Whether an error says that this process can no longer use its GPU.

    Example:
        >>> is_lost(RuntimeError("CUDA error: device-side assert triggered"))
        True
    """
    return any(one in str(text) for one in LOST)
