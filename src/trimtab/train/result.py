"""How one run of a recipe ended, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one run of a recipe ended."""

    recipe: str
    arm: str
    fault: str | None
    score_name: str
    score: float
    metrics: Mapping[str, float]
    num_steps: int
    seconds: float
    rejected: int
    weights_finite: bool
    findings: tuple[str, ...]
    actions: tuple[str, ...]
    stopped: str | None
    run_dirs: tuple[str, ...]
    facts: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...] = field(repr=False)


def result_of(
    recipe: str,
    score: str,
    trainer: Trainer,
    arm: str,
    fault: str | None,
    stopped: str | None,
    facts: Mapping[str, Any],
    seconds: float,
) -> Result:
    """What a trainer that is done has to say; `score` is the metric it is judged by (`-mae`: less is better)."""
    history: Sequence[Mapping[str, Any]] = trainer.history.epochs
    last = {name: value for name, value in (history[-1] if history else {}).items() if isinstance(value, float)}
    last.pop("seconds", None)
    state = [t for t in trainer.model.state_dict().values() if t.is_floating_point()]
    name = score.removeprefix("-")
    return Result(
        recipe=recipe,
        arm=arm,
        fault=fault,
        score_name=name,
        score=last.get(name, math.nan),
        metrics=last,
        num_steps=trainer.course.steps_done,
        seconds=round(seconds, 2),
        rejected=trainer.rejected,
        weights_finite=all(bool(t.isfinite().all()) for t in state),
        findings=tuple(dict.fromkeys(finding.name for finding in trainer.findings)),
        actions=tuple(f"step {o.at}: {o.action} ({o.detail})" for o in trainer.outcomes),
        stopped=stopped,
        run_dirs=tuple(str(folder) for folder in trainer.run_dirs),
        facts=dict(facts),
        history=tuple(history),
    )
