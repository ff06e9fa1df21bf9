"""Where a training stands: all that must be put back, beside model and optimizer, to go on exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.history import History


class Course:
    """Counts epochs, steps and micro-batches, and sums up the losses of the epoch under way.

    It goes into checkpoints beside the schedulers, so that a training resumed within an epoch also ends with the same
    history. Losses stay on their device until the epoch is over: no step waits for them.
    """

    def __init__(self, history: History, stopping: EarlyStopping) -> None:
        self.history, self.stopping = history, stopping
        self.stability: Any = None
        self.settings: dict[str, Any] = {}
        self.changed: dict[str, tuple[Any, Any]] = {}
        """Settings that a checkpoint was saved with, and those here, where they differ."""
        self.epoch = self.step = self.steps_done = self.micro = self.first_step = 0
        self.last_loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self._sums: Tensor | None = None  # of finite losses, how many they are, how many were not finite

    def begin_stage(self) -> None:
        """Epochs and steps of a stage count from 0."""
        self.epoch = self.step = self.micro = self.first_step = 0
        self._sums = None

    def add(self, loss: Tensor) -> None:
        """Take in the loss of one micro-batch."""
        self.micro += 1
        self.last_loss = loss
        value = loss.detach().double().reshape(())
        sound = value.isfinite()
        row = torch.stack([value.nan_to_num(0.0, 0.0, 0.0), sound.double(), (~sound).double()])
        self._sums = row if self._sums is None else self._sums.to(row.device) + row

    def step_done(self) -> None:
        """An optimizer step was attempted."""
        self.micro = 0
        self.step += 1
        self.steps_done += 1

    def epoch_done(self, row: Mapping[str, Any]) -> None:
        """An epoch is over."""
        self.history.add(row)
        self.epoch, self.first_step = self.epoch + 1, self.step

    def take_mean(self) -> tuple[float, int]:
        """The mean of the finite losses of this epoch, and how many were not finite; then a new epoch begins."""
        total, num, bad = (0.0, 0.0, 0.0) if self._sums is None else self._sums.tolist()
        self._sums = None
        return (total / num if num else float("nan")), int(bad)

    def state_dict(self) -> dict[str, Any]:
        """Plain data and one tensor."""
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        for name in ("epoch", "step", "steps_done", "micro", "first_step"):
            setattr(self, name, int(state[name]))
        self.last_loss = torch.tensor(float(state["last_loss"]), dtype=torch.float32, device="cpu")
        self._sums = None if state["sums"] is None else torch.tensor(state["sums"], dtype=torch.float64, device="cpu")
        saved = state.get("settings", {})
        self.changed = {k: (saved[k], now) for k, now in self.settings.items() if k in saved and saved[k] != now}
        self.history.load_state_dict(state["history"])
        self.stopping.load_state_dict(state["stopping"])
        if self.stability is not None and state["stability"] is not None:
            self.stability.load_state_dict(state["stability"])
