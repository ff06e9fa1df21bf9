"""A training in stages: what is frozen, which part learns how fast, and everything that is built anew for it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trimtab.core.errors import InputError
from trimtab.train.schedules import Schedule, make_schedule
from trimtab.train.settings import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a training.

    `frozen` and the keys of `lr_factors` are the beginnings of parameter names: `backbone` means `backbone.*`. The rate
    of a part is the stage's `learning_rate` (that of the config unless given) times its factor, else times 1. Frozen
    parts are also left in evaluation mode, so that their running statistics stay. `scaler` are arguments of the
    GradScaler. What is None is as the config says.

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

    def factor_of(self, name: str) -> float:
        """The factor of the longest beginning that fits."""
        fitting = [part for part in self.lr_factors if part == "" or _within(name, part)]
        return float(self.lr_factors[max(fitting, key=len)]) if fitting else 1.0


def check_stages(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Tell before anything is trained what would not work in a later stage."""
    if not any(True for _ in model.parameters()):
        raise InputError(f"the model, a {type(model).__name__}, has no parameters; there is nothing to train")
    if len({stage.name for stage in stages}) != len(stages):
        raise InputError("two stages have the same name; give each its own: checkpoints lie under them")
    for stage in stages:
        if not re.fullmatch(r"\w[\w. -]*", stage.name):
            raise InputError(f"a stage is named {stage.name!r}; expected letters, digits, - and _: it names a folder")
        learning = [name for name in _checked(model, stage) if not any(_within(name, part) for part in stage.frozen)]
        if not learning:
            raise InputError(f"stage {stage.name!r} freezes every parameter; leave at least one part out of `frozen`")


def freeze(model: nn.Module, stage: Stage) -> None:
    """Let exactly the parameters of this stage learn; a part that is not there is an error."""
    _checked(model, stage)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(_within(name, part) for part in stage.frozen))


def _checked(model: nn.Module, stage: Stage) -> list[str]:
    """The names of all parameters, if each part that the stage names is among them."""
    names = [name for name, _ in model.named_parameters()]
    for part in (*stage.frozen, *(p for p in stage.lr_factors if p)):
        if not any(_within(name, part) for name in names):
            raise InputError(
                f"stage {stage.name!r} names the part {part!r}, and no parameter begins so; "
                f"expected the beginning of one of {', '.join(names[:4])}, ..."
            )
    return names


def set_training(model: nn.Module, stage: Stage) -> None:
    """Training mode, but for what is frozen: its running statistics and dropout are those of evaluation."""
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
    given: list[dict[str, Any]] = [{"params": some, "lr": base * factor} for factor, some in groups.items()]
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
    """How many optimizer steps a stage will take at most; None where neither loader nor config says."""
    if num_batches is None:
        return config.max_steps
    total = math.ceil(num_batches / config.accumulation_steps) * stage.epochs
    return total if config.max_steps is None else min(total, config.max_steps)


def amp_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """What the forward is computed in; None without mixed precision."""
    if not config.use_amp:
        return None
    known = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return known.get(config.amp_dtype, torch.float16 if device.type == "cuda" else torch.bfloat16)


def make_scaler(stage: Stage, config: TrainConfig, device: torch.device) -> Any:
    """A GradScaler for float16, which needs one; None for everything else, which does not."""
    if amp_dtype(config, device) is not torch.float16:
        return None
    return torch.amp.GradScaler(device.type, **dict(stage.scaler))


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(part if part.endswith(".") else f"{part}.")
