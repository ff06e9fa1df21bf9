"""The orchestrator: sample, reflex, step, then verdict, decision, action, record. Read it top to bottom."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from trimtab.advice.recommendations import adviser_for
from trimtab.checkpoint.signals import reason_of
from trimtab.core.config import Config, resolve
from trimtab.core.contain import Contained
from trimtab.core.errors import InputError, TrainingStopped, TrimtabError
from trimtab.core.journal import IncidentLines, Journal
from trimtab.core.pipeline import Brain
from trimtab.core.printable import FINDINGS_LOG
from trimtab.core.types import BrainState, Closing, Decision, Finding, Outcome, Sample, Severity, Snapshot, Verdict
from trimtab.guard import attach
from trimtab.guard.batches import quarantine_of
from trimtab.guard.buffers import BufferShadow
from trimtab.guard.checkpoints import CheckpointKeepers, claimed, epochs_of
from trimtab.guard.hooks import uncompiled
from trimtab.guard.incidents import Incidents
from trimtab.guard.lane import STATE_EVERY, Lane
from trimtab.guard.loop_clipping import wrap_clipping, wrap_value_clipping
from trimtab.guard.loop_losses import Losses
from trimtab.guard.notebook_view import guard_html, guard_words
from trimtab.guard.ranks import REFUSED
from trimtab.guard.run_record import (
    health_of,
    lag_for,
    load_state,
    model_name,
    open_recorder,
    run_info,
    state_of,
    under_way,
)
from trimtab.guard.trials import Trials
from trimtab.record.recorder import Recorder
from trimtab.record.sinks import with_preset_lines
from trimtab.remedies import BUILTIN
from trimtab.remedies.skip import SkipData
from trimtab.remedies.stop import stopped
from trimtab.sample.measure import reference as measure
from trimtab.sample.observed import Observed, scalar_loss
from trimtab.sample.rows import check_model
from trimtab.sample.transfer import is_here, number
from trimtab.torchutil.optimizers import (
    check_optimizer,
    innermost,
    labelled,
    needs_closure,
    params_of,
    scale_of,
    still_scaled,
    unscale,
)
from trimtab.torchutil.sharded import refusal

log = logging.getLogger("trimtab")
findings_log = logging.getLogger(FINDINGS_LOG)
NOTHING: dict[str, Any] = {}


class Guard:
    """Watches a training run, keeps bad updates out of the weights, and says what is wrong.

    Args:
        model: A module, or a dict of modules.
        optimizer: One optimizer, or a list or dict of them.
        config: A `Config`, a dict, or a path to TOML; None reads `[tool.trimtab]`. Keywords win over it.
        clip: The largest gradient norm, `{"norm": 1.0, "per_group": True}`, `{"value": 0.5}`, `"agc"`, `"percentile"`,
            or `"zscore"`.
        mode: `observe` (change nothing), `advise` (reject non-finite updates; the default), `act` (also roll back, cut
            the learning rate, stop) or `raise` (stop at the first finding of severity ERROR).
        preset: Name of defaults that explicit settings override.
        lag: How many steps later the host judges a step; None: 0 on CPU, 1 on accelerators.
        scheduler: Part of the checkpoint; you keep stepping it.
        scaler: A `GradScaler`: `step` then unscales, steps and updates.
        ema: An averaged copy of the model to watch.
        loader: Tells how long an epoch is; a `ResumableLoader` also where a run stands in it.
        step_fn: Takes a batch, runs its forward, loss and backward, and returns the loss. With it, and the batch given
            to `step`, a step with NaN or Inf is run again as a whole to find where that came from. Treatment trials
            (`policy.trial_steps`) need both, too.
        checkpoint: A path or a `Checkpointer` for the state of everything given here. A folder that another run saves
            to is refused.
        checkpoint_every: Steps between two checkpoints (500). 0: only when the process is asked to end, or fails.
        sinks: Objects with `.log()`, `.add_scalar()` or `write` and `close`, which get every record.
        on_finding: Called with every new finding.
        run_dir: Where to record; None: `trimtab_runs/<id>`, False: nowhere.

    Example:
        >>> import torch, trimtab
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with trimtab.Guard(model, optimizer, clip=1.0, run_dir=False) as guard:
        ...     for x in torch.randn(3, 8, 4):
        ...         loss = model(x).square().mean()
        ...         loss.backward()
        ...         _ = guard.step(loss)
        ...         optimizer.zero_grad()
        >>> guard.findings, guard.rejected
        ([], 0)
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: object,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        clip: object = None,
        mode: str | None = None,
        preset: str | None = None,
        lag: int | None = None,
        scheduler: object = None,
        scaler: Any = None,
        ema: object = None,
        loader: object = None,
        step_fn: Callable[..., Any] | None = None,
        checkpoint: object = None,
        checkpoint_every: int | None = None,
        sinks: Iterable[object] = (),
        on_finding: Callable[[Finding], object] | None = None,
        run_dir: str | os.PathLike[str] | bool | None = None,
    ) -> None:
        self.config = resolve(config, preset=preset, clip=clip, mode=mode, lag=lag, checkpoint_every=checkpoint_every)
        self._verdict: Verdict | None = None
        self._healthy: tuple[Sample, int] | None = None  # the newest, where it is known to be, and when that was known
        self.run_dir = None
        self._disabled = os.environ.get("TRIMTAB_DISABLE", "") not in ("", "0")
        self._model, self._scaler, self._on_finding = check_model(model), scaler, on_finding
        self._optimizers = labelled(optimizer)
        for label, one in self._optimizers.items():
            check_optimizer(one, self._model, label)
        self._all = list(self._optimizers.values())
        self._choice = len(self._all) > 1 or needs_closure(self._all[0])  # else there is nothing to choose or refuse
        # Of the one optimizer of a plain loop nothing is asked in a step but to make it.
        self._plain = None if self._choice or scaler is not None else self._all[0]
        self._contained, self._observed, self._journal = Contained(), Observed(), Journal()
        self._lines = IncidentLines()
        self._closed = self._stopping = False
        self._stop_by: Callable[[TrainingStopped], object] | None = None
        self._loader, self._epochs = loader, 0
        self.quarantine = quarantine_of(loader)
        self._lanes: dict[str, Lane] = {}
        self._keepers = CheckpointKeepers(self.config, None)
        self._brains = {label: Brain.from_config(self.config, adviser_for(self.config)) for label in self._optimizers}
        if self._disabled:
            log.warning("TRIMTAB_DISABLE is set: this guard only passes steps on")
            return
        if checkpoint is not None and (why := refusal(self._model)):
            raise InputError(why)
        checkpointer = claimed(
            checkpoint, self._model
        )  # before anything is attached or recorded: the folder may be in use
        info = partial(run_info, self.config, self._model, self._optimizers)
        self._recorder, self.run_dir = open_recorder(self.config, run_dir, with_preset_lines(self.config, sinks), info)
        self._keepers = CheckpointKeepers(self.config, self.run_dir)
        self._attachment = attach.Attachment(
            self._model,
            self._optimizers,
            scaler=scaler,
            ema=ema,
            loader=loader,
            quarantine=self.quarantine,
            config=self.config,
            lag=lag_for(self.config, self._model),
            observed=self._observed,
            contained=self._contained,
            deliver=self._think,
            act=self._act,
            absorb=self._absorb,
            passed=self._pass_on,
            screens={label: brain.screen for label, brain in self._brains.items()},
            instead=self._keepers.instead_of_memory,
            step_fn=step_fn,
            keep_incident=None if self.run_dir is None else Incidents(self.run_dir, self.config).keep,
        )
        self._lanes = self._attachment.lanes
        self.also_remove(wrap_value_clipping(self, self._contained))
        kept = {"model": self._model, "optimizer": self._optimizers, "scheduler": scheduler, "scaler": scaler}
        kept |= {"ema": ema, "loader": loader, "guard": self}
        self._keepers.begin(checkpointer, kept, self._lanes, self._attachment.rollback)

    @classmethod
    def attach(cls, model: nn.Module | Mapping[str, nn.Module], optimizer: Any, *args: Any, **kwargs: Any) -> Guard:
        """Guard a loop that calls `optimizer.step()` itself, by hooks alone. Takes the arguments of `Guard`."""
        return cls(model, optimizer, *args, **kwargs)

    # -- one step ------------------------------------------------------------------------------------------------

    @uncompiled
    def step(self, loss: Any, batch: Any = None, *, optimizer: Any = None) -> Verdict | None:
        """Take the place of `optimizer.step()`: returns the newest verdict, or None while there is none.

        `loss` is the scalar tensor that `backward()` was called on, or a closure for optimizers that need one. Of
        several optimizers `optimizer` names the one to step, by its key or itself; `"all"` steps every one.
        """
        if self._closed:
            raise InputError("this guard is closed; build a new one, or call optimizer.step() yourself")
        if self._plain is not None and optimizer is None and loss.__class__ is Tensor:
            if not self._disabled:
                try:
                    self._observed.told(loss, batch, NOTHING, True)
                except TrimtabError:
                    raise
                except Exception as error:
                    self._contained.report("reading the loss", error)
            self._plain.step()
            if self._healthy is None:
                return self._verdict
            verdict: Verdict | None = self._contained.call("making the verdict", self._newest, default=self._verdict)
            return verdict
        closure = None if isinstance(loss, Tensor) or not callable(loss) else loss
        chosen = self._all
        if self._choice or optimizer is not None:
            chosen = self._contained.call(
                "choosing the optimizer",
                attach.choose,
                self._optimizers,
                optimizer,
                closure is not None,
                default=chosen,
            )
        if closure is None:
            self._contained.call("reading the loss", self._observed.told, loss, batch, NOTHING, True)
        elif self._scaler is not None and self._contained.call("reading the scale", scale_of, self._scaler) is not None:
            raise InputError("a closure cannot be combined with a GradScaler; run without scaler, for example in bf16")
        for one in chosen:
            if self._scaler is None:
                one.step() if closure is None else one.step(closure)
            else:
                self._contained.call("unscaling", unscale, self._scaler, one)  # first: measure and clip true gradients
                self._scaler.step(one)
        if self._scaler is not None:
            self._scaler.update()
        newest: Verdict | None = self._contained.call("making the verdict", self._newest, default=self._verdict)
        return newest

    @uncompiled
    def observe(self, loss: object = None, batch: object = None, **scalars: object) -> None:
        """Tell, before the step, what hooks cannot see: the loss (of each micro-batch), the batch, other scalars.

        If you capture steps in a CUDA graph, call it every 100 replays or so, without arguments if you like: it fetches
        from the device what they left there to be judged and recorded.
        """
        self._contained.call("reading what was observed", self._observed.told, loss, batch, scalars, False)
        for lane in self._lanes.values():
            self._contained.call("judging replayed steps", lane.judge_replayed)

    def clipping(self, params: Iterable[Tensor], norm: Tensor | float) -> bool:
        """Tell that the loop clips these gradients itself, and their norm before it, which goes on record.

        Returns whether a bad update of them is rejected anyway. The loop's clipping may then leave a NaN where it is.
        """
        mine, known = {id(p) for p in params}, False
        for lane in self._lanes.values():
            live = [p for p in params_of(lane.optimizer) if p.grad is not None]
            known |= any(id(p) in mine for p in live)
            if live and all(id(p) in mine for p in live) and not still_scaled(lane.scaler, lane.optimizer):
                self._contained.call("noting a norm", lane.clipped, norm)
        return known and self.config.mode != "observe" and self.config.reject_nonfinite

    def watch_clipping(self) -> None:
        """Be told, until this guard is closed, whenever PyTorch's `clip_grad_norm_` or `clip_grad_value_` is called."""
        if not self._disabled:
            self.also_remove(wrap_clipping(self.clipping, self._contained))

    def watch_losses(self, times: float = 1.0) -> None:
        """Observe, until this guard is closed, every loss that `backward` is called on, multiplied by `times`.

        For a loop that tells none. Several guards at a time would each see all of them.
        """

        def seen() -> None:
            for loss in losses.take(0, id(self)):
                self.observe(loss if times == 1 else loss * times)

        losses = Losses(dict, self._contained, seen)
        if not self._disabled:
            losses.listen()
            self.also_remove(losses.remove)

    def also_remove(self, undo: Callable[[], None]) -> None:
        """Have this called, too, when the guard is closed and takes its hooks off."""
        if not self._disabled:
            self._attachment.also_remove(undo)

    def before_clipping(self, optimizer: object = None) -> None:
        """Call where gradients are ready, and unscaled, and the loop is about to clip them in a way of its own."""
        for lane in self._lanes.values():
            if optimizer is None or lane.optimizer is innermost(optimizer):
                self._contained.call("measuring before clipping", self._measure_before, lane)

    @staticmethod
    def _measure_before(lane: Lane) -> None:
        live = [measure.plain(p.grad) for p in params_of(lane.optimizer) if p.grad is not None]
        if not live:
            return
        norm = measure.total(measure.norms(live))
        if is_here(norm) and not math.isfinite(number(norm)):
            norm = measure.total(measure.wide_norms(live))
        lane.clipped(number(norm) if is_here(norm) else norm, sure=True)

    def stop_by(self, stop: Callable[[TrainingStopped], object]) -> None:
        """Where a remedy ends the run, have this called with the reason instead of raising it; mode `raise` raises."""
        self._stop_by = stop

    def __repr__(self) -> str:
        return guard_words(self, model_name(self._model), self._lanes)

    def _repr_html_(self) -> str:
        return guard_html(self, model_name(self._model), self._lanes)

    @property
    def closed(self) -> bool:
        """Whether it is closed: by you, or because the run was stopped."""
        return self._closed

    @uncompiled
    def validate(self, loss: object, **metrics: object) -> Verdict | None:
        """Report a validation: its loss and any metrics."""
        self._contained.call("judging a validation", self._validated, loss, metrics)
        newest: Verdict | None = self._contained.call("making the verdict", self._newest, default=self._verdict)
        return newest

    def _validated(self, loss: object, metrics: Mapping[str, object]) -> None:
        scalars = {f"val/{k}": scalar_loss(v, strict=False) for k, v in metrics.items()}
        scalars["val_loss"] = scalar_loss(loss, strict=False)
        for lane in list(self._lanes.values())[:1]:
            lane.validated(scalars)

    def _think(self, lane: Lane, sample: Sample) -> Verdict:
        """Host side of the picture: sample -> verdict -> decision -> action -> record."""
        brain = self._brains[lane.label]
        verdict, decision = brain.advance(sample, seen_at=max(lane.attempts - 1, sample.step))
        for record in brain.records(sample):
            self._recorder.put(record)
        self._verdict, self._healthy = verdict, None
        if verdict.findings:
            self._recorder.put(verdict)
            if (line := self._lines.of(verdict)) is not None:
                findings_log.warning("%s", line)
            for finding in self._journal.add(verdict):
                if self._on_finding is not None:
                    self._contained.call("the on_finding callback", self._on_finding, finding)
        if decision.actions:
            lane.decided(decision)
        for keeper in self._keepers:
            self._contained.call("certifying checkpoints", keeper.heard, verdict)
        if (sample.step + 1) % STATE_EVERY == 0 and sample.phase == "train":
            state = BrainState(step=sample.step + 1, state=brain.state_dict(), optimizer=lane.label)
            self._recorder.put(state)
        grave = verdict.worst is not None and verdict.worst.severity >= Severity.ERROR
        if (lane.stop_requested or (self.config.mode == "raise" and grave)) and not self._stopping:
            self._stopping = True  # closing judges what is still under way: the first reason to stop is the one told
            self.close(reason="stopped")
            if self._stop_by is None or self.config.mode == "raise":
                raise stopped(verdict)
            self._contained.call("stopping the loop", self._stop_by, stopped(verdict))
        return verdict

    def _pass_on(self, sample: Sample, seen_at: int) -> None:
        """A step that is known to be healthy: it goes on record at once, and its verdict is made on demand."""
        self._healthy = sample, seen_at
        self._recorder.put(sample)

    def _absorb(self, lane: Lane, samples: list[Sample]) -> None:
        """The same for steps that are known to be healthy and on record: there is nothing to say about them."""
        self._brains[lane.label].absorb(samples)

    def _act(self, lane: Lane, decision: Decision) -> None:
        self._recorder.put(decision)
        for outcome in carry_out(decision, lane, self._contained):
            self._recorder.put(self._brains[lane.label].did(outcome))

    # -- state and end -------------------------------------------------------------------------------------------

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """What is kept for each optimizer, by its key; empty where `TRIMTAB_DISABLE` is set."""
        return self._lanes

    @property
    def recorder(self) -> Recorder | None:
        """What hands records to the sinks; None where `TRIMTAB_DISABLE` is set."""
        return None if self._disabled else self._recorder

    @property
    def buffers(self) -> BufferShadow:
        """The copies of buffers that a rejected step is undone with."""
        return self._attachment.shadow

    @property
    def verdict(self) -> Verdict | None:
        """The newest verdict; None before the first."""
        return self._newest()

    def _newest(self) -> Verdict | None:
        if self._healthy is not None:
            (sample, seen_at), self._healthy = self._healthy, None
            self._verdict = Verdict(step=sample.step, seen_at=seen_at, optimizer=sample.layout.optimizer)
        return self._verdict

    def flush(self) -> None:
        """Wait until everything that was recorded so far has reached its sinks."""
        self._judge_waiting()
        if not self._disabled:
            self._recorder.flush()

    def abandon(self) -> None:
        """In a forked child: take every hook off. The record and the checkpoints are the parent's to finish."""
        if self._closed or self._disabled:
            return
        self._closed = True
        self._attachment.remove()
        for keeper in self._keepers:
            keeper.abandon()

    @property
    def findings(self) -> list[Finding]:
        """What was found so far: one finding per incident, its streak growing while it lasts."""
        return self._journal.findings

    @property
    def rejected(self) -> int:
        """How many updates were kept out of the weights."""
        return sum(lane.rejected for lane in self._lanes.values())

    def _judge_waiting(self) -> None:
        """Have the samples judged that are due."""
        for lane in self._lanes.values():
            lane.judge(lane.attempts - 1)

    def health(self) -> dict[str, Any]:
        """How the run is doing now, in one dict: booleans per part, and what is open."""
        self._judge_waiting()
        return health_of(self._brains, self._lanes, self.findings)

    def resume(
        self, prefer: str = "newest", *, step: int | None = None, run: str | None = None, strict: bool = True
    ) -> Snapshot | None:
        """Go on from the newest sound checkpoint (`prefer="good"`: a certified one); None where there is none.

        `epoch` then says how many epochs are complete: `for epoch in range(guard.epoch, 5)`. `step`, `run` and `strict`
        are those of `Checkpointer.resume`.
        """
        return self._keepers.resume(prefer=prefer, step=step, run=run, strict=strict)

    @property
    def epoch(self) -> int:
        """How many epochs are complete, after `resume` too: counted by a `ResumableLoader`, else what you set it to."""
        counted = epochs_of(self._loader)
        return self._epochs if counted is None else counted

    @epoch.setter
    def epoch(self, complete: int) -> None:
        self._epochs = int(complete)

    def state_dict(self) -> dict[str, Any]:
        """Plain data to go on from exactly here. Samples still under way are judged first."""
        return {**state_of(self._lanes, self._brains, self.quarantine), "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Samples that are put aside now stay so."""
        load_state(state, self._lanes, self._brains, self.quarantine)
        self._epochs = int(state.get("epoch", 0))

    def close(self, reason: str = "closed") -> None:
        """Judge what is still under way, finish the record, and remove every hook. Closing twice is harmless."""
        if self._closed or self._disabled:
            return
        self._closed = True
        try:
            for lane in self._lanes.values():
                lane.drain()
            self._contained.call("looking for steps that were never made", self._attachment.finish)
            next(iter(self._lanes.values())).drain(error=under_way(in_step=self._attachment.in_step))
        finally:
            self._attachment.remove()
            for keeper in self._keepers:
                self._contained.call("closing checkpoints", keeper.close, reason)
            num, lost = len(self.findings), dict(self._recorder.dropped)
            self._recorder.put(
                Closing(steps=self._steps(), rejected=self.rejected, findings=num, reason=reason, dropped=lost)
            )
            self._recorder.close()
            for keeper in self._keepers:
                keeper.release_signals()

    def _steps(self) -> dict[str, int]:
        return {label: lane.attempts for label, lane in self._lanes.items()}

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close(reason="closed" if error is None else reason_of(error))
        except TrimtabError:
            if kind is None:  # the error on its way out is the one that matters
                raise


def carry_out(decision: Decision, lane: Lane, contained: Contained) -> Iterator[Outcome]:
    """Do what was decided, one action after the other; a remedy that breaks is an outcome too."""
    tried = False
    for action in decision.actions:
        failed = Outcome(at=decision.at, action=action, applied=False, detail="the remedy failed; see the log")
        if lane.together is not None and lane.together.refuses(action):
            yield Outcome(at=decision.at, action=action, applied=False, detail=REFUSED, optimizer=lane.label)
            continue
        if action.kind == "skip_data" and not SkipData.can(lane):
            continue  # nobody told which samples these are: there is nothing to put on record
        if action.kind == "cut_lr" and tried:
            failed = replace(failed, detail="the trials measured what helps instead", optimizer=lane.label)
            yield failed
            continue
        remedy = BUILTIN.get(action.kind, lane.trials)
        if remedy is None:
            continue  # trials were decided on elsewhere: none are made here
        outcome: Outcome | None = contained.call(f"the remedy ({action})", remedy.apply, action, lane, decision.at)
        tried |= action.kind == Trials.kind and outcome is not None and outcome.applied
        yield replace(outcome or failed, optimizer=lane.label)
