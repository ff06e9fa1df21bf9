"""A small sound training, and what the checklist says about a changed one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trimtab.doctor.checklist import Report, Status
from trimtab.doctor.examine import examine
from trimtab.doctor.observed_step import Options
from trimtab.doctor.target import check_target


def data(num: int = 96, size: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num, 6, generator=generator)
    y = (x[:, :3] + 0.1 * torch.randn(num, 3, generator=generator)).argmax(1)
    return list(zip(x.split(size), y.split(size), strict=True))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def sound(**changes: Any) -> dict[str, Any]:
    model = changes.pop("model", None) or net()
    lr = changes.pop("lr", 1e-2)
    given = {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=lr),
        "loader": data(),
        "loss_fn": cross_entropy,
    }
    return {k: v for k, v in (given | changes).items() if v is not None}


def by_hand(step: Any, **changes: Any) -> dict[str, Any]:
    """A training whose step does everything itself: `step(model, x, y, optimizer)`."""
    given = sound(**changes)
    optimizer = given["optimizer"]
    given.pop("loss_fn", None)
    given["step_fn"] = lambda model, batch: step(model, *batch, optimizer)
    return given


def look(given: dict[str, Any], **options: Any) -> Report:
    return examine(check_target(given, lenient=True), Options(**options))


def alarms(report: Report) -> list[str]:
    """Names of what failed or warned, in their order."""
    return [line.name for line in report.lines if line.status in (Status.FAIL, Status.WARN)]


def line(report: Report, name: str) -> Any:
    return next(one for one in report.lines if one.name == name)
