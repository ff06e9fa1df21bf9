from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trimtab.advice.recommendations import adviser_for
from trimtab.core.config import Config
from trimtab.core.pipeline import Brain
from trimtab.core.types import FULL_COLUMNS, BrainState, Closing, Kind, Layout, RunInfo, Sample
from trimtab.record.writer import RunWriter

LAYOUT = Layout(names=("w", "b"), kinds=(Kind.GRAD, Kind.GRAD), numel=(4, 2), columns=FULL_COLUMNS)


def make_sample(step: int, loss: float, norm: float, *, fixed: bool = True) -> Sample:
    bad = not math.isfinite(norm)
    row = [norm / math.sqrt(2), norm / 2, 0.0, float(bad), 0.0, 0.0, 0.0]
    return Sample(
        step=step,
        layout=LAYOUT,
        table=np.array([row, row], dtype=np.float32),
        scalars={
            "loss": loss,
            "grad_norm": norm,
            "clip_coef": min(1.0, 1.0 / norm) if not bad else 1.0,
            "rejected": float(bad),
            "nonfinite_grads": 2.0 * bad,
            **({"fixed": 1.0} if fixed else {}),
        },
    )


WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a record from losses and norms, as a guard would: samples, verdicts, decisions, a closing line."""

    def write(
        losses: list[float],
        norms: list[float] | None = None,
        *,
        name: str = "run-1",
        closed: str | None = "closed",
        settings: dict[str, object] | None = None,
        max_bytes: int = 10**9,
        fixed: bool = True,
    ) -> Path:
        norms = norms or [1.0 if math.isfinite(v) else math.nan for v in losses]
        config = Config.from_dict(settings or {"mode": "act"})
        folder = tmp_path / "runs" / name
        writer = RunWriter(folder, max_bytes=max_bytes)
        brain = Brain.from_config(config, adviser_for(config))
        writer.write(
            RunInfo(
                run_id=name,
                started="2025-01-01T00:00:00+00:00",
                config=config.to_dict(),
                versions={"torch": "2.13.0"},
                model="Toy",
                num_parameters=6,
                optimizers=("",),
                rules=("GRAD001",),
            )
        )
        num_findings = num_rejected = 0
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            if step % 50 == 0:
                writer.write(BrainState(step=step, state=brain.state_dict()))
            sample = make_sample(step, loss, norm, fixed=fixed)
            verdict, decision = brain.advance(sample, seen_at=step)
            writer.write(sample)
            if verdict:
                writer.write(verdict)
            if decision.actions:
                writer.write(decision)
            num_findings += len(verdict.findings)
            num_rejected += not math.isfinite(norm)
        if closed:
            writer.write(Closing(steps={"": len(losses)}, rejected=num_rejected, findings=num_findings, reason=closed))
        writer.close()
        return folder

    return write
