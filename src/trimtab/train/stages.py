"""A training in stages: what is frozen, which part learns how fast, and everything that is built for each stage.

`Rig` holds the parts that one stage runs on (optimizer, schedule, scaler, average and guard), built and closed
together; `Unguarded` replaces the guard in the control arm.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trimtab.checkpoint.checkpointer import Checkpointer
from trimtab.compat.line_sink import LineSink
from trimtab.compat.lines import epoch_metrics
from trimtab.compat.monitors.stability import StabilityMonitor
from trimtab.compat.training_tags import TrainingTagsSink
from trimtab.core.config import PolicyConfig
from trimtab.core.errors import InputError
from trimtab.core.types import Finding
from trimtab.guard.guard import Guard
from trimtab.train.history import Course, Meter
from trimtab.train.progress import Progress
from trimtab.train.schedules import Schedule, make_schedule
from trimtab.train.settings import TrainConfig

RunDir = str | os.PathLike[str] | bool | None
"""Where to record: None for a new folder in `trimtab_runs`, False for nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a training.

    `frozen` and the keys of `lr_factors` are the beginnings of parameter names: `backbone` means `backbone.*`. The rate
    of a part is the stage's `learning_rate` (that of the config unless given) times its factor, else times 1. Frozen
    parts stay in evaluation mode, so that their running statistics stay. `scaler` are arguments of the GradScaler.
    `batch_size` is another one than that of the training's `DataLoader`. What is None comes from the config.

    Example:
        >>> first = Stage(name="head", epochs=30, frozen=("backbone",))
        >>> second = Stage(name="all", epochs=110, lr_factors={"": 0.5, "backbone": 0.05})
        >>> second.factor_of("backbone.0.weight"), second.factor_of("head.weight")
        (0.05, 0.5)
    """

    name: str = "train"
    epochs: int = 1
    frozen: tuple[str, ...] = ()
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    clip: float | None = None
    scheduler_type: str | None = None
    scaler: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None

    def factor_of(self, name: str) -> float:
        """The factor of the longest beginning that fits."""
        fitting = [part for part in self.lr_factors if part == "" or _within(name, part)]
        return float(self.lr_factors[max(fitting, key=len)]) if fitting else 1.0


def check_stages(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Raise InputError before training for what would fail in a later stage."""
    if not any(True for _ in model.parameters()):
        raise InputError(f"the model, a {type(model).__name__}, has no parameters; there is nothing to train")
    if len({stage.name for stage in stages}) != len(stages):
        raise InputError("two stages have the same name; give each its own: it names the folder of checkpoints")
    for stage in stages:
        if not re.fullmatch(r"\w[\w. -]*", stage.name):
            raise InputError(f"a stage is named {stage.name!r}; expected letters, digits, - and _: it names a folder")
        learning = [name for name in _checked(model, stage) if not any(_within(name, part) for part in stage.frozen)]
        if not learning:
            raise InputError(f"stage {stage.name!r} freezes every parameter; leave at least one part out of `frozen`")


def freeze(model: nn.Module, stage: Stage) -> None:
    """Let exactly the parameters of this stage learn; an unknown part is an error."""
    _checked(model, stage)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(_within(name, part) for part in stage.frozen))


def _checked(model: nn.Module, stage: Stage) -> list[str]:
    """The names of all parameters, after a check that each part of the stage is among them."""
    names = [name for name, _ in model.named_parameters()]
    for part in (*stage.frozen, *(p for p in stage.lr_factors if p)):
        if not any(_within(name, part) for name in names):
            raise InputError(
                f"stage {stage.name!r} names the part {part!r}, but no parameter name begins with it; "
                f"expected the beginning of one of {', '.join(names[:4])}, ..."
            )
    return names


def set_training(model: nn.Module, stage: Stage) -> None:
    """Set training mode, but evaluation mode for frozen parts."""
    model.train()
    for name, module in model.named_modules():
        if name and any(_within(name, part) for part in stage.frozen):
            module.eval()


def make_optimizer(model: nn.Module, stage: Stage, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a stage, one parameter group for each factor, in the order of their first parameter.

    Example:
        >>> model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
        >>> stage = Stage(lr_factors={"": 0.5, "backbone": 0.05})
        >>> [group["lr"] for group in make_optimizer(model, stage, TrainConfig(learning_rate=0.1)).param_groups]
        [0.005000000000000001, 0.05]
    """
    base = config.learning_rate if stage.learning_rate is None else stage.learning_rate
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(stage.factor_of(name), []).append(parameter)
    given: list[dict[str, object]] = [{"params": some, "lr": base * factor} for factor, some in groups.items()]
    if config.optimizer == "sgd":
        return torch.optim.SGD(given, lr=base, momentum=config.momentum, weight_decay=config.weight_decay)
    if config.optimizer == "adam":
        return torch.optim.Adam(given, lr=base, weight_decay=config.weight_decay)
    return torch.optim.AdamW(given, lr=base, weight_decay=config.weight_decay)


def schedule_of(
    optimizer: torch.optim.Optimizer, stage: Stage, config: TrainConfig, total_steps: int | None
) -> Schedule:
    """The schedule of a stage, over all of its steps."""
    return make_schedule(
        optimizer,
        stage.scheduler_type or config.scheduler_type,
        total_steps=total_steps,
        warmup_steps=config.warmup_steps,
        warmup_init_lr=config.warmup_init_lr,
        min_lr=config.min_lr,
        min_lr_ratio=config.min_lr_ratio,
        pct_start=config.pct_start,
        div_factor=config.div_factor,
        gamma=config.gamma,
        step_size=config.step_size,
        t_mult=config.t_mult,
    )


def num_steps(stage: Stage, config: TrainConfig, num_batches: int | None) -> int | None:
    """The most optimizer steps of a stage; None if neither loader nor config limits them."""
    if num_batches is None:
        return config.max_steps
    total = math.ceil(num_batches / config.accumulation_steps) * stage.epochs
    return total if config.max_steps is None else min(total, config.max_steps)


def amp_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The dtype of the forward pass; None without mixed precision."""
    if not config.use_amp:
        return None
    known = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return known.get(config.amp_dtype, torch.float16 if device.type == "cuda" else torch.bfloat16)


def make_scaler(stage: Stage, config: TrainConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """A GradScaler for float16; None for other dtypes, which need none."""
    if amp_dtype(config, device) is not torch.float16:
        return None
    return torch.amp.GradScaler(device.type, **dict(stage.scaler))


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(part if part.endswith(".") else f"{part}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all stages share: where to record and to save, the sinks, and whether there is a guard."""

    guarded: bool = True
    sinks: tuple[Any, ...] = ()
    run_dir: RunDir = None
    checkpoint_dir: Path | None = None
    say: Callable[[str], object] | None = None
    progress: Progress | None = None
    policy: PolicyConfig | None = None
    tags: Any = None
    """Gets the documented TensorBoard tags: a SummaryWriter, anything with `.log()`, or a function of one dict."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the guard, as `Config` knows them."""
    on_finding: Callable[[Finding], object] | None = None
    distributed: bool = False
    """Average gradients over the processes of the default group, with DistributedDataParallel in every stage."""

    def __post_init__(self) -> None:
        if self.checkpoint_dir is not None:
            object.__setattr__(self, "checkpoint_dir", Path(self.checkpoint_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The parts that one stage runs on."""

    stage: Stage
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: torch.amp.GradScaler | None
    ema: AveragedModel | None
    guard: Guard | Unguarded
    stability: StabilityMonitor
    meter: Meter
    checkpointer: Checkpointer | None
    kept: dict[str, object]
    """What a checkpoint holds, by the argument names of `Checkpointer.save`."""

    def flush(self) -> None:
        """Wait until the sinks have everything recorded so far, so that an epoch ends with all its lines and norms."""
        self.guard.flush()

    def validated(self, measured: Mapping[str, float], train_loss: float, around: Surroundings) -> None:
        """Pass the measured values to the guard; without one, print the line of an epoch here."""
        if "loss" not in measured:
            return
        others = {name: value for name, value in measured.items() if name != "loss"}
        self.guard.validate(measured["loss"], **others)
        if not around.guarded and around.say is not None:
            around.say(epoch_metrics({"Loss": train_loss, "Val loss": measured["loss"], **others}))

    def close(self, reason: str = "closed") -> None:
        """Judge the last steps, finish the record, remove every hook."""
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
    loader: object,
    total_steps: int | None,
    device: torch.device,
    checkpoint_dir: Path | None,
    run_dir: RunDir,
) -> Rig:
    """Build the parts of a stage for a model whose frozen parts are frozen already."""
    optimizer = make_optimizer(model, stage, config)
    schedule = schedule_of(optimizer, stage, config, total_steps)
    scaler = make_scaler(stage, config, device)
    ema = make_average(model, config.ema_decay)
    clip = config.max_grad_norm if stage.clip is None else stage.clip
    meter = Meter()
    schedulers = {"schedule": schedule, "course": course}
    kept: dict[str, object] = {"model": model, "optimizer": optimizer, "scheduler": schedulers}
    kept |= {"scaler": scaler, "ema": ema, "loader": loader}
    checkpointer: Checkpointer | None = None
    guard: Guard | Unguarded
    if not around.guarded:
        guard = Unguarded(optimizer, scaler)
    else:
        if checkpoint_dir is not None:
            checkpointer = Checkpointer(checkpoint_dir, keep_last=config.keep_last, keep_best=config.monitor)
        tags = [TrainingTagsSink(around.tags)] if around.tags is not None else []
        lines = [LineSink(config.lines, write=around.say, bar=around.progress)] if config.lines else []
        settings: dict[str, object] = {"full_every": config.full_every, "checkpoint_every": config.checkpoint_every}
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
            scheduler=schedulers,
            scaler=scaler,
            ema=ema,
            loader=loader,
            checkpoint=checkpointer,
            sinks=[meter, *lines, *tags, *around.sinks],
            on_finding=around.on_finding,
            run_dir=run_dir,
        )
        if total_steps is not None:
            guard.observe(total_steps=total_steps)
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


def make_average(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """An exponential moving average of weights and buffers by torch; None without a decay.

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = make_average(model, 0.5)
        >>> for value in (1.0, 3.0):
        ...     _ = nn.init.constant_(model.weight, value)
        ...     average.update_parameters(model)
        >>> average.module.weight.item()
        2.0
    """
    if decay is None:
        return None
    follow = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=follow, use_buffers=True)


def averaged_or(model: nn.Module, average: AveragedModel | None) -> nn.Module:
    """The model to evaluate: the average once it has begun, else the model itself."""
    if average is None or int(average.n_averaged) == 0:
        return model
    inner: nn.Module = average.module
    return inner


class Unguarded:
    """Steps the optimizer as a plain loop would: no clipping, no rejection, no record, no checkpoint.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> bare = Unguarded(torch.optim.SGD([weight], lr=1.0))
        >>> (weight * float("nan")).sum().backward()
        >>> bare.step(None)
        >>> bare.rejected, bool(weight.isnan())
        (0, True)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer, self._scaler = optimizer, scaler
        self.findings: list[Finding] = []
        self.rejected = 0
        self.run_dir = None

    def step(self, loss: object, batch: object = None) -> None:
        """Step, whatever the gradients hold."""
        if self._scaler is None:
            self._optimizer.step()
            return
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def flush(self) -> None:
        """Do nothing: nothing is recorded."""

    def observe(self, loss: object = None, batch: object = None, **scalars: object) -> None:
        """Do nothing."""

    def validate(self, loss: object, **metrics: object) -> None:
        """Do nothing."""

    def close(self, reason: str = "closed") -> None:
        """Do nothing."""
