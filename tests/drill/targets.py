"""Small trainings to drill: one driven from outside, one that steps by itself, and some that misbehave."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def build() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 12, generator=generator)
    y = (x[:, :4] + 0.3 * torch.randn(512, 4, generator=generator)).argmax(1)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=5e-3),
        "loader": list(zip(x.split(32), y.split(32), strict=True)),
        "loss_fn": cross_entropy,
    }


def talks() -> dict[str, Any]:
    print("printed by the training")
    return build()


def by_itself() -> dict[str, Any]:
    """A step_fn that does everything, clips and keeps an average."""
    given = build()
    optimizer, model = given["optimizer"], given["model"]
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step_fn(model: nn.Module, batch: Any) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        ema.update_parameters(model)
        return float(loss.detach())

    return {k: v for k, v in given.items() if k != "loss_fn"} | {"step_fn": step_fn, "ema": ema}


def loss_only() -> dict[str, Any]:
    """A step_fn that leaves backward and step to others."""
    given = build()
    given.pop("loss_fn")
    return given | {"step_fn": lambda model, batch: {"loss": cross_entropy(model(batch[0]), batch[1])}}


def scaled() -> dict[str, Any]:
    return build() | {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}


ONE: list[dict[str, Any]] = []


def same_again() -> dict[str, Any]:
    """The same objects whenever it is called."""
    if not ONE:
        ONE.append(build())
    return ONE[0]


def dies() -> dict[str, Any]:
    os._exit(7)


def hangs() -> dict[str, Any]:
    time.sleep(600)
    return build()


def raises() -> dict[str, Any]:
    def fail(output: Any, target: Any) -> Any:
        raise KeyError("no such column")

    return build() | {"loss_fn": fail}


def alarming() -> dict[str, Any]:
    """Wired wrongly to begin with: its optimizer lacks a layer, which is an alarm without any fault."""
    given = build()
    return given | {"optimizer": torch.optim.Adam(given["model"][2:].parameters(), lr=5e-3)}
