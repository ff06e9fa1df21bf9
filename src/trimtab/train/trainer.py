"""The trainer: epochs and stages, accumulation, precision, averaging, early stopping; every update through a guard.

Below it: one optimizer step from its micro-batches, the checks of loaders, and the corrections after an epoch.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from trimtab.checkpoint.loader import resumable
from trimtab.compat import checkpoint_pair as documented
from trimtab.compat.monitors.loss_history import check_training_stability
from trimtab.compat.monitors.stability import (
    StabilityMonitor,
    TrainingStats,
    get_training_stats,
    monitor_training_health,
)
from trimtab.core.errors import InputError
from trimtab.core.types import Finding, Outcome, Snapshot
from trimtab.sample.transfer import to_device
from trimtab.train.device import choose_device
from trimtab.train.early_stopping import EarlyStopping, warn_of_no_metric
from trimtab.train.evaluation import (
    Evaluate,
    LossFn,
    Metrics,
    StepFn,
    check_given,
    evaluate_model,
    loss_of,
    measured_by,
)
from trimtab.train.history import Course, History, epoch_row
from trimtab.train.processes import share_buffers
from trimtab.train.resuming import (
    folder_of,
    load_best,
    log_how_to_resume,
    resume_from,
    run_dir_of,
    save_after_epoch,
    save_best,
    save_history,
    settle,
    stored_at,
)
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import (
    Rig,
    Stage,
    Surroundings,
    amp_dtype,
    averaged_or,
    build_rig,
    check_stages,
    freeze,
    num_steps,
    set_training,
)

log = logging.getLogger("trimtab")
Hook = Callable[["Trainer"], None]


class Trainer:
    """Trains a model under a guard, from `train` to `close`.

    Args:
        model: What to train; moved to the device of the config.
        loss_fn: `loss_fn(output, target)`; give this or `step_fn`. It and `config` may change places.
        config: A `TrainConfig`, or a mapping of its fields.
        step_fn: `step_fn(model, batch) -> loss`, instead of `loss_fn`.
        metrics: `metrics(outputs, targets)`: how good the model is, by name.
        evaluate: `evaluate(model, loader)`, instead of `metrics`; the result has the key `loss`.
        stages: Stages instead of the single one of the config.
        around: Where to record and to save.
        before_step: Called with the trainer before every optimizer step.
        after_step: Called with the trainer after every optimizer step.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from trimtab.train.settings import TrainConfig
        >>> from trimtab.train.trainer import Surroundings, Trainer
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(64, 3)
        >>> data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
        >>> config = TrainConfig(num_epochs=20, learning_rate=0.1)
        >>> trainer = Trainer(nn.Linear(3, 1), nn.functional.mse_loss, config, around=Surroundings(run_dir=False))
        >>> history = trainer.train(data, data)
        >>> len(history.epochs), history.column("val_loss")[-1] < 1e-3
        (20, True)
        >>> trainer.monitor_training_health()["overall_healthy"]
        True
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | TrainConfig | Mapping[str, Any] | None = None,
        config: TrainConfig | Mapping[str, Any] | LossFn | None = None,
        *,
        step_fn: StepFn | None = None,
        metrics: Metrics | None = None,
        evaluate: Evaluate | None = None,
        stages: Sequence[Stage] = (),
        around: Surroundings | None = None,
        before_step: Hook | None = None,
        after_step: Hook | None = None,
    ) -> None:
        loss_fn, self.config = in_order(loss_fn, config, step_fn)
        check_given(model, loss_fn, step_fn, metrics, evaluate)
        self.device = choose_device(self.config.device)
        self.model = model.to(self.device)  # before any optimizer is built
        self.stages = tuple(stages) or (Stage(epochs=self.config.num_epochs),)
        check_stages(self.model, self.stages)
        self.around = around or Surroundings()
        self.history = History()
        self.stopping = EarlyStopping(
            self.config.monitor, patience=self.config.patience, min_delta=self.config.min_delta
        )
        self.course = Course(self.history, self.stopping)
        self.course.settings = self.config.to_dict()
        self.rig: Rig | None = None
        self.last_rig: Rig | None = None
        self.findings: list[Finding] = []
        self.outcomes: list[Outcome] = []
        self.rejected = 0
        self.run_dirs: list[Path] = []
        self._loss_fn, self._step_fn, self._metrics, self._evaluate = loss_fn, step_fn, metrics, evaluate
        self._before, self._after = before_step, after_step
        self._stage, self._moved = 0, False
        self._called: nn.Module = self.model
        self._best: tuple[dict[str, Any], dict[str, Tensor]] | None = None  # the row of the best epoch, and its weights
        self.final_row: dict[str, Any] | None = None
        """The epoch that the final weights are of: the last, or with `patience` the best."""

    # -- training ------------------------------------------------------------------------------------------------

    def train(
        self,
        train_loader: Iterable[object],
        val_loader: Iterable[object] | None = None,
        *,
        resume: str | os.PathLike[str] | None = None,
    ) -> History:
        """Train through all stages; `resume` starts from the newest sound checkpoint (`auto`) or from a path."""
        loaders = loaders_of(self.stages, train_loader, guarded=self.around.guarded)
        val_loader = to_measure(val_loader)
        self._stage, self._moved = 0, False
        try:
            if resume is not None:
                self._resume(resume, loaders)
            while self._stage < len(self.stages):
                if self.rig is not None or self.stages[self._stage].epochs > 0:  # else the stage is skipped
                    rig = self.rig or self._enter(self._stage, loaders)
                    while not self._over(rig):
                        self._epoch(rig, loaders[self._stage], val_loader)
                    self._leave()
                self._stage += 1
            self._take_best()
        except BaseException as error:
            self._leave(type(error).__name__)
            if self._moved:  # before the first step there is nothing to resume from
                log_how_to_resume(error, self.around.checkpoint_dir)
            raise
        return self.history

    def _resume(self, resume: str | os.PathLike[str], loaders: Sequence[Iterable[object]]) -> None:
        if not self.around.guarded:
            raise InputError("a training without a guard keeps no checkpoints; leave resume out, or use a guard")
        enter, root = partial(self._enter, loaders=loaders), self.around.checkpoint_dir
        self._stage = resume_from(resume, root, self.stages, enter, self._leave, self.load_checkpoint)
        if self.rig is not None:
            settle(self.rig, self.course)

    def _enter(self, index: int, loaders: Sequence[Iterable[object]]) -> Rig:
        stage, loader = self.stages[index], loaders[index]
        freeze(self.model, stage)
        self._called = DistributedDataParallel(self.model) if self.around.distributed else self.model
        self.course.begin_stage()
        self.rig = build_rig(
            self.model,
            stage,
            self.config,
            self.course,
            self.around,
            loader=place_of(loader),
            total_steps=num_steps(stage, self.config, num_batches(loader)),
            device=self.device,
            checkpoint_dir=folder_of(self.around.checkpoint_dir, self.stages, index),
            run_dir=run_dir_of(self.around.run_dir, self.stages, index),
        )
        return self.rig

    def _leave(self, reason: str = "closed") -> None:
        rig, self.rig = self.rig, None
        if rig is None:
            return
        try:
            rig.close(reason)
        finally:
            self.last_rig = rig
            self.findings += rig.guard.findings
            self.outcomes += rig.meter.outcomes
            self.rejected += rig.guard.rejected
            if rig.guard.run_dir is not None:
                self.run_dirs.append(Path(rig.guard.run_dir))
            self.history.complete(rig.meter, rig.stage.name)
            self._save_history()

    def _over(self, rig: Rig) -> bool:
        if self.stopping.stop:
            log.info("no improvement for %d epochs: stage %s ends here", self.stopping.patience, rig.stage.name)
            self.stopping.epochs_without_improvement = 0  # the next stage counts from 0
            return True
        return self.course.epoch >= rig.stage.epochs or self._enough()

    def _take_best(self) -> None:
        """End with the weights of the best epoch where training may stop early: those after it are overfitted."""
        self.final_row = self.history.epochs[-1] if self.history.epochs else None
        best = self.stopping.best
        if not self.config.patience or best is None:
            return
        if self._best is None:  # it was before the resume
            rows = [row for row in self.history.epochs if row.get(self.stopping.metric) == best]
            if not rows or not load_best(self.around.checkpoint_dir, self.model):
                return
            self.final_row = rows[-1]
        else:
            self.final_row, weights = self._best
            self.model.load_state_dict(weights)
        average = self.last_rig.ema if self.last_rig is not None else None
        if average is not None:
            average.module.load_state_dict(self.model.state_dict())
        where = f"epoch {self.final_row['epoch']} of stage {self.final_row['stage']}"
        log.info("the final weights are those of the best epoch: %s, %s %.6g", where, self.stopping.metric, best)

    def _enough(self) -> bool:
        return self.config.max_steps is not None and self.course.steps_done >= self.config.max_steps

    def _epoch(self, rig: Rig, loader: Iterable[object], val_loader: Iterable[object] | None) -> None:
        """One epoch, or the rest of it after a resume."""
        began, course = time.perf_counter(), self.course
        set_training(self.model, rig.stage)
        progress = self.around.progress
        before = sum(stage.epochs for stage in self.stages[: self._stage])
        if isinstance(sampler := getattr(loader, "sampler", None), DistributedSampler):
            sampler.set_epoch(before + course.epoch)
        if progress is not None:
            done = (course.step - course.first_step) * self.config.accumulation_steps + course.micro
            total = sum(stage.epochs for stage in self.stages)  # the line counts the epochs of all stages
            progress.begin(before + course.epoch + 1, total, num_batches(loader) or 0, done)
        if course.micro >= self.config.accumulation_steps:  # resumed between the gradients of a step and the step
            ready(rig.scaler, self.device)
            self._update(rig, course.last_loss)
        for batch in loader:
            there = to_device(batch, self.device)
            loss = micro_batch(self._called, there, rig, self.config, self.device, self._loss_fn, self._step_fn)
            course.add(loss)
            if progress is not None:
                progress.advance()
            if course.micro >= self.config.accumulation_steps:
                self._update(rig, loss)
                if self._enough():
                    break
        if course.micro and not self._enough():
            complete_tail(self.model, self.config.accumulation_steps / course.micro)
            ready(rig.scaler, self.device)
            self._update(rig, course.last_loss)
        if course.step == course.first_step and not self._enough():
            raise no_batch_error(loader, course.epoch + 1)
        self._end_epoch(rig, val_loader, began)

    def _update(self, rig: Rig, loss: Tensor) -> None:
        if self._before is not None:
            self._before(self)
        update(self.model, rig, loss)
        self._moved = True
        if self._after is not None:
            self._after(self)
        rig.schedule.step()
        self.course.step_done()

    def _end_epoch(self, rig: Rig, val_loader: Iterable[object] | None, began: float) -> None:
        course, around = self.course, self.around
        train_loss, num_bad = course.take_mean()
        rig.flush()
        if around.progress is not None:
            around.progress.end(train_loss)
        if around.distributed:
            share_buffers(self.model, rig.ema)
        measured = {} if val_loader is None else self.evaluate(val_loader)
        rig.validated(measured, train_loss, around)
        issues: list[str] | None = None
        if self.config.corrective and around.guarded:
            issues, applied = correct_epoch(rig.stability, train_loss, measured.get("loss"), num_bad)
            self.outcomes += applied
        rig.schedule.epoch_done(measured.get("loss", train_loss))
        row = epoch_row(course, rig, train_loss, measured, num_bad, issues, self.device, began)
        course.epoch_done(row)
        rig.flush()
        self.history.complete(rig.meter, rig.stage.name)
        numbers = {name: row[name] for name in ("train_loss", "val_loss", *measured) if name in row}
        warn_of_no_metric(self.stopping, numbers)
        if self.stopping.update(numbers):
            weights = averaged_or(self.model, rig.ema)
            if self.config.patience:
                self._best = row, {name: one.detach().cpu().clone() for name, one in weights.state_dict().items()}
            if around.guarded:
                save_best(around.checkpoint_dir, weights, self.config.to_dict(), numbers)
        save_after_epoch(rig, numbers, course.step)
        self._save_history()

    def evaluate(self, loader: Iterable[object]) -> dict[str, float]:
        """Loss (key `loss`) and metrics, of the averaged weights if there are any, else of the model."""
        model = averaged_or(self.model, self.rig.ema if self.rig is not None else None)
        if self._evaluate is not None:
            return measured_by(self._evaluate, model, loader)
        return evaluate_model(model, loader, loss_fn=self._loss_fn, step_fn=self._step_fn, metrics=self._metrics)

    # -- the documented methods ----------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | os.PathLike[str], include_optimizer: bool = True, **how: Any) -> Snapshot:
        """Save everything at `path`; a state with a NaN or Inf is refused. `how`: see `recover.save_checkpoint`."""
        return documented.save_checkpoint(
            path,
            self.model,
            include_optimizer=include_optimizer,
            config=self.config.to_dict(),
            step=self.course.steps_done,
            extra={"stage": self.stages[min(self._stage, len(self.stages) - 1)].name},
            train_history=self.history.column("train_loss"),
            val_history=self.history.column("val_loss"),
            **self._kept(),
            **how,
        )

    def load_checkpoint(self, path: str | os.PathLike[str], load_optimizer: bool = True) -> bool:
        """Load what `save_checkpoint` wrote, all of it or nothing; False if there is nothing sound at `path`.

        `best_model.pth` is the folder `best_model` of a training, if there is no such file.
        """
        return documented.load_checkpoint(stored_at(path), self.model, load_optimizer=load_optimizer, **self._kept())

    def _kept(self) -> dict[str, Any]:
        rig = self.rig or self.last_rig
        return {} if rig is None else {k: v for k, v in rig.kept.items() if k not in ("model", "guard", "loader")}

    def monitor_training_health(self) -> dict[str, bool]:
        """The five documented booleans about model, gradients, losses, parameters, and all of them."""
        rig, losses = self.rig or self.last_rig, {n: self.history.column(f"{n}_loss") for n in ("train", "val")}
        return monitor_training_health(self.model, losses, None if rig is None else rig.optimizer)

    def get_training_stats(self) -> TrainingStats:
        """The documented numbers; the rate includes cuts, the norm is that of the last step."""
        rig = self.rig or self.last_rig
        stats = get_training_stats(
            self.model,
            None if rig is None else rig.optimizer,
            training_history=self.history.column("train_loss"),
            validation_history=self.history.column("val_loss"),
            amp_enabled=self.config.use_amp,
            learning_rate=None if rig is None else next(iter(rig.stability.corrector.rates), None),
        )
        if rig is not None and all(p.grad is None for p in self.model.parameters()):
            stats["current_gradient_norm"] = rig.meter.last_norm
        return stats

    def _save_history(self) -> None:
        folder = self.around.checkpoint_dir or next(reversed(self.run_dirs), None)
        if folder is not None:
            save_history(folder, self.history)


def in_order(
    loss_fn: LossFn | TrainConfig | Mapping[str, Any] | None,
    config: TrainConfig | Mapping[str, Any] | LossFn | None,
    step_fn: StepFn | None,
) -> tuple[LossFn | None, TrainConfig]:
    """The loss and the config, whichever came first; InputError with the right call if they are something else.

    Example:
        >>> in_order({"num_epochs": 3}, torch.nn.functional.mse_loss, None)[1].num_epochs
        3
        >>> in_order(TrainConfig(), None, None)
        Traceback (most recent call last):
            ...
        trimtab.core.errors.InputError: Trainer(model, config) has no loss; call Trainer(model, loss_fn, config), for \
example Trainer(model, torch.nn.functional.mse_loss, config), or Trainer(model, config=config, step_fn=step_fn)
    """
    first, second, call = loss_fn, config, "call Trainer(model, loss_fn, config)"
    if isinstance(first, TrainConfig | Mapping):
        first, second = second, first
        if first is None and step_fn is None:
            raise InputError(
                f"Trainer(model, config) has no loss; {call}, for example Trainer(model, "
                "torch.nn.functional.mse_loss, config), or Trainer(model, config=config, step_fn=step_fn)"
            )
    if first is not None and (isinstance(first, TrainConfig | Mapping) or not callable(first)):
        raise InputError(f"loss_fn is a {type(first).__name__}; expected a function loss_fn(output, target); {call}")
    if second is not None and not isinstance(second, TrainConfig | Mapping):
        raise InputError(f"config is a {type(second).__name__}; expected a TrainConfig or a dict; {call}")
    return first, TrainConfig(**second) if isinstance(second, Mapping) else second or TrainConfig()


def micro_batch(
    model: nn.Module,
    batch: object,
    rig: Rig,
    config: TrainConfig,
    device: torch.device,
    loss_fn: LossFn | None,
    step_fn: StepFn | None,
) -> Tensor:
    """Forward and backward of one micro-batch. The gradient is divided by their number; the returned loss is not."""
    dtype = amp_dtype(config, device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        loss, _ = loss_of(model, batch, loss_fn, step_fn)
    if not isinstance(loss, Tensor):
        raise InputError(f"the loss is a {type(loss).__name__}; expected a tensor of one number, to call backward on")
    rig.guard.observe(loss=loss, batch=batch)
    shared = loss / config.accumulation_steps if config.accumulation_steps > 1 else loss
    scaled: Any = shared if rig.scaler is None else rig.scaler.scale(shared)
    scaled.backward()
    return loss


def ready(scaler: torch.amp.GradScaler | None, device: torch.device) -> None:
    """Initialise the scale, which torch does with the first loss: after a resume there may be none before the step."""
    if scaler is not None:
        scaler.scale(torch.zeros((), device=device, dtype=torch.float32))


def complete_tail(model: nn.Module, factor: float) -> None:
    """Rescale the gradients of an incomplete accumulation to the mean over its micro-batches."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def update(model: nn.Module, rig: Rig, loss: Tensor) -> None:
    """Step through the guard; the average is updated only if the update was accepted."""
    rejected, scale = rig.guard.rejected, _scale(rig)
    rig.guard.step(loss)
    rig.optimizer.zero_grad(set_to_none=True)
    if rig.ema is not None and rig.guard.rejected == rejected and not _scale(rig) < scale:
        rig.ema.update_parameters(model)


def _scale(rig: Rig) -> float:
    """The loss scale if there is an average, which must know of skipped steps. Reading it waits for the GPU."""
    return float(rig.scaler.get_scale()) if rig.scaler is not None and rig.ema is not None else 1.0


def readable(loader: object, *, guarded: bool = True) -> Iterable[object]:
    """The loader as a training reads it: one that can be resumed if possible, else as it is.

    Example:
        >>> readable([1, 2])
        [1, 2]
        >>> readable(7)
        Traceback (most recent call last):
            ...
        trimtab.core.errors.InputError: the training loader is a int; expected a DataLoader, or a list of batches
    """
    if not isinstance(loader, Iterable) or isinstance(loader, str | bytes):
        raise InputError(
            f"the training loader is a {type(loader).__name__}; expected a DataLoader, or a list of batches"
        )
    if num_batches(loader) == 0:
        raise InputError(f"the training loader has no batches{_why(loader)}")
    if guarded and isinstance(loader, DataLoader):
        wrapped: Iterable[object] = resumable(loader)
        return wrapped
    return loader


def loaders_of(stages: Sequence[Stage], loader: object, *, guarded: bool) -> list[Iterable[object]]:
    """What each stage reads: the same loader, or one over the same samples in batches of the stage's own size.

    Example:
        >>> first, second = loaders_of((Stage(), Stage(batch_size=3)), DataLoader(range(6)), guarded=False)
        >>> [batch.tolist() for batch in second]
        [[0, 1, 2], [3, 4, 5]]
    """
    found: dict[int | None, Iterable[object]] = {None: readable(loader, guarded=guarded)}
    for size in {stage.batch_size for stage in stages} - {None}:
        if not isinstance(loader, DataLoader) or loader.batch_size is None:
            raise InputError(
                f"a stage wants batches of {size}, and the training loader is a {type(loader).__name__} whose batches "
                "cannot be changed; expected a DataLoader with a batch_size"
            )
        found[size] = readable(rebatched(loader, size or 1), guarded=guarded)
    return [found[stage.batch_size] for stage in stages]


def rebatched(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """A loader over the same samples in the same order, in batches of another size."""
    return DataLoader(
        loader.dataset,
        batch_size=size,
        sampler=loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def to_measure(loader: Iterable[object] | None) -> Iterable[object] | None:
    """The validation loader, after a check that it has batches."""
    if loader is not None and num_batches(loader) == 0:
        raise InputError(f"the validation loader has no batches{_why(loader)}, or give None: nothing is measured then")
    return loader


def num_batches(loader: object) -> int | None:
    """How many batches an epoch has; None if the loader has no length."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # that of an iterable data set
        return None


def place_of(loader: object) -> object:
    """The loader if it has a state to save, else None."""
    return loader if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else None


def no_batch_error(loader: object, epoch: int) -> InputError:
    """The error for an epoch without a single batch."""
    if epoch == 1:
        return InputError(f"the training loader gave no batch{_why(loader)}")
    return InputError(
        f"the training loader gave no batch in epoch {epoch}: it can be read only once. Give a DataLoader, a list, or "
        "an object whose __iter__ starts from the beginning"
    )


def _why(loader: object) -> str:
    size, drop = getattr(loader, "batch_size", None), bool(getattr(loader, "drop_last", False))
    if size is None:
        return "; give one with data"
    try:
        dataset: Any = getattr(loader, "dataset", None)
        rows = f"{len(dataset)} rows"
    except TypeError:
        rows = "a dataset of unknown length"
    return f": {rows}, batch_size {size}, drop_last {drop}; give more data" + (
        " or a smaller batch_size" if drop else ""
    )


def correct(stability: StabilityMonitor, train_loss: float, val_loss: float | None) -> tuple[list[str], list[Outcome]]:
    """Judge an epoch, and apply the documented factor of each issue, the gravest first, within cool-down and bounds.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> with StabilityMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1)) as stability:
        ...     _ = correct(stability, 1.0, 1.0)
        ...     issues, done = correct(stability, 50.0, 1.0)
        >>> issues, done[0].detail
        (['loss_explosion'], 'LR multiplier 1 -> 0.1, effective LR 0.01')
    """
    issues = check_training_stability(train_loss, val_loss, stability.history, persistence=stability.persistence)
    gravest_first = sorted(issues, key=lambda issue: stability.corrector.factors[issue])
    return issues, [stability.handle_training_instability(issue) for issue in gravest_first]


def correct_epoch(
    stability: StabilityMonitor, train_loss: float, val_loss: float | None, num_bad: int
) -> tuple[list[str], list[Outcome]]:
    """The issues of an epoch and the corrections applied; one NaN among its losses counts, whatever their mean is."""
    issues, outcomes = correct(stability, math.nan if num_bad else train_loss, val_loss)
    return issues, [outcome for outcome in outcomes if outcome.applied]
