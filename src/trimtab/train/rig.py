"""What one stage of a training runs on: optimizer, schedule, scaler, average and guard, built and closed together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.checkpoint.checkpointer import Checkpointer
from trimtab.core.config import PolicyConfig
from trimtab.guard.guard import Guard
from trimtab.monitor.stability import StabilityMonitor
from trimtab.record.line_sink import LineSink
from trimtab.record.lines import epoch_metrics
from trimtab.record.training_tags import TrainingTagsSink
from trimtab.train.averaging import make_average
from trimtab.train.course import Course
from trimtab.train.meter import Meter
from trimtab.train.progress import Progress
from trimtab.train.schedules import Schedule
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import Stage, make_optimizer, make_scaler, schedule_of
from trimtab.train.unguarded import Unguarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is the same in every stage: where to record and to save, who listens, and whether there is a guard."""

    guarded: bool = True
    sinks: tuple[Any, ...] = ()
    run_dir: Any = None
    checkpoint_dir: Path | None = None
    say: Callable[[str], object] | None = None
    progress: Progress | None = None
    policy: PolicyConfig | None = None
    tags: Any = None
    """Gets the documented TensorBoard tags: a SummaryWriter, anything with `.log()`, or a function of one dict."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the guard, as `Config` knows them."""
    on_finding: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_dir is not None:
            object.__setattr__(self, "checkpoint_dir", Path(self.checkpoint_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The parts of one stage, each knowing the others it needs."""

    stage: Stage
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: Any
    ema: Any
    guard: Any
    stability: StabilityMonitor
    meter: Meter
    checkpointer: Checkpointer | None
    kept: dict[str, Any]
    """What a checkpoint holds, by the names that `Checkpointer.save` knows."""

    def flush(self) -> None:
        """Wait until everything recorded so far was heard: an epoch ends with all of its lines and norms."""
        recorder: Any = getattr(self.guard, "_recorder", None)
        if recorder is not None:
            recorder.flush()

    def validated(self, measured: Mapping[str, float], train_loss: float, around: Surroundings) -> None:
        """Tell the guard what was measured; without one, the line of an epoch is said from here."""
        if "loss" not in measured:
            return
        others = {name: value for name, value in measured.items() if name != "loss"}
        self.guard.validate(measured["loss"], **others)
        if not around.guarded and around.say is not None:
            around.say(epoch_metrics({"Loss": train_loss, "Val loss": measured["loss"], **others}))

    def close(self, reason: str = "closed") -> None:
        """Judge what is under way, finish the record, take every hook off."""
        try:
            self.guard.close(reason=reason)
        finally:
            self.stability.close()


def build_rig(
    model: nn.Module,
    stage: Stage,
    config: TrainConfig,
    course: Course,
    around: Surroundings,
    *,
    loader: Any,
    total_steps: int | None,
    device: torch.device,
    checkpoint_dir: Path | None,
    run_dir: Any,
) -> Rig:
    """Build the parts of a stage for a model whose frozen parts are frozen already."""
    optimizer = make_optimizer(model, stage, config)
    schedule = schedule_of(optimizer, stage, config, total_steps)
    scaler = make_scaler(stage, config, device)
    ema = make_average(model, config.ema_decay)
    clip = config.max_grad_norm if stage.clip is None else stage.clip
    meter = Meter()
    kept = {"model": model, "optimizer": optimizer, "scheduler": {"schedule": schedule, "course": course}}
    kept |= {"scaler": scaler, "ema": ema, "loader": loader}
    checkpointer: Checkpointer | None = None
    guard: Any
    if not around.guarded:
        guard = Unguarded(optimizer, scaler)
    else:
        if checkpoint_dir is not None:
            checkpointer = Checkpointer(checkpoint_dir, keep_last=config.keep_last, keep_best=config.monitor)
        tags = [TrainingTagsSink(around.tags)] if around.tags is not None else []
        lines = [LineSink(config.lines, write=around.say, bar=around.progress)] if config.lines else []
        settings: dict[str, Any] = {"full_every": config.full_every, "checkpoint_every": config.checkpoint_every}
        settings |= dict(around.guard)
        if around.policy is not None:
            settings["policy"] = around.policy
        guard = Guard(
            model,
            optimizer,
            settings,
            clip=clip,
            mode=config.mode,
            # An average must not follow a step that was rejected: with one, each step is judged before the next.
            lag=None if ema is None else 0,
            scheduler=kept["scheduler"],
            scaler=scaler,
            ema=ema,
            loader=loader,
            checkpoint=checkpointer,
            sinks=[meter, *lines, *tags, *around.sinks],
            on_finding=around.on_finding,
            run_dir=run_dir,
        )
        kept["guard"] = guard
    stability = StabilityMonitor(model, optimizer, clip or float("inf"), scaler, around.tags, policy=around.policy)
    course.stability = stability
    return Rig(
        stage=stage,
        optimizer=optimizer,
        schedule=schedule,
        scaler=scaler,
        ema=ema,
        guard=guard,
        stability=stability,
        meter=meter,
        checkpointer=checkpointer,
        kept=kept,
    )
