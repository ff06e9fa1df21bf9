"""Same-step protection: measure the gradients, clip them, and keep a bad update out of the weights, exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from trimtab.core.clipping import Agc, HeldLimit, NormLimit, norm_limit
from trimtab.core.config import Clip, Config
from trimtab.core.types import ABSENT, FULL_COLUMNS
from trimtab.guard.buffers import BufferShadow
from trimtab.sample.family import Family
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.meter import Meter
from trimtab.sample.measure.native import clips_as_torch, native
from trimtab.sample.measure.reference import GLOBALS, NUM_OTHERS, Limits, Outgoing
from trimtab.sample.probes.batch import HELD_BACK, look_on_device
from trimtab.sample.reduce import UNSEEN, Mine, Peers, Told
from trimtab.sample.rows import Rows
from trimtab.sample.thorough import FullLook, Scope, Suspicion
from trimtab.sample.transfer import Replays, Sent, number, to_host
from trimtab.sample.watch import Step
from trimtab.torchutil.undo import Memory, rng, tensor_values

NUM_GLOBALS = len(GLOBALS)
NEARLY = 1.0 - 1e-5
"""Of a limit: closer to it PyTorch's own norm decides, which may differ from another in its last digits."""
BUFFERS = "norm of buffers "
LARGEST = float(np.finfo(np.float32).max)
"""A norm of finite gradients that is beyond what a device can send."""
OFTEN = 0.5
"""Share of clipped steps above which `grad_scale` is the cheaper way to clip."""


class Judge:
    """Decides for one optimizer. `decide` fills in the step and arms or withholds; nothing else changes anything."""

    def __init__(self, optimizer: Any, config: Config, shadow: BufferShadow, peers: Peers | None = None) -> None:
        self.suspicion = Suspicion()
        self._peers = peers
        self._family = Family()
        self._alone = peers is None  # else the loss is shared with other processes before it is sent to the host
        self._optimizer, self._config, self._shadow = optimizer, config, shadow
        self._limits = limits_of(config)
        self._clips = config.mode != "observe" and bool(config.clip)
        self._follow: NormLimit | None = norm_limit(config.clip) if self._clips else None
        self._units = config.clip.adaptive if self._clips and isinstance(config.clip.adaptive, Agc) else None
        self._gate = DeviceGate(optimizer)
        # Whether everything that is asked for can be decided on the device, for an optimizer that it can stop.
        self._gate_may = not config.clip.per_group and config.clip.value is None
        self._meter: Meter | None = None
        self._scope: Scope | None = None
        self._metered: Rows | None = None
        self._clip_rate = 0.0
        self._look = False  # whether a step on a device looked wrong, which is known only now
        rejects = config.mode != "observe" and config.reject_above is not None
        self._reject_above = (config.reject_above or 0.0) * NEARLY if rejects else math.inf
        # Otherwise than by the norm of all gradients together.
        self._clips_otherwise = self._clips and (
            config.clip.per_group or config.clip.value is not None or self._units is not None
        )
        # Kept until the step is over: PyTorch makes a Python object of each gradient whenever there is none, which the
        # optimizer would otherwise pay for a second time.
        self._live: list[Tensor] = []

    def prepare(self, rows: Rows) -> None:
        """Find out, before the first step, what it would have to find out otherwise."""
        if rows.on_host:
            self._scope_of(rows)
            if self._clips:
                clips_as_torch()

    def decide(self, step: Step, rows: Rows) -> None:
        """Look at the gradients, and let the update through or not."""
        held = step.scalars.pop(HELD_BACK) if HELD_BACK in step.scalars else None
        # On an accelerator: looked at along with the gradients, where it is (`can_be_held`).
        batch = held if isinstance(held, Tensor) else None
        if rows.on_host or rows.shards is not None:
            self._on_host(step, rows)
            if batch is not None:
                _compute(step, batch)
        elif self._gate_may and supports_gate(self._optimizer):
            self._on_device(step, rows, batch)
        else:
            self._after_one_wait(step, rows, batch)

    def heard(self, scalars: Mapping[str, float]) -> None:
        """Learn from what the device reported `lag` steps ago: how often it clips, which norms it let through, and
        whether it looked wrong: then the next step gets a thorough look."""
        norm = math.nan if scalars.get("nonfinite_grads") else scalars["grad_norm"]
        self._look = self.suspicion.looks_wrong(norm, scalars.get("loss"))
        self.suspicion.note(norm)
        if (coef := scalars.get("clip_coef")) is not None:
            self._clip_rate += (float(coef < 1.0) - self._clip_rate) / 16
        if self._follow is not None and not scalars.get("rejected"):
            self._follow.push(scalars["grad_norm"])

    def disarm(self, step: Step) -> None:
        """Take back what was set for this one step, and remember its norm if it was let through."""
        if step.undo_flag is not None:
            self._gate.disarm()
            self._live = []
        elif self._follow is not None and not step.rejected and "grad_norm" in step.scalars:
            self._follow.push(number(step.scalars["grad_norm"]))

    def state_dict(self) -> dict[str, Any]:
        """What a clipping strategy remembers, as plain data; empty where limits are fixed."""
        return {} if self._follow is None else self._follow.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where `state_dict` was taken."""
        held = state.get("held")
        if isinstance(held, float):
            self.clip_to(held)
        elif self._follow is not None:
            self._follow.load_state_dict(state)

    def clip_to(self, norm: float) -> None:
        """From now on no gradient norm above this."""
        self._follow, self._clips = HeldLimit(norm), True

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self._clips

    @property
    def clip_in_force(self) -> Clip:
        """What is clipped now; false where nothing is."""
        return self._clip_now() if self._clips else Clip()

    # -- everything is on the CPU, or in parts with other processes ------------------------------------------------

    def _on_host(self, step: Step, rows: Rows) -> None:
        if getattr(self._optimizer, "grad_scale", None) is not None:
            self._unscale(rows)
        loss = step.loss if step.loss is None or step.loss.__class__ is float else number(step.loss)
        if self._peers is not None and self._peers.present():
            if rows.shards is not None:
                self._in_parts(step, rows, loss, self._peers)
                return
            told, _ = self._peers.share(told_of(step, loss), NOTHING, None)
            self._note(step, told)
            loss = told.loss()
        if native is not None and self._let_through(step, rows, loss):
            return
        live, plain, present = _gradients(rows, step)
        parts = measure.norms(plain)
        judged = judge(number(measure.total(parts)), plain, self._config)
        step.table = measure.scatter(parts.unsqueeze(1), present, len(rows.params))
        if present is None and live:
            step.table = to_host(step.table).astype(np.float32, copy=False)
            step.least_norm = float(step.table.min())
        bad = self._shadow.bad() if not self._shadow.is_empty and self._shadow.suspicious() else []
        self._look_and_settle(step, rows, judged, loss, bad, plain, present)
        self._clip(step, rows, judged, live, parts, present)

    def _in_parts(self, step: Step, rows: Rows, loss: float | None, peers: Peers) -> None:
        """Every process holds a part of each parameter: all measure their parts, and judge the whole alike."""
        live, plain, present = _gradients(rows, step)
        bad = self._shadow.bad() if not self._shadow.is_empty and self._shadow.suspicious() else []
        places = None if present is None else torch.tensor(present, dtype=torch.int64, device=rows.params[0].device)

        def squares(norms: Tensor) -> Tensor:
            return measure.scatter_to(norms.double().square(), places, len(rows.params))

        mine = told_of(step, loss, len(bad))
        told, whole = peers.share(mine, squares(measure.norms(plain)), rows.shards)
        self._note(step, told)
        # Behind the parameters that are here stands what other stages of a pipeline hold, if there are any.
        parts, elsewhere = np.split(to_host(whole.sqrt().float()), [len(rows.params)])
        norm = math.sqrt(to_host(whole).sum())
        wide = norm
        if not math.isfinite(norm):  # for all of them: all look again
            _, whole = peers.share(mine, squares(measure.wide_norms(plain)), rows.shards)
            wide = math.sqrt(to_host(whole).sum())
        # Where not every process has a guard nobody knows the whole, and nobody may act alone.
        judged = judged_by(norm, wide, replace(self._config, mode="observe") if peers.alone else self._config)
        step.table = parts.reshape(-1, 1).copy()
        if present is not None:
            missing = np.setdiff1d(np.arange(len(rows.params)), np.array(present, np.int64))
            step.table[missing] = ABSENT
        elif live:
            step.least_norm = float(step.table.min())
        self._look_and_settle(step, rows, judged, told.loss(), bad, plain, present, look=bool(told.bad_buffers.any()))
        if not peers.alone:
            here = parts if present is None else parts[present]
            norms = torch.from_numpy(np.concatenate([here, elsewhere]) if len(elsewhere) else here)
            self._clip(step, rows, judged, live, norms.to(rows.params[0].device), present)

    def _note(self, step: Step, told: Told) -> None:
        """Put into the sample what the processes told: what is wrong with a batch, and who is out of line."""
        note(step, told)
        if self._peers is not None and not self._peers.alone and not self._peers.stages:
            facts, notes = self._family.heard(step.number, told)
            step.scalars |= facts
            step.notes |= notes

    def _look_and_settle(
        self,
        step: Step,
        rows: Rows,
        judged: Judged,
        loss: float | None,
        bad: list[tuple[int, int]],
        plain: list[Tensor],
        present: list[int] | None,
        *,
        look: bool = False,
    ) -> None:
        size = math.nan if judged.nonfinite else judged.norm
        wrong = self.suspicion.looks_wrong(size, loss)
        self.suspicion.note(size)
        if wrong or bad or look or step.cadence:
            grads = measure.scatter(measure.full(plain), present, len(rows.params))
            step.look = FullLook(self._scope_of(rows), grads)
        self._settle(step, rows, judged, loss, bad)

    def _clip(
        self, step: Step, rows: Rows, judged: Judged, live: list[Tensor], parts: Tensor, present: list[int] | None
    ) -> None:
        if not self._clips or judged.reject:
            return
        clip_host(judged, self._clip_now(), live, parts, self._optimizer.param_groups, rows.members(present))
        step.scalars["clip_coef"] = judged.coef
        if self._units is not None and live:
            step.scalars["clip_coef"] = number(clip_units(rows.params, self._units, wide=judged.norm > HUGE))

    def _let_through(self, step: Step, rows: Rows, loss: float | None) -> bool:
        """The usual step, by the compiled readings: every gradient there, plain, finite and of a usual size.

        Of any other nothing is noted: False.
        """
        if step.cadence or self._clips_otherwise or (not self._shadow.is_empty and self._shadow.suspicious()):
            return False
        table = np.empty((len(rows.params), 1), np.float32)
        if self._clips:
            if not clips_as_torch():
                return False
            clip = self._clip_now()
            limit = math.inf if clip.norm is None else clip.norm
            # Bit for bit what `clip_grad_norm_` does. A norm that looks wrong is left as it is for the thorough way.
            ceiling = min(self._reject_above, self.suspicion.ceiling(loss))
            clipped = native.clip(rows.params, limit, clip.above or 0.0, ceiling, table)
            if clipped is None:
                return False
            norm, step.least_norm, step.scalars["clip_coef"] = clipped
        else:
            whole = native.grad_norms(rows.params, table)
            if whole is None or not whole[0] < self._reject_above or self.suspicion.looks_wrong(whole[0], loss):
                return False
            norm, step.least_norm = whole
        step.table = table
        self.suspicion.note(norm)
        step.scalars["grad_norm"], step.scalars["rejected"] = norm, 0.0
        if loss is not None:
            step.scalars["loss"] = loss
        return True

    # -- on an accelerator, with an optimizer that only the host can stop --------------------------------

    def _after_one_wait(self, step: Step, rows: Rows, batch: Tensor | None) -> None:
        self._unscale(rows)
        live, plain, present = _gradients(rows, step)
        outgoing, buffers = _outgoing(step, batch), self._shadow.norms()
        if outgoing is not None:
            for i, one in enumerate(buffers):
                outgoing.add(f"{BUFFERS}{i}", one)
            if len(outgoing.names) >= NUM_OTHERS or any(one.device != rows.params[0].device for one in buffers):
                outgoing = None
        measured = self._meter_of(rows).measure(
            plain,
            present,
            len(rows.params),
            self._limits_now(),
            vary=plain is not live,
            outgoing=outgoing,
            before=step.read_before,
        )
        if outgoing is not None and measured.sent is not None:
            step.lead = measured.sent if batch is not None else None
            values, found = measured.sent.split()  # the one wait
            step.products = None
            norm, nonfinite, reject, coef, _ = (found.pop(name) for name in GLOBALS)
            loss_value = found.pop("loss", None if step.loss is None else math.nan)
            if isinstance(step.loss, float):
                loss_value = step.loss
            sizes = [found.pop(f"{BUFFERS}{i}") for i in range(len(buffers))]
            sound = all(map(math.isfinite, sizes))
            for name in outgoing.taken:
                step.scalars.pop(name, None)
            step.scalars |= found
        else:
            loss = torch.as_tensor(
                math.nan if step.loss is None else step.loss, device=measured.flat.device, dtype=torch.float32
            )
            norms = [one.to(measured.flat.device).reshape(1).float() for one in buffers]
            values = to_host(torch.cat([measured.flat, loss.reshape(1).float(), *norms]))  # the one wait
            _compute(step, batch)
            table = measured.num_rows * measured.num_columns
            norm, nonfinite, reject, coef, _ = (float(v) for v in values[table : table + NUM_GLOBALS])
            loss_value = None if step.loss is None else float(values[table + NUM_GLOBALS])
            sound = all(map(math.isfinite, values[table + NUM_GLOBALS + 1 :]))
            values = values[:table]
        bad = [] if sound else self._shadow.bad()
        norm = norm if nonfinite else min(norm, LARGEST)
        judged = Judged(norm, bool(nonfinite), bool(reject))
        step.table = values.reshape(measured.num_rows, measured.num_columns)
        _name_rows(step, rows, measured)
        wrong = self.suspicion.looks_wrong(math.nan if nonfinite else norm, loss_value)
        self.suspicion.note(math.nan if nonfinite else norm)
        if step.cadence or bad or wrong:
            scope = self._scope_of(rows)
            here = scope.sends and measured.num_columns == len(FULL_COLUMNS)
            step.look = FullLook(
                scope, Sent(values, None, values.size, ()) if here else self._full_gradients(measured, plain, present)
            )
        self._settle(step, rows, judged, loss_value, bad)
        if self._clips and not judged.reject:
            if self._config.clip.per_group or self._config.clip.value is not None:
                parts, members = measured.table[:, 0].clamp(min=0.0), rows.members(None)  # a missing one weighs nothing
                everyone = [p.grad if p.grad is not None else torch.zeros_like(p) for p in rows.params]
                clip_host(judged, self._config.clip, everyone, parts, self._optimizer.param_groups, members)
                coef = judged.coef
            elif coef < 1.0:
                scale_by([measure.stored(g) for g in live], measured.scalar("clip_coef"), coef)
            step.scalars["clip_coef"] = coef
            if self._units is not None and live:
                step.scalars["clip_coef"] = clip_units(rows.params, self._units)

    # -- on an accelerator, with an optimizer that the device can stop ---------------------------------------------

    def _on_device(self, step: Step, rows: Rows, batch: Tensor | None) -> None:
        scale = getattr(self._optimizer, "grad_scale", None)
        live, plain, present = _gradients(rows, step)
        self._live = live
        meter = self._meter if self._metered is rows and self._meter is not None else self._meter_of(rows)
        limits = self._limits if self._follow is None else self._limits_now()
        step.captured = len(live) > 0 and live[0].is_cuda and torch.cuda.is_current_stream_capturing()
        look, self._look = (step.cadence or self._look) and not step.captured, False
        if not self._shadow.is_empty and not step.captured:
            step.scalars |= {f"{BUFFERS}{i}": one for i, one in enumerate(self._shadow.norms())}
        outgoing = None
        if self._alone and self._units is None and (not look or self._scope_of(rows).sends):
            outgoing = _outgoing(step, batch)
        # Two ways to the same gradients. `grad_scale` costs a write of every gradient, clipped or not; scaling them
        # here costs a read and a write, but nothing at all in a step that needs no clipping.
        clips = limits.max_norm is not None and self._units is None
        measured = meter.measure(
            plain,
            present,
            len(rows.params),
            limits,
            scale,
            vary=plain is not live,
            outgoing=outgoing,
            in_place=clips and self._clip_rate < OFTEN and plain is live,
            capturing=step.captured,
            before=step.read_before,
        )
        reject = measured.scalar("rejected")
        if self._units is not None and live:
            measured.scalar("clip_coef").copy_(clip_units(rows.params, self._units, scale=scale))
        self._gate.arm(reject, measured.scalar("inverse_coef") if clips and not measured.scaled else None, scale)
        step.undo_flag = reject
        if "scale" in step.scalars and not self._shadow.is_empty:
            # An overflow that the scaler provoked is not undone in the buffers: without the guard it would not be.
            told = 0.0 if step.loss is None else step.loss
            sound = torch.isfinite(told) if isinstance(told, Tensor) else float(math.isfinite(told))
            step.undo_flag = reject * (1.0 - measured.scalar("nonfinite_grads") * sound)
        _name_rows(step, rows, measured)
        if outgoing is not None and measured.sent is not None:
            step.table = measured.sent
            step.lead = measured.sent if batch is not None else None
            for name in outgoing.taken:
                step.scalars.pop(name, None)
            if "loss" in outgoing.taken:
                step.loss = None  # it is on its way
            step.products = None
            if look:
                step.look = FullLook(self._scope_of(rows), measured.sent)
            return
        if step.captured:
            return  # its replays leave their values on the device
        step.table, step.device_names = measured.flat, GLOBALS
        _compute(step, batch)
        if look:
            step.look = FullLook(self._scope_of(rows), self._full_gradients(measured, plain, present))

    @property
    def replays(self) -> Replays | None:
        """Where the replays of captured steps leave their values; None while none was captured."""
        return None if self._meter is None else self._meter.replays

    # -- what they share -----------------------------------------------------------------------------------------

    def _limits_now(self) -> measure.Limits:
        # A plain number, from norms that the host knows: it goes to the device with the launch. A CUDA graph keeps the
        # one it was captured with.
        return self._limits if self._follow is None else replace(self._limits, max_norm=self._follow.limit())

    def _clip_now(self) -> Clip:
        return self._config.clip if self._follow is None else Clip(norm=self._follow.limit())

    def _settle(self, step: Step, rows: Rows, judged: Judged, loss: float | None, bad: list[tuple[int, int]]) -> None:
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


NOTHING = torch.zeros(0, dtype=torch.float64, device="cpu")


def told_of(step: Step, loss: float | None, num_bad_buffers: int = 0) -> Mine:
    """What the other processes are told of this one's step."""
    return Mine(
        loss,
        number(step.scalars.get("in_bad", UNSEEN if step.unseen else 0.0)),
        num_bad_buffers,
        step.bad_sample,
        step.batch_print,
        step.checksum,
        step.late_s,
        step.spent_s,
    )


def note(step: Step, told: Told) -> None:
    """Put into the sample what is wrong with the batch of any process, and whose it is."""
    step.shared = True
    if ranks := told.ranks_of_loss():
        step.notes["loss_ranks"] = ranks
    if ranks := told.ranks_of_input():
        step.notes["in_bad_ranks"] = ranks
        if samples := told.samples_of_input():
            step.notes["in_bad_samples"] = samples
        step.scalars["in_bad"] = float(told.bad_inputs[told.bad_inputs > 0].sum())
    if ranks := told.ranks_unseen():
        step.notes["unseen_ranks"] = ranks


def _outgoing(step: Step, batch: Tensor | None) -> Outgoing | None:
    """What is on the device already and can be sent along with the gradients' table; None where it is too much."""
    vectors = None
    if step.products is not None:
        if not step.products.dense:
            return None
        # What one captured step left in a gradient says nothing of its replays.
        vectors = None if step.captured else step.products.vectors
    looks = None if step.pending is None else step.pending.looks
    glance = None if looks is None or batch is None else looks.glance
    outgoing = Outgoing(batch, vectors) if glance is None else Outgoing(batch, vectors, (glance.num, glance.second))
    if isinstance(step.loss, Tensor) and step.loss.is_cuda:
        outgoing.add("loss", step.loss)
    for name, value in step.scalars.items():
        if value.__class__ is not float and isinstance(value, Tensor) and value.is_cuda:
            outgoing.add(name, value)
    return outgoing if len(outgoing.names) < NUM_OTHERS else None


def _compute(step: Step, batch: Tensor | None) -> None:
    """What was held back to be sent by the kernels, computed by torch instead."""
    if batch is not None and batch.is_floating_point():
        step.scalars |= look_on_device(batch)
    if step.products is not None:
        step.scalars["dots"] = step.products.computed()
        step.products = None


def told_by_device(told: dict[str, float], *, clips: bool) -> None:
    """Turn what a device decided into the words the host would have used for it."""
    told.pop("inverse_coef", None)
    if not told.get("nonfinite_grads"):
        told["grad_norm"] = min(told["grad_norm"], LARGEST)
    if not clips:
        told.pop("clip_coef", None)
    if not told.pop("nonfinite_grads", 0.0):
        return
    told["nonfinite_grads"] = 1.0
    if "scale" in told and math.isfinite(told.get("loss", 0.0)):
        told |= {"routine_overflow": 1.0, "rejected": 0.0}


def told_by_buffers(told: dict[str, float], *, restored: bool) -> None:
    """Say that buffers went bad where the norm of one is not finite; `restored`: the device has put them back."""
    norms = [told.pop(name) for name in list(told) if name.startswith(BUFFERS)]
    if bad := sum(not math.isfinite(norm) for norm in norms):
        told["bad_buffers"] = float(bad)
        if restored:
            told["buffers_restored"] = 1.0


def _gradients(rows: Rows, step: Step) -> tuple[list[Tensor], list[Tensor], list[int] | None]:
    """The gradients there are, the same ready to be measured, and which rows they belong to (None: all)."""
    live = [g for p in rows.params if (g := p.grad) is not None]
    if len(live) == len(rows.params):
        return live, rows.plain(live), None
    grads = rows.gradients()
    present = None if len(live) == len(grads) else [i for i, g in enumerate(grads) if g is not None]
    if present is not None:  # which of the missing ones are not wanted
        step.frozen = tuple(i for i, g in enumerate(grads) if g is None and not rows.params[i].requires_grad)
    return live, rows.plain(live), present


def _name_rows(step: Step, rows: Rows, measured: measure.Measured) -> None:
    """The layout of what was really measured: with no gradient at all not even the kernels run."""
    if measured.num_columns == len(FULL_COLUMNS):
        step.layout = rows.full_layout


SAFE_EPS = 1e-6
"""Added to the norm before dividing, as `clip_grad_norm_` does: results must agree with it."""


@dataclass(slots=True)
class Judged:
    """What the reflex knows about one step, on the host."""

    norm: float
    nonfinite: bool
    reject: bool
    coef: float = 1.0


def judge(norm: float, plain: Sequence[Tensor], config: Config) -> Judged:
    """Look at the global norm; where it is not finite look again before calling the gradients bad."""
    # The square of a huge finite value overflows: only a wide accumulation proves a NaN or Inf.
    wide = norm if math.isfinite(norm) else number(measure.total(measure.wide_norms(plain)))
    return judged_by(norm, wide, config)


def judged_by(norm: float, wide: float, config: Config) -> Judged:
    """The same by a norm that may have overflowed, and by one that cannot."""
    nonfinite = not math.isfinite(wide)
    norm = norm if nonfinite else wide
    if config.mode == "observe":
        return Judged(norm, nonfinite, reject=False)
    too_large = config.reject_above is not None and norm > config.reject_above
    return Judged(norm, nonfinite, reject=(nonfinite and config.reject_nonfinite) or too_large)


def clip_host(
    judged: Judged,
    clip: Clip,
    grads: Sequence[Tensor],
    parts: Tensor,
    groups: Sequence[Mapping[str, Any]],
    rows: Sequence[Sequence[int]],
) -> None:
    """Clip in place by host-known norms. `rows[g]` lists which of `grads` belong to parameter group g."""
    if clip.norm is not None and clip.per_group:
        for group, members in zip(groups, rows, strict=True):
            if members:
                mine = [grads[i] for i in members]
                limit = float(group.get("max_norm", clip.norm))
                coef = _scale(mine, measure.total(parts[list(members)]), limit, clip.above)
                judged.coef = min(judged.coef, coef)
    elif clip.norm is not None:
        judged.coef = _scale(grads, measure.total(parts), clip.norm, clip.above)
    if clip.value is not None:
        values = [measure.stored(g) for g in grads]
        torch._foreach_clamp_min_(values, -clip.value)
        torch._foreach_clamp_max_(values, clip.value)


def _scale(grads: Sequence[Tensor], norm: Tensor, max_norm: float, above: float | None = None) -> float:
    """Multiply by max_norm/norm where that is below 1: the very operations of `clip_grad_norm_`, for the same bits."""
    if not math.isfinite(number(norm)):  # finite values whose squares overflow: judge() has looked
        norm = measure.total(measure.wide_norms([measure.plain(g) for g in grads]))
    factor = max_norm / (norm + SAFE_EPS)
    coef = number(factor)
    if not coef < 1.0 or (above is not None and number(norm) <= above):
        return 1.0
    scale_by([measure.stored(g) for g in grads], factor, coef)
    return coef


def scale_by(values: list[Tensor], factor: Tensor, coef: float) -> None:
    """Multiply stored values in place by a factor whose value the host knows to be `coef`."""
    if coef < 1e-30:
        # A factor that small is a denormal float32 and would lose its digits: go there in two strides.
        torch._foreach_mul_(values, 1e-20)
        torch._foreach_mul_(values, coef / 1e-20)
    else:
        wide = any(v.dtype is torch.float64 for v in values)
        torch._foreach_mul_(values, factor if wide else factor.to(torch.float32))


def supports_gate(optimizer: Optimizer) -> bool:
    """Whether this instance skips a step on a device flag (fused Adam, AdamW, SGD): PyTorch's undocumented protocol."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not getattr(type(optimizer).step, "__module__", "").startswith("torch.optim"):
        return False  # what a class from elsewhere makes of the flag is not known
    # A fused momentum SGD that is told to skip its very first step keeps an uninitialised buffer: that one step goes
    # the other way, by the host.
    return bool(optimizer.state) or not any(g.get("momentum") for g in optimizer.param_groups)


def limits_of(config: Config) -> Limits:
    """What the device may decide by itself under a configuration."""
    if config.mode == "observe":
        return Limits(reject_nonfinite=False)
    return Limits(
        max_norm=config.clip.norm,
        clip_above=config.clip.above,
        reject_above=config.reject_above,
        reject_nonfinite=config.reject_nonfinite,
    )


class DeviceGate:
    """Hands reject flag and clip coefficient to a fused optimizer as device scalars, without asking the host."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._before: dict[str, Tensor | None] = {}
        self._armed: tuple[str, ...] = ()

    def arm(self, reject: Tensor, inverse_coef: Tensor | None, scale: Tensor | None) -> None:
        """Set the gate for this step.

        `scale` is what a GradScaler multiplied the gradients with and has not divided out yet. `grad_scale` makes the
        fused kernel rewrite every gradient, so it is set only when clipping was asked for.
        """
        optimizer = self._optimizer
        if inverse_coef is None and not hasattr(optimizer, "found_inf"):  # the usual case
            optimizer.found_inf, self._armed = reject, ("found_inf",)
            self._before = {}
            return
        names = ("found_inf",) if inverse_coef is None else ("found_inf", "grad_scale")
        self._before = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
        found = self._before.get("found_inf")
        optimizer.found_inf = reject if found is None else torch.maximum(found.to(reject.device), reject)
        if inverse_coef is not None:
            optimizer.grad_scale = inverse_coef if scale is None else inverse_coef * scale.to(inverse_coef.device)
        self._armed = names

    def disarm(self) -> None:
        """Leave the attributes as they were: a GradScaler deletes its own."""
        for name in self._armed:
            if name in self._before:
                setattr(self._optimizer, name, self._before[name])
            elif hasattr(self._optimizer, name):
                delattr(self._optimizer, name)
        self._armed = ()


class Withheld:
    """Hides the gradients for one step.

    torch.optim's own classes skip a parameter without a gradient, state and all. What other classes do is unknown
    (some count steps in their groups, some read `p.grad` without asking): they get zero gradients, and everything
    they own is copied and put back. That costs a copy of the weights, but only in a step that is thrown away anyway.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._params = list(params)
        self._grads = [p.grad for p in self._params]
        kind = type(optimizer)
        # LBFGS counts its evaluations even when it finds nothing to do.
        known = kind.__module__.startswith("torch.optim") and "LBFGS" not in kind.__name__
        self._owned = None if known else Owned(optimizer, self._params)
        self._undo_rng = None if known else rng()  # it may round at random
        self._groups = [_scalars(g) for g in optimizer.param_groups]
        for p, grad in zip(self._params, self._grads, strict=True):
            p.grad = None if known or grad is None else torch.zeros_like(grad)

    def put_back(self) -> None:
        """Give the gradients back and undo whatever the step changed in spite of having none."""
        for p, grad in zip(self._params, self._grads, strict=True):
            p.grad = grad
        if self._owned is not None:
            self._owned.restore()
        if self._undo_rng is not None:
            self._undo_rng()
        for group, scalars in zip(self._optimizer.param_groups, self._groups, strict=False):
            for key, value in scalars.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)  # in place: a scheduler or the user may hold this very tensor
                else:
                    group[key] = value


class Owned:
    """A copy of everything an optimizer of an unknown class may have changed."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._undo_weights = tensor_values(params)
        # In groups, states and attributes, in place: buffers and views of them stay what they are.
        self._rest = Memory(optimizer, without=tuple(params))

    def restore(self) -> None:
        """Put it all back."""
        self._undo_weights()
        self._rest.undo()


def _scalars(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params" and _is_scalar(v)}


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple | Tensor)


HUGE = 1e15
"""Above this norm the squares of float32 values come near overflow: float64 is used, at its price."""


def clip_units(
    params: Sequence[Tensor], settings: Agc, *, scale: Tensor | None = None, wide: bool | None = None
) -> Tensor:
    """Limit the gradient norm of every unit to `ratio * max(weight norm, eps)`, in place, without asking the host.

    There must be a gradient. Returns, on the device, what became of the whole norm: clipped over unclipped. `scale`
    is what a GradScaler multiplied the gradients with. Of a sharded parameter this rank's part is seen: rows are whole
    where it is sharded by rows. A unit that is not finite is left as it is.
    """
    places: dict[torch.device, list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            places.setdefault(p.device, []).append(p)
    squares = [_on_one_device(mine, settings, scale, wide) for mine in places.values()]
    before, after = torch.stack([s.to(squares[0].device, non_blocking=True) for s in squares]).sum(0).unbind()
    return torch.where(torch.isfinite(before) & (before > 0), (after / before).sqrt(), 1.0).float()


def _on_one_device(params: list[Tensor], settings: Agc, scale: Tensor | None, wide: bool | None) -> Tensor:
    """The squares of the norm before and after clipping these parameters."""
    device = params[0].device
    exact = device.type not in ("cpu", "mps") if wide is None else wide and device.type != "mps"
    units = [_Units(p, torch.float64 if exact else None) for p in params]
    norms = torch.cat([u.norms.reshape(-1) for u in units])
    limit = torch.cat([u.weights.reshape(-1) for u in units]).clamp(min=settings.eps) * settings.ratio
    if scale is not None:
        limit = limit * scale.to(device, non_blocking=True)
    over = (norms > limit) & torch.isfinite(norms)
    coef = torch.where(over, limit / norms, 1.0)
    pieces = torch.split(coef, [u.norms.numel() for u in units])
    torch._foreach_mul_([u.values for u in units], [u.spread(c) for u, c in zip(units, pieces, strict=True)])
    sound = torch.where(torch.isfinite(norms), norms, 0.0)
    return torch.stack([sound.square().sum(), (sound * coef).square().sum()])


class _Units:
    """One parameter's units: the norm of each one's gradient and weights, and the stored values they scale."""

    def __init__(self, param: Tensor, dtype: torch.dtype | None) -> None:
        grad = param.grad
        assert grad is not None
        self._rows: Tensor | None = None
        weight, values = measure.plain(param), measure.plain(grad)
        by_row = param.dim() > 1
        if grad.layout is torch.sparse_coo:
            # Duplicate rows add up when they are applied: the norm is that of the sum, the scale goes to every part.
            by_row = by_row and grad.sparse_dim() == 1
            if by_row:
                self._seen = grad.coalesce().indices()[0]
                self._rows, self._num_rows = grad._indices()[0], param.shape[0]
                weight = weight.index_select(0, self._seen)
        elif grad.layout is not torch.strided:
            by_row = False
        self.norms = _norms(values, by_row, dtype)
        self.weights = _norms(weight, by_row, dtype)
        self.values = values if grad.layout is torch.strided else measure.stored(grad)

    def spread(self, coef: Tensor) -> Tensor:
        """The factor of each unit, in a shape that multiplies the stored values.

        Its type stays: a float32 factor of bfloat16 values, or a float64 one of values near overflow, keeps its digits.
        """
        if self._rows is not None:
            whole = torch.ones(self._num_rows, dtype=coef.dtype, device=coef.device)
            coef = whole.index_copy_(0, self._seen, coef).index_select(0, self._rows)
        # Never fewer dimensions than the values: a number beside a tensor would take on the tensor's type.
        return coef.reshape(-1, *[1] * (self.values.dim() - 1)) if self.values.dim() else coef.reshape(())


def _norms(values: Tensor, by_row: bool, dtype: torch.dtype | None) -> Tensor:
    if dtype is None and values.dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    dims = tuple(range(1, values.dim())) if by_row else None
    norms: Tensor = torch.linalg.vector_norm(values, 2.0, dim=dims, dtype=dtype)
    return norms
