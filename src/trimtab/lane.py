"""One optimizer's way through a step: measure, judge, clip or reject, step, clean up, post the sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.act import reflex
from trimtab.act.buffers import BufferShadow, ForwardTap
from trimtab.act.cut_lr import LrMultiplier
from trimtab.act.withhold import Withheld
from trimtab.core.config import Config
from trimtab.core.types import Layout, Sample
from trimtab.sample import measure
from trimtab.sample.full import FullLook
from trimtab.sample.host import number
from trimtab.sample.mailbox import Mailbox
from trimtab.sample.observed import Observed
from trimtab.sample.rows import Rows
from trimtab.sample.suspicion import Suspicion

Scalars = dict[str, float | Tensor]
NO_TABLE = torch.zeros(0, 1)


@dataclass(slots=True)
class _Step:
    """What is known of the step under way."""

    number: int
    layout: Layout
    loss: Tensor | float | None
    scalars: Scalars
    table: Tensor = NO_TABLE
    look: FullLook | None = None
    withheld: Withheld | None = None
    rejected: bool = False
    bad_buffers: list[tuple[int, int]] = field(default_factory=list)
    undo_flag: Tensor | None = None  # set where the device decides: the host does not know yet


class Lane:
    """Everything kept for one optimizer between steps. Its seam calls `before` and `after`."""

    def __init__(
        self,
        optimizer: Any,
        *,
        label: str,
        config: Config,
        lag: int,
        rows: Callable[[], Rows],
        observed: Observed,
        shadow: BufferShadow,
        tap: ForwardTap,
        scale: Callable[[], float | Tensor | None],
        deliver: Callable[[Lane, Sample], None],
    ) -> None:
        self.optimizer, self.label = optimizer, label
        self.attempts = self.rejected = 0
        self.last_rejected = self.stop_requested = False
        self.multiplier = LrMultiplier(optimizer, config.policy)
        self._config, self._build_rows, self._observed = config, rows, observed
        self._shadow, self._tap, self._scale, self._deliver = shadow, tap, scale, deliver
        self._mailbox = Mailbox(lag)
        self._suspicion = Suspicion()
        self._gate = reflex.DeviceGate(optimizer)
        self._rows = rows()
        self._round = -1
        self._open: _Step | None = None
        self._decided_on_device: set[int] = set()
        self._reflexes = config.mode != "observe"

    # -- called by the seam --------------------------------------------------------------------------------------

    def told(self, loss: Any) -> None:
        """A closure returned this; if it is no loss, nothing was told."""
        if isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1):
            self._observed.told(loss, None, {}, strict=False)

    def before(self) -> None:
        """Gradients are ready: measure them, decide, and let the update through or not."""
        self.abandon()  # a step that raised had no after()
        step = self._begin()
        if self._rows.on_host or not reflex.supports_gate(self.optimizer):
            self._judge_on_host(step)
        else:
            self._judge_on_device(step)
        if not step.rejected:
            self.multiplier.apply()

    def after(self) -> None:
        """The step is over: undo what was temporary, finish the sample, deliver what is due."""
        step = self._open
        if step is None:
            return
        self.release()
        self._settle_buffers(step)
        if step.look is not None:
            step.layout, step.table, more = step.look.finish()
            step.scalars |= more
        self.abandon()
        self._mailbox.post(step.number, step.layout, step.table, step.scalars)
        self.multiplier.recover()
        self._tap.step_done()
        for sample in self._mailbox.due(step.number):
            self._hand_over(sample)

    def skipped(self) -> None:
        """A GradScaler found non-finite gradients and did not call the optimizer: the attempt counts all the same."""
        self.before()
        if self._open is not None:
            self._open.scalars["scaler_skipped"] = 1.0
        self.after()

    def release(self) -> bool:
        """Give withheld gradients back; True if this step's update was rejected."""
        step = self._open
        if step is None:
            return False
        if step.withheld is not None:
            step.withheld.put_back()
            step.withheld = None
        return step.rejected

    def revoked(self) -> None:
        """A closure-driven step ended in non-finite weights and was put back as a whole."""
        if self._open is not None:
            self._open.scalars["nonfinite_grads"] = 1.0
            self._reject(self._open)

    # -- the parts of a step -------------------------------------------------------------------------------------

    def _begin(self) -> _Step:
        every = self._config.full_every
        cadence = every > 0 and self.attempts % every == 0
        if not self._rows.fits(self.optimizer) or (cadence and not self._rows.same(self.optimizer)):
            self._rows = self._build_rows()
        if cadence:
            self._shadow.refresh()
        self._shadow.capture()
        self._round, loss, told = self._observed.take(self._round)
        step = self._open = _Step(self.attempts, self._rows.norm_layout, loss, dict(told))
        self.attempts += 1
        for g, group in enumerate(self.optimizer.param_groups):
            if "lr" in group:
                step.scalars[f"lr/{g}"] = group["lr"]
        if self.multiplier.value != 1.0:
            step.scalars["lr_multiplier"] = self.multiplier.value
        if (scale := self._scale()) is not None:
            step.scalars["scale"] = scale
        return step

    def _judge_on_host(self, step: _Step) -> None:
        config, rows = self._config, self._rows
        self._unscale()
        live, plain, present = self._gradients()
        parts = measure.norms(plain)
        loss = None if step.loss is None else number(step.loss)
        judged = reflex.judge(number(measure.total(parts)), plain, config)
        wrong = self._suspicion.looks_wrong(math.nan if judged.nonfinite else judged.norm, loss)
        step.bad_buffers = self._shadow.bad() if self._shadow.suspicious() else []
        step.table = measure.scatter(parts.unsqueeze(1), present, len(rows.params))
        step.scalars |= {"grad_norm": judged.norm, "rejected": 0.0}
        if loss is not None:
            step.scalars["loss"] = loss
        routine = False
        if judged.nonfinite:
            step.scalars["nonfinite_grads"] = 1.0
            # A scaler provokes overflows to find its scale: with a finite loss and sound buffers it is its business.
            routine = "scale" in step.scalars and (loss is None or math.isfinite(loss)) and not step.bad_buffers
            if routine:
                step.scalars["routine_overflow"] = 1.0
        if wrong or step.bad_buffers or self._is_cadence(step):
            step.look = FullLook(rows, plain, present)
            if step.bad_buffers:
                step.look.add_buffers(*self._shadow.described(step.bad_buffers))
        if judged.reject:
            step.withheld = Withheld(self.optimizer, rows.params)
            if not routine:
                self._reject(step)
        elif self._reflexes and config.clip:
            members = rows.members(present)
            reflex.clip_host(judged, config.clip, live, parts, self.optimizer.param_groups, members)
            step.scalars["clip_coef"] = judged.coef

    def _judge_on_device(self, step: _Step) -> None:
        scale = getattr(self.optimizer, "grad_scale", None)
        _, plain, present = self._gradients()
        parts = measure.norms(plain)
        if scale is not None:
            parts = parts / scale.to(parts.device)
        total = measure.total(parts)
        coef, reject = self._gate.arm(total, self._config, scale=scale)
        nonfinite = (~torch.isfinite(total)).to(reject.dtype)
        step.undo_flag = reject
        step.table = measure.scatter(parts.unsqueeze(1), present, len(self._rows.params))
        step.scalars |= {"grad_norm": total, "nonfinite_grads": nonfinite}
        if step.loss is not None:
            step.scalars["loss"] = step.loss
        if "scale" in step.scalars:
            sound = torch.isfinite(torch.as_tensor(step.loss, device=total.device)) if step.loss is not None else 1.0
            step.scalars["routine_overflow"] = nonfinite * sound
            step.undo_flag = reject * (1.0 - nonfinite * sound)
        step.scalars["rejected"] = step.undo_flag
        if self._config.clip.norm is not None:
            step.scalars["clip_coef"] = coef
        if self._is_cadence(step):
            step.look = FullLook(self._rows, plain, present)
        self._decided_on_device.add(step.number)

    def _gradients(self) -> tuple[list[Tensor], list[Tensor], list[int] | None]:
        grads = self._rows.gradients()
        live = [g for g in grads if g is not None]
        present = None if len(live) == len(grads) else [i for i, g in enumerate(grads) if g is not None]
        return live, self._rows.plain(live), present

    def _is_cadence(self, step: _Step) -> bool:
        return self._config.full_every > 0 and step.number % self._config.full_every == 0

    def _unscale(self) -> None:
        """A fused optimizer under a GradScaler gets scaled gradients and divides later: the host path divides now."""
        scale = getattr(self.optimizer, "grad_scale", None)
        if isinstance(scale, Tensor):
            grads = [p.grad for p in self._rows.params if p.grad is not None]
            torch._foreach_div_([measure.stored(g) for g in grads], scale)
            self.optimizer.grad_scale = None

    def _reject(self, step: _Step) -> None:
        step.rejected = True
        step.scalars["rejected"] = 1.0
        self.rejected += 1

    def _settle_buffers(self, step: _Step) -> None:
        if step.bad_buffers:
            step.scalars["bad_buffers"] = float(len(step.bad_buffers))
        if self._reflexes:
            if step.undo_flag is not None:
                self._shadow.put_back_on_device(step.undo_flag)
            elif step.rejected:
                self._shadow.put_back()
            elif step.bad_buffers:
                self._shadow.put_back(step.bad_buffers)
            if step.bad_buffers:
                step.scalars["buffers_restored"] = 1.0
        self._shadow.commit()

    def abandon(self) -> None:
        """Leave nothing temporary behind, whether the step ended well or raised."""
        if self._open is not None:
            self.multiplier.undo()
            self.release()
            if self._open.undo_flag is not None:
                self._gate.disarm()
            self._open = None

    def _hand_over(self, sample: Sample) -> None:
        if sample.step in self._decided_on_device and sample.phase == "train":
            self._decided_on_device.discard(sample.step)
            self.rejected += sample.scalars["rejected"] > 0
            kept = {k: v for k, v in sample.scalars.items() if v or k not in ("nonfinite_grads", "routine_overflow")}
            sample = replace(sample, scalars=kept)
        self.last_rejected = sample.scalars.get("rejected", 0.0) > 0
        self._deliver(self, sample)

    # -- outside the step ----------------------------------------------------------------------------------------

    def validated(self, scalars: Mapping[str, float | Tensor]) -> None:
        """Post what a validation gave; it is judged in its place between the steps."""
        layout = Layout(names=(), kinds=(), numel=(), columns=(), optimizer=self.label)
        last = self.attempts - 1
        self._mailbox.post(last, layout, np.zeros((0, 0), np.float32), dict(scalars), phase="val")
        for sample in self._mailbox.due(last):
            self._hand_over(sample)

    def drain(self) -> None:
        """Deliver everything still under way."""
        self.abandon()
        for sample in self._mailbox.drain():
            self._hand_over(sample)

    def state_dict(self) -> dict[str, Any]:
        """Plain data; what is still under way is delivered first by the guard."""
        return {
            "attempts": self.attempts,
            "rejected": self.rejected,
            "multiplier": self.multiplier.state_dict(),
            "suspicion": self._suspicion.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.attempts, self.rejected = int(state["attempts"]), int(state["rejected"])
        self.multiplier.load_state_dict(state["multiplier"])
        self._suspicion.load_state_dict(state["suspicion"])
