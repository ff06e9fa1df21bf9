"""One optimizer's way through a step: measure, judge, clip or reject, step, clean up, post the sample."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.config import Clip, Config
from trimtab.core.contain import Contained
from trimtab.core.screen import Screen
from trimtab.core.types import Column, Decision, Kind, Layout, Sample, Verdict
from trimtab.guard.batches import Batches
from trimtab.guard.buffers import BufferShadow
from trimtab.guard.protect import Judge, Withheld, told_by_buffers, told_by_device
from trimtab.guard.provenance import Provenance
from trimtab.guard.ranks import Together, share_loss
from trimtab.guard.resources import EVERY, Resources
from trimtab.guard.rollback import Branches, Rollback
from trimtab.guard.trials import Trials
from trimtab.remedies.cut_lr import LrMultiplier
from trimtab.sample.measure.reference import DOTS
from trimtab.sample.observed import Observed, before_their_clipping
from trimtab.sample.probes.forward import ForwardTap
from trimtab.sample.probes.output import SPREAD, spread_of
from trimtab.sample.probes.sentinel import resolved
from trimtab.sample.reduce import Peers
from trimtab.sample.replicas import Replicas
from trimtab.sample.rows import Rows
from trimtab.sample.thorough import FullLook
from trimtab.sample.transfer import DelayedSamples, Replays
from trimtab.sample.watch import Step, Watch
from trimtab.torchutil.optimizers import scale_of

log = logging.getLogger("trimtab")
COME_BY = "call guard.observe() more often, so that they are fetched from the device in time"
WAIT_S = 0.1
"""Seconds after which a sample waits no longer for the next one."""
STATE_EVERY = 1_000
"""Steps between two states of the brain on record: a replay can begin there."""


UNLESS_ZERO = ("in_bad", "carried", "batch_softmax")
"""What the host says only where there is something: not worth a line in the record, nor a question to a rule."""


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
        watch: Watch,
        contained: Contained,
        deliver: Callable[[Lane, Sample], Verdict | None],
        act: Callable[[Lane, Decision], None],
        absorb: Callable[[Lane, list[Sample]], None],
        passed: Callable[[Sample, int], None],
        screen: Screen | None = None,
        scaler: Any = None,
        rollback: Rollback | None = None,
        batches: Batches | None = None,
        peers: Peers | None = None,
        together: Together | None = None,
        provenance: Provenance | None = None,
        trials: Trials | None = None,
        replicas: Replicas | None = None,
        resources: Resources | None = None,
    ) -> None:
        self.optimizer, self.label = optimizer, label
        self._resources = resources
        self.attempts = self.rejected = 0
        self.applied = self.kept_out = 0  # updates that reached the weights and those that did not, of those judged
        self.last_rejected = self.stop_requested = False
        self.last_step = self.rewound_at = -1
        # In mode act: states to go back to, samples to put aside, and other processes, which must do the same.
        self.rollback, self.batches, self.together = rollback, batches, together
        self._provenance, self.trials = provenance, trials
        self._peers, self._replicas = peers, replicas
        self._ended_s = self._began_s = 0.0  # the last step, and the forward pass after it
        self._memory = None if rollback is None else rollback.memory
        self.stale = False  # gradients, if there are any, are those of weights that are no longer there
        self._branches = Branches()
        self._went_back = False
        self.scaler = scaler  # its scale is read, and a remedy may have to lower it
        self.multiplier = LrMultiplier(optimizer, config.policy)
        self._config, self._build_rows, self._observed = config, rows, observed
        self._shadow, self._tap, self._deliver, self._act = shadow, tap, deliver, act
        self._absorb, self._passed, self._contained = absorb, passed, contained
        self.watch, self._delayed = watch, DelayedSamples(lag)
        self._judge = Judge(optimizer, config, shadow, peers)
        # Steps captured in CUDA graphs: where their replays leave their values, and what else is known of them.
        self._replayed: dict[Replays, tuple[Layout, dict[str, float | Tensor], tuple[int, ...]]] = {}
        self._rows, self._round = rows(), -1
        self._open: Step | None = None
        self._decided_on_device: set[int] = set()
        self._reflexes = config.mode != "observe"
        # Steps that are certain to be found healthy may wait to be absorbed, where nothing is done by a verdict.
        self._screen = screen if config.mode in ("observe", "advise") else None
        self._at_once = self._screen is not None and lag == 0
        self._waits_since_s = 0.0
        self._norm_before: float | Tensor | None = None  # of gradients that the loop itself clipped
        self._sure = False
        self._num_told = 0  # losses, before the closure that runs now
        self._waiting: list[Sample] = []  # on record, but not yet absorbed by the brain

    def prepare(self) -> None:
        """Find out, before the first step, what it would have to find out otherwise."""
        self.watch.prepare(self._rows)
        self._judge.prepare(self._rows)

    # -- called by the seam --------------------------------------------------------------------------------------

    def told(self, loss: object) -> None:
        """A closure returned this; it counts if it is a loss and the loop told none inside the closure."""
        is_loss = isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1)
        if is_loss and self._observed.num_losses == self._num_told:
            self._observed.told(loss, None, {}, strict=False, returned=True)

    def closure_begins(self) -> None:
        """What is told from now on is told inside the closure."""
        self._num_told = self._observed.num_losses

    def before(self) -> None:
        """Gradients are ready: measure them, decide, and let the update through or not."""
        if self._open is not None:
            self.abandon()  # a step that raised had no after()
        if self.attempts == 0 and self._memory is not None:
            self._memory.begin(self.label)
        step = self._begin()
        if self._peers is None:
            self.watch.before(step, self._rows, step.scalars.get("scale"))
        else:
            self._look_for_others(step)
        self._judge.decide(step, self._rows)
        if self._provenance is not None and (step.look is not None or step.rejected):
            self._provenance.look(step)
        if self.stale and step.withheld is None:
            step.withheld, step.rejected = Withheld(self.optimizer, self._rows.params), True
        self.stale = False
        if step.rejected:
            self._count_rejected(step)
        elif step.multiplied:
            self.multiplier.apply()

    def _look_for_others(self, step: Step) -> None:
        """Others wait for this process: whatever fails in looking at its own step, it tells them what it knows."""
        try:
            self.watch.before(step, self._rows, step.scalars.get("scale"))
            self._describe(step)
        except Exception as error:
            step.unseen = True
            self._contained.report("looking at a step that other processes wait for", error)

    def _describe(self, step: Step) -> None:
        """What other processes want to know of this one's step, where it is known without waiting for a device."""
        bad, mark = step.scalars.get("in_bad"), self._tap.batch.print_of_all
        if isinstance(bad, float) and bad and self._provenance is not None:
            step.bad_sample = self._provenance.bad_sample()
        if 0.0 < self._ended_s < self._began_s:
            step.late_s = self._began_s - self._ended_s
            step.spent_s = time.perf_counter() - self._ended_s
        if self._replicas is not None:
            if isinstance(mark, float) and self._replicas.data_parallel:
                step.batch_print = mark
            if step.cadence and (checksum := self._replicas.checksum()) is not None:
                step.checksum = checksum

    def after(self) -> None:
        """The step is over: undo what was temporary, finish the sample, deliver what is due."""
        step = self._open
        if step is None:
            return
        self._end(step)
        if self._resources is not None:
            self._resources.step_ended()

    def _end(self, step: Step) -> None:
        if self._peers is not None:
            self._ended_s = time.perf_counter()
        if step.withheld is not None:
            self.release()
        if not self._shadow.is_empty:
            self._settle_buffers(step)
        if step.captured:
            self._captured(step)
            return
        if self._peers is None:
            self.watch.after(step, self._rows)
        else:  # others wait for what comes after it
            self._contained.call("looking at a step that is over", self.watch.after, step, self._rows)
        if step.look is not None:
            self._add_look(step, step.look)
        if step.undo_flag is not None:
            self._decided_on_device.add(step.number)
            if step.loss is not None:
                step.scalars["loss"] = step.loss
        if step.multiplied or step.withheld is not None:
            self.abandon()
        else:  # the usual step: there is nothing to give back
            self._judge.disarm(step)
            self._open = None
        if self._peers is not None:
            share_loss(step, self._peers, self._rows.params[0].device)
        if self.batches is not None:
            self.batches.step_done(step.number)
        if self._provenance is not None:
            self._provenance.step_done(step.number)
        if self.trials is not None:
            self.trials.step_done(step.number)
        self._tap.step_done()
        if self._at_once and step.least_norm is not None and self._is_calm(step):
            table: Any = step.table
            table.setflags(write=False)
            told: Any = step.scalars
            self.last_rejected, self.last_step = False, step.number
            self.applied += 1
            self._let_wait(Sample(step=step.number, layout=step.layout, table=table, scalars=told, notes=step.notes))
            return
        self._delayed.post(
            step.number,
            step.layout,
            step.table,
            step.scalars,
            device_names=step.device_names,
            notes=step.notes,
            frozen=step.frozen,
            later=step.pending,
            arrival=None if step.pending is None else step.pending.arrival,
        )
        if step.multiplied:
            self.multiplier.recover()
        if self._memory is None:
            self._judge_due(step.number)
            return
        branch = self._branches.now
        self._judge_due(step.number)
        if self.together is not None:
            self.together.settle(self)
        if self._branches.now == branch:
            self._memory.after(self.label, step)

    def _captured(self, step: Step) -> None:
        """Nothing was done yet. Its replays are the steps; they run no Python, but leave their values on the device."""
        self.abandon()
        self.attempts -= 1
        if (replays := self._judge.replays) is not None:
            rates: dict[str, float | Tensor] = {
                k: v for k, v in step.scalars.items() if k.startswith("lr") and isinstance(v, float)
            }
            self._replayed[replays] = step.layout, rates, step.frozen

    def hear_replays(self, *, wait: bool = False) -> None:
        """Count and post the steps that were replayed since; `wait` until the last one is over."""
        for replays, (layout, rates, frozen) in self._replayed.items():
            for missed, table, found in replays.take(wait=wait):
                self.attempts += missed
                if missed:
                    log.warning("%d steps replayed in a CUDA graph are not on record: %s", missed, COME_BY)
                self._decided_on_device.add(self.attempts)
                self._delayed.post(self.attempts, layout, table, {**rates, **found}, frozen=frozen)
                self.attempts += 1

    def _is_calm(self, step: Step) -> bool:
        """Whether a step that is due at once is certain to be found healthy, and need not be judged."""
        if step.look is not None or step.rejected or step.multiplied or step.notes or step.frozen:
            return False
        scalars: Any = step.scalars
        if "scaler_skipped" in scalars:
            return False
        if "norm_before" in scalars:
            if scalars["norm_before"].__class__ is not float:
                return False
            scalars = step.scalars = before_their_clipping(scalars)
        return self._passes(step.number, scalars, step.table, step.least_norm or 0.0)

    def _passes(self, number: int, scalars: Mapping[str, Any], norms: Any, least: float) -> bool:
        screen = self._screen
        if screen is None or (number + 1) % STATE_EVERY == 0:
            return False  # what the brain knows then goes on record right behind the step
        if self._waiting and (not screen.left or time.monotonic() - self._waits_since_s >= WAIT_S):
            self._absorb_waiting()
        passes = screen.passes(number, scalars, norms, least)
        if not passes and not screen.left and self._waiting:
            self._absorb_waiting()
            passes = screen.passes(number, scalars, norms, least)
        return passes

    def _let_wait(self, sample: Sample) -> None:
        """It goes on record at once, whatever ends the process next; the brain absorbs it later, with others."""
        if self._went_back:
            sample = self._branches.marked(sample)
        if not self._waiting:
            self._waits_since_s = time.monotonic()
        self._waiting.append(sample)
        self._passed(sample, self.attempts - 1)

    def _absorb_waiting(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._absorb(self, waiting)

    def judge(self, step: int) -> None:
        """Hand over every sample that is due after this step, and leave none waiting."""
        self._judge_due(step)
        self._absorb_waiting()

    def _judge_due(self, step: int) -> None:
        if self._replayed:
            self.hear_replays()
            step = max(step, self.attempts - 1)
        for sample in self._delayed.due(step):
            self._hand_over(sample)

    def judge_replayed(self) -> None:
        """The same where steps of this optimizer were captured in a CUDA graph: no hook tells of their replays."""
        if self._replayed:
            self.judge(self.attempts - 1)

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
            self._count_rejected(self._open)

    # -- the parts of a step -------------------------------------------------------------------------------------

    def _begin(self) -> Step:
        if self._replayed:
            self.hear_replays(wait=True)  # they came before this one
        every = self._config.full_every
        cadence = every > 0 and self.attempts % every == 0
        if not self._rows.fits(self.optimizer) or (cadence and not self._rows.same(self.optimizer)):
            self._rows = self._build_rows()
        if cadence:
            self._shadow.refresh()
            self._tap.refresh()
        if not self._shadow.is_empty:
            self._shadow.capture()
        self._round, loss, told = self._observed.take(self._round)
        step = self._open = Step(self.attempts, cadence, self._rows.norm_layout, loss, dict(told))
        if self._resources is not None and self.attempts % EVERY == 0:
            self._resources.add_to(step.scalars, self.label)
        self.attempts += 1
        for g, group in enumerate(self.optimizer.param_groups):
            if "lr" in group:
                lr = group["lr"]
                if lr.__class__ is not float:
                    lr = lr.clone() if isinstance(lr, Tensor) else float(lr)  # schedulers write into a tensor
                step.scalars[f"lr/{g}" if g else "lr/0"] = lr
        if self._norm_before is not None:
            step.scalars["norm_before"] = self._norm_before
            self._norm_before, self._sure = None, False
        step.multiplied = self.multiplier.active
        if step.multiplied and (multiplier := self.multiplier.now) != 1.0:
            step.scalars["lr_multiplier"] = multiplier
        if self.scaler is not None and (scale := scale_of(self.scaler)) is not None:
            step.scalars["scale"] = scale
        return step

    @property
    def under_way(self) -> bool:
        """Whether a step has begun and is not over: closures call the model inside of it."""
        return self._open is not None

    def _count_rejected(self, step: Step) -> None:
        step.rejected = True
        step.scalars["rejected"] = 1.0
        self.rejected += 1

    def _settle_buffers(self, step: Step) -> None:
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
        if step.captured:
            self._shadow.commit_in_graph()
        else:
            self._shadow.commit()

    def _add_look(self, step: Step, look: FullLook) -> None:
        """Use the full scan instead of the step's own table; the device's decisions stay behind it."""
        measured = step.table
        step.layout, step.table, more = look.finish()
        step.scalars |= more
        if step.device_names and isinstance(measured, Tensor) and isinstance(step.table, Tensor):
            table = step.table.reshape(-1)
            step.table = torch.cat([table, measured[-len(step.device_names) :].to(table.device, non_blocking=True)])

    def abandon(self) -> None:
        """Leave nothing temporary behind, whether the step ended well or raised."""
        step = self._open
        if step is not None:
            if step.multiplied:
                self.multiplier.undo()
            if step.withheld is not None:
                self.release()
            self._judge.disarm(step)
            self._open = None

    def _hand_over(self, sample: Sample) -> None:
        if not self._rows.on_host:
            told: Any = sample.scalars  # made for this sample, and not seen by anybody yet: changed where it is
            if DOTS[0] in told:
                resolved(told)
            if SPREAD in told:
                spread_of(told)
            for name in UNLESS_ZERO:
                if told.get(name) == 0.0:
                    del told[name]
            if sample.phase == "train" and sample.step in self._decided_on_device:
                self._decided_on_device.discard(sample.step)
                told_by_device(told, clips=self._judge.clips)
                if not self._shadow.is_empty:
                    told_by_buffers(told, restored=self._reflexes)
                self._judge.heard(told)
                self.rejected += told["rejected"] > 0
        if "norm_before" in sample.scalars:
            sample = replace(sample, scalars=before_their_clipping(dict(sample.scalars)))
        self.last_rejected = sample.scalars.get("rejected", 0.0) > 0
        skipped = "scaler_skipped" in sample.scalars or "routine_overflow" in sample.scalars
        if sample.phase == "train":
            self.kept_out += self.last_rejected or skipped
            self.applied += not (self.last_rejected or skipped)
        self.last_step = sample.step
        if not self._at_once and self._screen is not None and not skipped and self._is_calm_sample(sample):
            self._let_wait(sample)
            return
        self._absorb_waiting()
        if self._provenance is not None:
            sample = self._provenance.explained(sample)
        verdict = self._deliver(self, self._branches.marked(sample))
        if self._memory is not None and sample.phase == "train":
            self._memory.heard(self.label, sample.step, verdict, rejected=self.last_rejected)

    def _is_calm_sample(self, sample: Sample) -> bool:
        """The same of one that was delayed."""
        if self.last_rejected or sample.phase != "train" or sample.notes or sample.layout.has_weight_norms:
            return False
        norms = sample.col(Kind.GRAD, Column.L2)
        return norms.size > 0 and self._passes(sample.step, sample.scalars, norms, float(np.minimum.reduce(norms)))

    def decided(self, decision: Decision, *, settled: bool = False) -> None:
        """Do what was decided: at once, or with other processes at the end of a step, when all can be asked."""
        if settled or self.together is None or not self.together.waits(decision):
            self._act(self, decision)

    # -- what others tell it -------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """The gradients to come are those of the weights that are there now."""
        self.stale = False
        if self._peers is not None:
            self._began_s = time.perf_counter()

    def went_back(self, at: int) -> None:
        """An earlier state is in place. Its own step is over; those of other lanes may still be to come."""
        self.rewound_at, self.stale = at, False

    def request_stop(self) -> None:
        """End the run as soon as the verdict is recorded."""
        self.stop_requested = True

    def clipped(self, norm: float | Tensor, *, sure: bool = False) -> None:
        """The loop clips these gradients itself: their norm before it. One that is `sure` stands until the step."""
        if self.trials is not None and self.trials.running:
            return
        if sure or not self._sure:
            self._norm_before, self._sure = norm, sure

    @property
    def clip_in_force(self) -> Clip:
        """How gradients are clipped now; false where they are not."""
        return self._judge.clip_in_force

    def clip_to(self, norm: float) -> None:
        """From now on, let no gradient norm above this through."""
        self._judge.clip_to(norm)

    def use_scaler(self, scaler: object) -> None:
        """The loop turned out to have one."""
        self.scaler = scaler

    def go_on_counting(self, step: int) -> None:
        """Weights of that step were loaded, without anything that was known of the run."""
        self.attempts = max(self.attempts, step)

    # -- outside the step ----------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Any]:
        """What the reflexes remember of gradients: put back along with the weights."""
        return {"suspicion": self._judge.suspicion.state_dict(), "clip": self._judge.state_dict()}

    def was_put_back(self, memory: Mapping[str, Any] | None) -> None:
        """Weights and moments of an earlier step are in place, on purpose: a new branch begins with the next step."""
        self.watch.renew()
        self._shadow.renew()
        self.stale = True
        self._branches.begin(self.attempts)
        self._went_back = True
        if memory is not None:
            self._judge.suspicion.load_state_dict(memory["suspicion"])
            self._judge.load_state_dict(memory["clip"])

    def validated(self, scalars: Mapping[str, float | Tensor]) -> None:
        """Post what a validation gave; it is judged in its place between the steps."""
        layout = Layout(names=(), kinds=(), numel=(), columns=(), optimizer=self.label)
        self.hear_replays()
        last = max(self.attempts - 1, 0)  # a validation before the first step belongs to it
        self._delayed.post(last, layout, np.zeros((0, 0), np.float32), dict(scalars), phase="val")
        self.judge(last)

    def never_stepped(self, num_passes: int) -> None:
        """Gradients were computed so often, and thrown away: there is no step to tell it with."""
        layout = Layout(names=(), kinds=(), numel=(), columns=(), optimizer=self.label)
        facts: dict[str, float | Tensor] = {"passes_without_step": float(num_passes)}
        self._delayed.post(self.attempts, layout, np.zeros((0, 0), np.float32), facts, phase="error")
        self.drain()

    def drain(self, error: Exception | None = None) -> None:
        """Deliver everything still under way, and the exception that ended the step, if one did."""
        self.abandon()
        self._absorb_waiting()
        self.hear_replays(wait=True)
        for sample in self._delayed.drain():
            self._hand_over(sample)
        if error is not None:
            layout = Layout(names=(), kinds=(), numel=(), columns=(), optimizer=self.label)
            facts, notes = told_by(error)
            self._delayed.post(self.attempts, layout, np.zeros((0, 0), np.float32), facts, phase="error", notes=notes)
            self.drain()

    def state_dict(self) -> dict[str, Any]:
        """Plain data; what is still under way is delivered first by the guard."""
        return {
            "attempts": self.attempts,
            "rejected": self.rejected,
            "applied": self.applied,
            "kept_out": self.kept_out,
            "multiplier": self.multiplier.state_dict(),
            **self.memory(),
            "branch": self._branches.now,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.attempts, self.rejected = int(state["attempts"]), int(state["rejected"])
        self.applied, self.kept_out = int(state.get("applied", self.attempts)), int(state.get("kept_out", 0))
        self.multiplier.load_state_dict(state["multiplier"])
        self._judge.suspicion.load_state_dict(state["suspicion"])
        self._judge.load_state_dict(state.get("clip", {}))
        self._branches = Branches(int(state.get("branch", 0)))
        self._went_back = self._branches.now > 0


MAX_CHARACTERS = 300
_TEXTS = {
    "label_error": (
        "is out of bounds",
        "target out of",
        "index out of range",
        "class values must be",
        "should be between 0",
        "device-side assert",
        "unspecified launch failure",
    ),
    "no_grad_error": ("does not require grad",),
}
"""PyTorch's wording of troubles that have a name of their own."""


def told_by(error: Exception) -> tuple[dict[str, float | Tensor], dict[str, tuple[str, ...]]]:
    """The facts and notes of a sample for a step that never ended."""
    text = " ".join(str(error).split())[:MAX_CHARACTERS]
    known = [fact for fact, words in _TEXTS.items() if any(word in text.lower() for word in words)]
    facts: dict[str, float | Tensor] = dict.fromkeys(("exception", *known), 1.0)
    return facts, {"exception": (type(error).__name__, text)}
