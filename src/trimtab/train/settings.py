"""Every number of a training in one frozen record, under the documented names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from trimtab.core.errors import ConfigError

SCHEDULES = ("none", "onecycle", "cosine", "cosine_restart", "step", "exponential", "plateau", "lambda")
OPTIMIZERS = ("adamw", "adam", "sgd")
MODES = ("observe", "advise", "act", "raise")
WHOLE: tuple[str, ...] = (
    "batch_size",
    "num_epochs",
    "max_steps",
    "accumulation_steps",
    "patience",
    "warmup_steps",
    "step_size",
)
WHOLE += ("t_mult", "full_every", "checkpoint_every", "keep_last", "seed")
NUMBERS: tuple[str, ...] = (
    "learning_rate",
    "weight_decay",
    "momentum",
    "max_grad_norm",
    "min_delta",
    "warmup_init_lr",
    "min_lr",
    "min_lr_ratio",
)
NUMBERS += ("pct_start", "div_factor", "gamma", "ema_decay")
OPTIONAL = ("max_grad_norm", "max_steps", "ema_decay")
AMP_DTYPES = ("auto", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The settings of a `Trainer`.

    `max_grad_norm` clips (None: no clipping). With `use_amp` the forward runs in `amp_dtype`: `auto` is float16 on CUDA
    and bfloat16 elsewhere; float16 gets a scaler. `scheduler_type` is one of `SCHEDULES`, stepped with every optimizer
    step; `warmup_steps` lead from `warmup_init_lr` to the base rate. Training ends after `num_epochs`, `max_steps`, or
    `patience` epochs in which `monitor` did not improve by `min_delta` (0: no early stopping; `-val_loss`: less is
    better); with `patience` the final weights are those of the best epoch. `ema_decay` keeps an average of the weights,
    which is then what is evaluated. `mode` is that of the guard; with `corrective`, losses are judged after each epoch
    as well and the documented corrections are made.
    `checkpoint_every` adds checkpoints within epochs to those at their ends. With `min_lr_ratio` the
    schedule `cosine` ends at that part of each group's own rate.

    Example:
        >>> from trimtab.train.settings import TrainConfig
        >>> config = TrainConfig(learning_rate=0.01, scheduler_type="onecycle")
        >>> config.max_grad_norm, config.scheduler_type
        (1.0, 'onecycle')
        >>> TrainConfig(batch_size=0)
        Traceback (most recent call last):
            ...
        trimtab.core.errors.ConfigError: batch_size is 0; expected a number above 0
    """

    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    optimizer: str = "adamw"
    momentum: float = 0.9
    max_grad_norm: float | None = 1.0
    use_amp: bool = False
    amp_dtype: str = "auto"
    batch_size: int = 32
    num_epochs: int = 10
    max_steps: int | None = None
    accumulation_steps: int = 1
    patience: int = 0
    min_delta: float = 1e-4
    monitor: str = "-val_loss"
    scheduler_type: str = "cosine"
    warmup_steps: int = 0
    warmup_init_lr: float = 0.0
    min_lr: float = 0.0
    min_lr_ratio: float = 0.0
    pct_start: float = 0.1
    div_factor: float = 25.0
    gamma: float = 0.1
    step_size: int = 0
    t_mult: int = 1
    ema_decay: float | None = None
    mode: str = "advise"
    corrective: bool = False
    full_every: int = 50
    lines: str | None = "b8"
    checkpoint_every: int = 0
    keep_last: int = 3
    device: str = "auto"
    seed: int = 42

    def __post_init__(self) -> None:
        _one_of("scheduler_type", self.scheduler_type, SCHEDULES)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("amp_dtype", self.amp_dtype, AMP_DTYPES)
        _one_of("mode", self.mode, MODES)
        for name, kind in (*((name, int) for name in WHOLE), *((name, int | float) for name in NUMBERS)):
            value = getattr(self, name)
            fine = isinstance(value, kind) and not isinstance(value, bool)
            wanted = "a whole number" if kind is int else "a number"
            _check(name, value, fine or (value is None and name in OPTIONAL), wanted)
        positive = (
            "learning_rate",
            "batch_size",
            "num_epochs",
            "accumulation_steps",
            "t_mult",
            "keep_last",
            "div_factor",
        )
        for name in positive:
            _check(name, getattr(self, name), getattr(self, name) > 0, "a number above 0")
        for name in ("weight_decay", "patience", "min_delta", "warmup_steps", "warmup_init_lr", "checkpoint_every"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("max_grad_norm", "max_steps"):
            value = getattr(self, name)
            _check(name, value, value is None or value > 0, "a number above 0, or None")
        decay = self.ema_decay
        _check("ema_decay", decay, decay is None or 0 <= decay < 1, "a number from 0 to below 1, or None")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


UltraOptimizedConfig = partial(
    TrainConfig,
    max_grad_norm=1.0,
    use_amp=True,
    learning_rate=1e-3,
    weight_decay=1e-4,
    patience=10,
    min_delta=1e-4,
    batch_size=32768,
    num_epochs=100,
    scheduler_type="cosine",
    warmup_steps=1000,
    max_steps=100_000,
    corrective=True,
)
"""A `TrainConfig` with the defaults of the SEO system; any of them can be given.

Its warm-up of 1000 steps is real here, and never takes more than half of a run.
"""


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(known)}")


def _check(name: str, value: object, fine: bool, expected: str) -> None:
    if not fine:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")
