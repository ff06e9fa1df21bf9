"""What an examination reports: the lines of the checklist, the observed steps in numbers, and the environment."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from trimtab.compat.lines import gradient_line
from trimtab.doctor.batch_tensors import Roles, is_label_like, leaves

if TYPE_CHECKING:
    from trimtab.doctor.observed_step import Options
    from trimtab.doctor.probe import Probe
    from trimtab.doctor.recording import Call
    from trimtab.doctor.target import Target


class Status(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    NA = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the checklist.

    `evidence` says what was seen, with numbers; `cause` in one sentence what is wrong, `fix` is a line of code.
    `follows` names the check whose failure explains this one.

    Example:
        >>> Line(code="WIRE001", name="device-placement", title="one device", status=Status.PASS, evidence="cpu").ok
        True
    """

    code: str
    name: str
    title: str
    status: Status
    evidence: str = ""
    cause: str = ""
    fix: str = ""
    subject: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    follows: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong here."""
        return self.status in (Status.PASS, Status.NA)


class Check(Protocol):
    """One entry of the checklist. `causes` names the checks whose failures follow from this one."""

    code: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str]
    causes: ClassVar[tuple[str, ...]]

    def run(self, probe: Probe) -> Iterator[Line]:
        """Look, and say what was seen."""
        ...


def passed(check: Check, evidence: str, **numbers: float) -> Line:
    """The line of a check that found nothing wrong, with the reason to think so."""
    return _line(check, Status.PASS, evidence=evidence, numbers=numbers)


def not_applicable(check: Check, reason: str) -> Line:
    """The line of a check that could not look, or had nothing to look at. It has not passed."""
    return _line(check, Status.NA, evidence=reason, numbers={})


def warned(check: Check, cause: str, evidence: str, fix: str, subject: tuple[str, ...] = (), **numbers: float) -> Line:
    """The line of a check that found something that may be intended, and harms where it is not."""
    return _line(check, Status.WARN, cause=cause, evidence=evidence, fix=fix, subject=subject, numbers=numbers)


def failed(check: Check, cause: str, evidence: str, fix: str, subject: tuple[str, ...] = (), **numbers: float) -> Line:
    """The line of a check that found something that no training is meant to have."""
    return _line(check, Status.FAIL, cause=cause, evidence=evidence, fix=fix, subject=subject, numbers=numbers)


def _line(
    check: Check,
    status: Status,
    *,
    evidence: str,
    cause: str = "",
    fix: str = "",
    subject: tuple[str, ...] = (),
    numbers: Mapping[str, float],
) -> Line:
    return Line(
        code=check.code,
        name=check.name,
        title=check.title,
        status=status,
        evidence=evidence,
        cause=cause,
        fix=fix,
        subject=subject,
        numbers=dict(numbers),
    )


NUM_LABELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One observed call, in numbers that can be printed and written as JSON."""

    step: int
    batch: tuple[str, ...]
    labels: tuple[int, ...]
    num_ignored: int
    num_labels: int
    loss: float | None
    requires_grad: bool
    loss_device: str
    grad_norm: float | None
    norm_after_clip: float | None
    nonzero: int
    zero: int
    total: int
    nonfinite: int
    largest: float
    smallest: float
    average: float
    scale: float | None
    seconds: float
    failure: str

    def lines(self, *, gradients: bool = True) -> Iterator[str]:
        """As the sanity tool prints it."""
        yield f"Step {self.step}: batch {'; '.join(self.batch) or 'without tensors'}"
        if self.labels:
            left_out = f" ({self.num_ignored} of {self.num_labels} are ignored)" if self.num_ignored else ""
            yield f"  labels {list(self.labels)}{left_out}"
        if self.failure:
            yield f"  {self.failure}"
            return
        loss = "none returned" if self.loss is None else f"{self.loss:.6f}"
        yield f"  loss {loss}, requires_grad {self.requires_grad}, device {self.loss_device or 'unknown'}"
        if not gradients:
            return
        if self.grad_norm is None:
            yield "  no optimizer step in this call"
            return
        counts = {"num_zero": self.zero, "num_nonfinite": self.nonfinite, "num_parameters": self.total}
        norms = self.smallest, self.largest, self.average
        yield f"  {gradient_line(self.step, self.grad_norm, *norms, **counts)}"
        yield f"  Gradient health: {self.nonzero}/{self.total} non-zero, {self.nonfinite} NaN/Inf"
        after = self.norm_after_clip
        if after is not None and after != self.grad_norm:
            yield f"  norm after clip {after:.4g}"
        if self.scale is not None:
            yield f"  scaler scale {self.scale:g}"


def step_view(call: Call, batch: object, roles: Roles | None = None) -> StepView:
    """Put one call into numbers."""
    found = list(leaves(batch))
    labels = _labels(call, dict(found), roles)
    kept = None if labels is None else labels[labels != call.facts.ignore_index]
    norms = [v for e in call.of("step") for v in e.facts["gradients"].norms.values()]
    there = [v for v in norms if v is not None]
    finite = [v for v in there if math.isfinite(v)]
    failure = call.failure
    return StepView(
        step=call.index,
        batch=tuple(
            f"{p or 'x'} {list(t.shape)} {str(t.dtype).removeprefix('torch.')} {t.device}" for p, t in found[:6]
        ),
        labels=() if kept is None else tuple(int(v) for v in kept[:NUM_LABELS].tolist()),
        num_ignored=0 if labels is None or kept is None else labels.numel() - kept.numel(),
        num_labels=0 if labels is None else labels.numel(),
        loss=call.loss,
        requires_grad=call.requires_grad,
        loss_device=call.loss_device,
        grad_norm=call.norm_before,
        norm_after_clip=call.norm_after,
        nonzero=sum(v != 0 for v in there),
        zero=sum(not v for v in norms),
        total=len(norms),
        nonfinite=len(there) - len(finite),
        largest=max(finite, default=0.0),
        smallest=min(finite, default=0.0),
        average=sum(finite) / len(finite) if finite else 0.0,
        scale=call.scale,
        seconds=call.seconds,
        failure=f"{failure.kind} in {failure.phase}: {failure.text[:200]}" if failure is not None else "",
    )


def _labels(call: Call, batch: dict[str, Tensor], roles: Roles | None) -> Tensor | None:
    """What the loss compared with, as a row of whole numbers; None where it had none, or that is not known.

    The first whole numbers of a batch are as often tokens as labels: only the loss knows. Where it was never reached,
    or is written by hand, the target that the contract names is taken, then what scores were picked by.
    """
    facts = call.facts
    seen = [t for t in facts.targets if _is_class(t, facts.kind)]
    if not seen and roles is not None and roles.sure:
        seen = [batch[path] for path in roles.targets if path in batch and is_label_like(batch[path])]
    return next((t.detach().reshape(-1) for t in (*seen, *facts.picked) if t.numel() and not t.is_meta), None)


def _is_class(target: Tensor, kind: str) -> bool:
    if target.is_floating_point():  # a binary cross-entropy takes its classes as 0.0 and 1.0
        return kind.startswith("bce") and bool((target == target.round()).all())
    return not target.is_complex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The checklist of one training, in the order of cause and effect, and the steps it rests on."""

    lines: tuple[Line, ...]
    steps: tuple[StepView, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    traces: tuple[str, ...] = ()

    def of(self, status: Status) -> list[Line]:
        """The lines that ended so."""
        return [line for line in self.lines if line.status is status]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.of(Status.FAIL)


def environment(options: Options, target: Target | None = None) -> dict[str, Any]:
    """What a reader needs to repeat an examination, in plain data.

    Example:
        >>> from trimtab.doctor.observed_step import Options
        >>> environment(Options())["torch"] == torch.__version__
        True
    """
    from trimtab import __version__

    found: dict[str, Any] = {
        "trimtab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "device": _device(target),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "amp_dtype": options.amp_dtype,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "detect_anomaly": options.detect_anomaly,
        "clip_grad_norm": options.clip_grad_norm,
        "max_steps": options.max_steps,
        "seed": options.seed,
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if target is not None:
        params = list(target.model.parameters())
        found["model"] = type(target.model).__name__
        found["parameters"] = sum(p.numel() for p in params)
        found["trainable"] = sum(p.numel() for p in params if p.requires_grad)
        found["optimizers"] = [type(o).__name__ for o in target.optimizers]
    return found


def _device(target: Target | None) -> str:
    if target is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kinds = sorted({str(p.device) for p in target.model.parameters()})
    return ", ".join(kinds)
