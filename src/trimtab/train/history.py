"""What became of each epoch: losses, metrics, rates, norms and memory, written to `history.json` as it grows."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab.train.meter import Meter


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

    def add(self, epoch: Mapping[str, Any]) -> None:
        """Take in an epoch."""
        self.epochs.append(dict(epoch))

    def column(self, name: str) -> list[float]:
        """One number of every epoch that has it."""
        return [epoch[name] for epoch in self.epochs if epoch.get(name) is not None]

    def complete(self, meter: Meter, stage: str) -> None:
        """Put in what is known by now of gradient norms, clipping and rejections in the epochs of a stage."""
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
        """A list of objects, one epoch a line; numbers that JSON has not become "NaN", "Infinity", "-Infinity"."""
        lines = [json.dumps(_plain(epoch), ensure_ascii=False, allow_nan=False) for epoch in self.epochs]
        return "[\n  " + ",\n  ".join(lines) + "\n]\n" if lines else "[]\n"

    def save(self, path: Path) -> None:
        """Write it in the place of an earlier one; a reader never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.write_text(self.to_json(), encoding="utf-8")
        os.replace(new, path)

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"epochs": [dict(epoch) for epoch in self.epochs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.epochs = [dict(epoch) for epoch in state["epochs"]]


def epoch_row(
    course: Any,
    rig: Any,
    train_loss: float,
    measured: Mapping[str, float],
    num_bad: int,
    issues: list[str] | None,
    device: torch.device,
    began: float,
) -> dict[str, Any]:
    """One epoch as it goes into the history; `learning_rates` are those really used by the coming step, per group."""
    row: dict[str, Any] = {"epoch": course.epoch + 1, "stage": rig.stage.name, "train_loss": train_loss}
    row |= {"val_loss" if name == "loss" else name: float(value) for name, value in measured.items()}
    if issues is not None:
        row["issues"] = issues
    return row | {
        "nonfinite_losses": num_bad,
        "learning_rates": rig.stability.keeper.rates,
        "weight_decay": max(rig.stability.keeper.decays, default=0.0),
        "first_step": course.first_step,
        "num_steps": course.step - course.first_step,
        "device": str(device),
        "memory_peak_bytes": memory_peak(device),
        "seconds": round(time.perf_counter() - began, 3),
    }


def memory_peak(device: torch.device) -> int:
    """The most bytes taken since it was last asked (CUDA), or since the process began (elsewhere)."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
