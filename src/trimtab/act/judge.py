"""Measure a step's gradients and decide about it: on the host, or on the device where the optimizer is told there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.act import agc, reflex
from trimtab.act.buffers import BufferShadow
from trimtab.act.withhold import Withheld
from trimtab.core.clipping import Agc, Clip
from trimtab.core.config import Config
from trimtab.core.norm_limit import norm_limit
from trimtab.core.types import FULL_COLUMNS, Kind
from trimtab.sample import measure
from trimtab.sample.full import FullLook, Scope
from trimtab.sample.host import number, to_host
from trimtab.sample.measure import GLOBALS
from trimtab.sample.meter import Meter
from trimtab.sample.rows import Rows
from trimtab.sample.step import Step
from trimtab.sample.suspicion import Suspicion

NUM_GLOBALS = len(GLOBALS)
OFTEN = 0.5
"""Share of clipped steps above which `grad_scale` is the cheaper way to clip."""


class Judge:
    """Decides for one optimizer. `decide` fills in the step and arms or withholds; nothing else changes anything."""

    def __init__(self, optimizer: Any, config: Config, shadow: BufferShadow) -> None:
        self.suspicion = Suspicion()
        self._optimizer, self._config, self._shadow = optimizer, config, shadow
        self._limits = reflex.limits_of(config)
        self._clips = config.mode != "observe" and bool(config.clip)
        self._follow = norm_limit(config.clip) if self._clips else None
        self._units = config.clip.adaptive if self._clips and isinstance(config.clip.adaptive, Agc) else None
        self._gate = reflex.DeviceGate(optimizer)
        self._meter: Meter | None = None
        self._scope: Scope | None = None
        self._metered: Rows | None = None
        self._clip_rate = 0.0

    def decide(self, step: Step, rows: Rows) -> None:
        """Look at the gradients, and let the update through or not."""
        if rows.on_host:
            self._on_host(step, rows)
        elif reflex.gate_can(self._optimizer, self._config):
            self._on_device(step, rows)
        else:
            self._after_one_wait(step, rows)

    def heard(self, scalars: Mapping[str, float]) -> None:
        """Learn from what the device reported `lag` steps ago: how often it clips, and which norms it let through."""
        if (coef := scalars.get("clip_coef")) is not None:
            self._clip_rate += (float(coef < 1.0) - self._clip_rate) / 16
        if self._follow is not None and not scalars.get("rejected"):
            self._follow.push(scalars["grad_norm"])

    def disarm(self, step: Step) -> None:
        """Take back what was set for this one step, and remember its norm if it was let through."""
        if step.undo_flag is not None:
            self._gate.disarm()
        elif self._follow is not None and not step.rejected and "grad_norm" in step.scalars:
            self._follow.push(number(step.scalars["grad_norm"]))

    def state_dict(self) -> dict[str, Any]:
        """What a clipping strategy remembers, as plain data; empty where limits are fixed."""
        return {} if self._follow is None else self._follow.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        if self._follow is not None:
            self._follow.load_state_dict(state)

    # -- everything is on the CPU --------------------------------------------------------------------------------

    def _on_host(self, step: Step, rows: Rows) -> None:
        self._unscale(rows)
        live, plain, present = _gradients(rows, step)
        parts = measure.norms(plain)
        loss = None if step.loss is None else number(step.loss)
        judged = reflex.judge(number(measure.total(parts)), plain, self._config)
        bad = self._shadow.bad() if self._shadow.suspicious() else []
        step.table = measure.scatter(parts.unsqueeze(1), present, len(rows.params))
        wrong = self.suspicion.looks_wrong(math.nan if judged.nonfinite else judged.norm, loss)
        if wrong or bad or step.cadence:
            grads = measure.scatter(measure.full(plain), present, len(rows.params))
            step.look = FullLook(self._scope_of(rows), grads)
        self._settle(step, rows, judged, loss, bad)
        if self._clips and not judged.reject:
            members = rows.members(present)
            reflex.clip_host(judged, self._clip_now(), live, parts, self._optimizer.param_groups, members)
            step.scalars["clip_coef"] = judged.coef
            if self._units is not None and live:
                step.scalars["clip_coef"] = number(agc.clip(rows.params, self._units, wide=judged.norm > agc.HUGE))

    # -- on an accelerator, with an optimizer that can only be told from the host --------------------------------

    def _after_one_wait(self, step: Step, rows: Rows) -> None:
        self._unscale(rows)
        live, plain, present = _gradients(rows, step)
        measured = self._meter_of(rows).measure(plain, present, len(rows.params), self._limits_now())
        loss = torch.as_tensor(
            math.nan if step.loss is None else step.loss, device=measured.flat.device, dtype=torch.float32
        )
        norms = [pack.to(measured.flat.device).reshape(1).float() for pack in self._shadow.norms()]
        values = to_host(torch.cat([measured.flat, loss.reshape(1).float(), *norms]))  # the one wait
        table = measured.num_rows * measured.num_columns
        norm, nonfinite, reject, coef, _ = (float(v) for v in values[table : table + NUM_GLOBALS])
        loss_value = None if step.loss is None else float(values[table + NUM_GLOBALS])
        bad = self._shadow.bad() if not np.isfinite(values[table + NUM_GLOBALS + 1 :]).all() else []
        judged = reflex.Judged(norm, bool(nonfinite), bool(reject))
        step.table = torch.from_numpy(values[:table].reshape(measured.num_rows, measured.num_columns))
        _name_rows(step, rows, measured)
        self.suspicion.looks_wrong(math.nan if nonfinite else norm, loss_value)
        if step.cadence or bad or nonfinite:
            step.look = FullLook(self._scope_of(rows), self._full_gradients(measured, plain, present))
        self._settle(step, rows, judged, loss_value, bad)
        if self._clips and not judged.reject:
            if self._config.clip.per_group or self._config.clip.value is not None:
                parts, members = measured.table[:, 0].clamp(min=0.0), rows.members(None)  # a missing one weighs nothing
                everyone = [p.grad if p.grad is not None else torch.zeros_like(p) for p in rows.params]
                reflex.clip_host(judged, self._config.clip, everyone, parts, self._optimizer.param_groups, members)
                coef = judged.coef
            elif coef < 1.0:
                reflex.scale_by(live, measured.scalar("clip_coef"), coef)
            step.scalars["clip_coef"] = coef
            if self._units is not None and live:
                step.scalars["clip_coef"] = agc.clip(rows.params, self._units)

    # -- on an accelerator, with an optimizer that is told there -------------------------------------------------

    def _on_device(self, step: Step, rows: Rows) -> None:
        scale = getattr(self._optimizer, "grad_scale", None)
        live, plain, present = _gradients(rows, step)
        meter, limits = self._meter_of(rows), self._limits_now()
        measured = meter.measure(plain, present, len(rows.params), limits, scale)
        reject = measured.scalar("rejected")
        clip = None
        if self._units is not None and live:
            measured.scalar("clip_coef").copy_(agc.clip(rows.params, self._units, scale=scale))
        elif limits.max_norm is not None:
            # Two ways to the same gradients. `grad_scale` costs a write of every gradient, clipped or not; scaling them
            # here costs a read and a write, but nothing at all in a step that needs no clipping.
            if self._clip_rate < OFTEN and meter.can_scale and plain[0] is live[0]:
                meter.scale(plain, measured.scalar("clip_coef"))
            else:
                clip = measured.scalar("inverse_coef")
        self._gate.arm(reject, clip, scale)
        step.captured = torch.cuda.is_current_stream_capturing() if measured.flat.is_cuda else False
        step.undo_flag = reject
        if "scale" in step.scalars and len(self._shadow):
            # An overflow that the scaler provoked is not undone in the buffers: without the guard it would not be.
            told = 0.0 if step.loss is None else step.loss
            sound = torch.isfinite(told) if isinstance(told, Tensor) else float(math.isfinite(told))
            step.undo_flag = reject * (1.0 - measured.scalar("nonfinite_grads") * sound)
        step.table, step.device_names = measured.flat, GLOBALS
        _name_rows(step, rows, measured)
        if step.cadence and not step.captured:
            step.look = FullLook(self._scope_of(rows), self._full_gradients(measured, plain, present))

    # -- what they share -----------------------------------------------------------------------------------------

    def _limits_now(self) -> measure.Limits:
        # A plain number, from norms that the host knows: it goes to the device with the launch. A CUDA graph keeps the
        # one it was captured with.
        return self._limits if self._follow is None else replace(self._limits, max_norm=self._follow.limit())

    def _clip_now(self) -> Clip:
        return self._config.clip if self._follow is None else Clip(norm=self._follow.limit())

    def _settle(
        self, step: Step, rows: Rows, judged: reflex.Judged, loss: float | None, bad: list[tuple[int, int]]
    ) -> None:
        """Put what the host knows into the sample, and withhold the gradients of a rejected update."""
        step.bad_buffers = bad
        step.scalars |= {"grad_norm": judged.norm, "rejected": 0.0}
        if loss is not None:
            step.scalars["loss"] = loss
        if step.look is not None and bad:
            step.look.add_buffers(*self._shadow.described(bad))
        routine = False
        if judged.nonfinite:
            step.scalars["nonfinite_grads"] = 1.0
            # A scaler provokes overflows to find its scale: with a finite loss and sound buffers it is its business.
            routine = "scale" in step.scalars and (loss is None or math.isfinite(loss)) and not bad
            if routine:
                step.scalars["routine_overflow"] = 1.0
        if judged.reject:
            step.withheld = Withheld(self._optimizer, rows.params)
            step.rejected = not routine

    def _meter_of(self, rows: Rows) -> Meter:
        if self._meter is None or self._metered is not rows:
            self._meter, self._metered = Meter({p.device for p in rows.params}, self._config.kernels), rows
        return self._meter

    def _scope_of(self, rows: Rows) -> Scope:
        if self._scope is None or not self._scope.fits(rows):
            self._scope = Scope(rows, self._config.kernels)
        return self._scope

    def _full_gradients(self, measured: measure.Measured, plain: list[Tensor], present: list[int] | None) -> Tensor:
        if measured.num_columns == len(FULL_COLUMNS):
            return measured.table
        return measure.scatter(measure.full(plain), present, measured.num_rows)

    def _unscale(self, rows: Rows) -> None:
        """A fused optimizer under a GradScaler gets scaled gradients and divides later: the host path divides now."""
        scale = getattr(self._optimizer, "grad_scale", None)
        if isinstance(scale, Tensor):
            grads = [p.grad for p in rows.params if p.grad is not None]
            torch._foreach_div_([measure.stored(g) for g in grads], scale)
            self._optimizer.grad_scale = None


def told_by_device(scalars: Mapping[str, float], config: Config) -> dict[str, float]:
    """What a device decided, in the words the host would have used for it."""
    out = dict(scalars)
    out.pop("inverse_coef", None)
    if not config.clip or config.mode == "observe":
        out.pop("clip_coef", None)
    if not out.pop("nonfinite_grads", 0.0):
        return out
    out["nonfinite_grads"] = 1.0
    if "scale" in out and math.isfinite(out.get("loss", 0.0)):
        out |= {"routine_overflow": 1.0, "rejected": 0.0}
    return out


def _gradients(rows: Rows, step: Step) -> tuple[list[Tensor], list[Tensor], list[int] | None]:
    """The gradients there are, the same ready to be measured, and which rows they belong to (None: all)."""
    grads = rows.gradients()
    live = [g for g in grads if g is not None]
    present = None if len(live) == len(grads) else [i for i, g in enumerate(grads) if g is not None]
    if present is not None:  # which of the missing ones are not wanted
        step.frozen = tuple(i for i, g in enumerate(grads) if g is None and not rows.params[i].requires_grad)
    return live, rows.plain(live), present


def _name_rows(step: Step, rows: Rows, measured: measure.Measured) -> None:
    """The layout of what was really measured: with no gradient at all not even the kernels run."""
    if measured.num_columns == len(FULL_COLUMNS):
        step.layout = rows.layout((Kind.GRAD,))
