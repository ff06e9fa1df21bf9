"""The results of each epoch (`History`), the norms of each step (`Meter`), and where a training stands (`Course`).

The history is written to `history.json` as it grows: losses, metrics, rates, norms and memory. The course is all that
must be restored, beside model and optimizer, to continue exactly.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from trimtab.core.types import Outcome, Record, Sample
from trimtab.train.early_stopping import EarlyStopping, StoppingState

if TYPE_CHECKING:
    from trimtab.compat.monitors.stability import MonitorState, StabilityMonitor
    from trimtab.train.stages import Rig


class HistoryState(TypedDict):
    """What a checkpoint holds of a history."""

    epochs: list[dict[str, Any]]


class CourseState(TypedDict):
    """What a checkpoint holds of a course."""

    epoch: int
    step: int
    steps_done: int
    micro: int
    first_step: int
    last_loss: float
    sums: list[float] | None
    settings: dict[str, object]
    history: HistoryState
    stopping: StoppingState
    stability: MonitorState | None


class History:
    """One dictionary per epoch, in order.

    Example:
        >>> history = History()
        >>> history.add({"epoch": 1, "train_loss": 0.5, "val_loss": float("nan")})
        >>> history.column("train_loss"), history.to_json()
        ([0.5], '[\\n  {"epoch": 1, "train_loss": 0.5, "val_loss": "NaN"}\\n]\\n')
    """

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def add(self, epoch: Mapping[str, object]) -> None:
        """Add an epoch."""
        self.epochs.append(dict(epoch))

    def column(self, name: str) -> list[float]:
        """One value of every epoch that has it."""
        return [epoch[name] for epoch in self.epochs if epoch.get(name) is not None]

    def complete(self, meter: Meter, stage: str) -> None:
        """Add the gradient norms, clipping and rejections known by now to the epochs of a stage."""
        for epoch in self.epochs:
            if epoch.get("stage") != stage:
                continue
            norms = meter.norms(epoch["first_step"], epoch["first_step"] + epoch["num_steps"])
            if norms.num_steps:
                epoch |= {
                    "grad_norm_avg": norms.average,
                    "grad_norm_max": norms.highest,
                    "clipped_frac": norms.clipped_frac,
                    "rejected": norms.num_rejected,
                }

    def to_json(self) -> str:
        """A list of objects, one epoch a line; numbers that JSON lacks become "NaN", "Infinity", "-Infinity"."""
        lines = [json.dumps(_plain(epoch), ensure_ascii=False, allow_nan=False) for epoch in self.epochs]
        return "[\n  " + ",\n  ".join(lines) + "\n]\n" if lines else "[]\n"

    def save(self, path: Path) -> None:
        """Replace the file at once: a reader never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.write_text(self.to_json(), encoding="utf-8")
        os.replace(new, path)

    def state_dict(self) -> HistoryState:
        """Plain data."""
        return {"epochs": [dict(epoch) for epoch in self.epochs]}

    def load_state_dict(self, state: HistoryState) -> None:
        """Continue from where `state_dict` was taken."""
        self.epochs = [dict(epoch) for epoch in state["epochs"]]


def epoch_row(
    course: Course,
    rig: Rig,
    train_loss: float,
    measured: Mapping[str, float],
    num_bad: int,
    issues: list[str] | None,
    device: torch.device,
    began: float,
) -> dict[str, Any]:
    """One epoch as it goes into the history; `learning_rates` are those of the next step, cuts included, per group."""
    row: dict[str, Any] = {"epoch": course.epoch + 1, "stage": rig.stage.name, "train_loss": train_loss}
    row |= {"val_loss" if name == "loss" else name: float(value) for name, value in measured.items()}
    if issues is not None:
        row["issues"] = issues
    return row | {
        "nonfinite_losses": num_bad,
        "learning_rates": rig.stability.corrector.rates,
        "weight_decay": max(rig.stability.corrector.decays, default=0.0),
        "first_step": course.first_step,
        "num_steps": course.step - course.first_step,
        "device": str(device),
        "memory_peak_bytes": memory_peak(device),
        "seconds": round(time.perf_counter() - began, 3),
    }


def memory_peak(device: torch.device) -> int:
    """The peak memory in bytes since the last call (CUDA), or since the process began (elsewhere)."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The gradient norms of some steps before clipping, and how many of the steps were clipped or rejected."""

    average: float
    highest: float
    num_steps: int
    num_clipped: int
    num_rejected: int

    @property
    def clipped_frac(self) -> float:
        """The share of steps that were clipped."""
        return self.num_clipped / self.num_steps if self.num_steps else 0.0


class Meter:
    """A sink that keeps norm, clipping and rejection of each step. It is complete once the guard is closed.

    Example:
        >>> import numpy as np
        >>> from trimtab.core.types import Layout
        >>> meter, empty = Meter(), Layout(names=(), kinds=(), numel=())
        >>> for step, norm in enumerate((2.0, 0.5)):
        ...     scalars = {"grad_norm": norm, "clip_coef": min(1.0, 1.0 / norm)}
        ...     meter.write(Sample(step=step, layout=empty, table=np.empty((0, 7)), scalars=scalars))
        >>> meter.norms(0, 2)
        Norms(average=1.25, highest=2.0, num_steps=2, num_clipped=1, num_rejected=0)
    """

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.losses: dict[int, float] = {}
        self._steps: dict[int, tuple[float, bool, bool]] = {}
        self._seen: set[tuple[int, str]] = set()

    def write(self, record: Record) -> None:
        """Add a step, or an action that was carried out."""
        if isinstance(record, Sample) and record.phase == "train":
            scalars = record.scalars
            clipped = scalars.get("clip_coef", 1.0) < 1.0
            rejected = scalars.get("rejected", 0.0) > 0 or scalars.get("scaler_skipped", 0.0) > 0
            self._steps[record.step] = (scalars.get("grad_norm", math.nan), clipped and not rejected, rejected)
            if "loss" in scalars:
                self.losses[record.step] = float(scalars["loss"])
        elif isinstance(record, Outcome) and record.applied and record.action.kind != "skip":
            key = record.at, record.action.kind
            if key not in self._seen:  # the same action comes again later, with its effect
                self._seen.add(key)
                self.outcomes.append(record)

    def close(self) -> None:
        """Do nothing: a sink without resources."""

    @property
    def last_norm(self) -> float:
        """The gradient norm of the newest step; NaN before there is any."""
        return self._steps[max(self._steps)][0] if self._steps else math.nan

    def norms(self, begin: int, end: int) -> Norms:
        """The norms of the known steps from `begin` to before `end`."""
        steps = [self._steps[i] for i in range(begin, end) if i in self._steps]
        known = [norm for norm, _, _ in steps if math.isfinite(norm)]
        return Norms(
            average=math.fsum(known) / len(known) if known else math.nan,
            highest=max(known, default=math.nan),
            num_steps=len(steps),
            num_clipped=sum(clipped for _, clipped, _ in steps),
            num_rejected=sum(rejected for _, _, rejected in steps),
        )


class Course:
    """Counts epochs, steps and micro-batches, and sums up the losses of the current epoch.

    It goes into checkpoints beside the schedulers, so that a training resumed within an epoch also ends with the same
    history. Losses stay on their device until the epoch is over: no step waits for them.
    """

    def __init__(self, history: History, stopping: EarlyStopping) -> None:
        self.history, self.stopping = history, stopping
        self.stability: StabilityMonitor | None = None
        self.settings: dict[str, object] = {}
        self.changed: dict[str, tuple[object, object]] = {}
        """Settings that differ from those of the loaded checkpoint: its value, and the one here."""
        self.epoch = self.step = self.steps_done = self.micro = self.first_step = 0
        self.last_loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self._sums: Tensor | None = None  # of finite losses, how many they are, how many were not finite

    def begin_stage(self) -> None:
        """Start a stage: its epochs and steps count from 0."""
        self.epoch = self.step = self.micro = self.first_step = 0
        self._sums = None

    def add(self, loss: Tensor) -> None:
        """Add the loss of one micro-batch."""
        self.micro += 1
        self.last_loss = loss
        value = loss.detach().double().reshape(())
        sound = value.isfinite()
        row = torch.stack([value.nan_to_num(0.0, 0.0, 0.0), sound.double(), (~sound).double()])
        self._sums = row if self._sums is None else self._sums.to(row.device) + row

    def step_done(self) -> None:
        """Count an attempted optimizer step."""
        self.micro = 0
        self.step += 1
        self.steps_done += 1

    def epoch_done(self, row: Mapping[str, object]) -> None:
        """End an epoch."""
        self.history.add(row)
        self.epoch, self.first_step = self.epoch + 1, self.step

    def take_mean(self) -> tuple[float, int]:
        """The mean of the finite losses of this epoch, and how many were not finite; then a new epoch begins."""
        total, num, bad = (0.0, 0.0, 0.0) if self._sums is None else self._sums.tolist()
        self._sums = None
        return (total / num if num else float("nan")), int(bad)

    def state_dict(self) -> CourseState:
        """Plain data."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "steps_done": self.steps_done,
            "micro": self.micro,
            "first_step": self.first_step,
            "last_loss": float(self.last_loss.detach()),
            "sums": None if self._sums is None else self._sums.tolist(),
            "settings": dict(self.settings),
            "history": self.history.state_dict(),
            "stopping": self.stopping.state_dict(),
            "stability": None if self.stability is None else self.stability.state_dict(),
        }

    def load_state_dict(self, state: CourseState) -> None:
        """Continue from where `state_dict` was taken."""
        counts: Mapping[str, Any] = state
        for name in ("epoch", "step", "steps_done", "micro", "first_step"):
            setattr(self, name, int(counts[name]))
        self.last_loss = torch.tensor(float(state["last_loss"]), dtype=torch.float32, device="cpu")
        self._sums = None if state["sums"] is None else torch.tensor(state["sums"], dtype=torch.float64, device="cpu")
        saved = state.get("settings", {})
        self.changed = {k: (saved[k], now) for k, now in self.settings.items() if k in saved and saved[k] != now}
        self.history.load_state_dict(state["history"])
        self.stopping.load_state_dict(state["stopping"])
        if self.stability is not None and state["stability"] is not None:
            self.stability.load_state_dict(state["stability"])
