"""`trimtab demo`: a real training that breaks, beside the same one under a guard."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit, fail

if TYPE_CHECKING:
    from trimtab.train.demo import DemoResult

NAME = "demo"


@command
def run(
    quick: Annotated[bool, typer.Option("--quick", help="Two epochs: a few seconds, less to see.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another seed, another run.")] = 0,
    runs_dir: Annotated[
        Path | None,
        typer.Option(
            "--dir", envvar="TRIMTAB_DIR", help="Where the guarded run is recorded.", show_default="trimtab_runs"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Watch a training break, and the same one survive under a guard.

    A small network learns handwritten digits three times: undisturbed, with faults, and with the same faults under a
    guard. The faults: one NaN pixel in one image, and a learning rate 300 times too high for five steps.
    """
    if os.environ.get("TRIMTAB_DISABLE") not in (None, "", "0"):
        fail("TRIMTAB_DISABLE is set, so there is no guard to show; unset it and try again")
    from trimtab.cli._demo_view import progress_on, show_intro, show_result
    from trimtab.core.config import DEFAULT_DIR
    from trimtab.core.printable import FINDINGS_LOG, silenced
    from trimtab.train.demo import Plan, run_demo

    plan = Plan(seed=seed, num_epochs=2, nan_step=25) if quick else Plan(seed=seed)
    began = time.perf_counter()
    runs_dir = runs_dir or Path(DEFAULT_DIR)
    if as_json:
        with silenced(FINDINGS_LOG):
            result = run_demo(plan, runs_dir, lambda step, arms: None)
        page = _write_page(result)
        emit(_data(result, page, time.perf_counter() - began))
        return OK
    out = console()
    show_intro(out, plan)
    # Findings are shown at the end; in the log as well they would tear the bars apart.
    with silenced(FINDINGS_LOG), progress_on(out, plan) as progress:
        result = run_demo(plan, runs_dir, progress)
    page = _write_page(result)
    show_result(out, result, page, time.perf_counter() - began)
    return OK


def _write_page(result: DemoResult) -> Path | None:
    if result.run_dir is None:
        return None
    from trimtab.record.reader import read_run
    from trimtab.report.html import write_html

    return write_html(read_run(result.run_dir))


def _data(result: DemoResult, page: Path | None, seconds: float) -> dict[str, object]:
    plan = result.plan
    return {
        "seed": plan.seed,
        "num_steps": plan.num_steps,
        "faults": {"nan_pixel_step": plan.nan_step, "lr_spike_step": plan.spike_step},
        "arms": result.arms,
        "findings": result.findings,
        "run_dir": str(result.run_dir) if result.run_dir is not None else None,
        "html": str(page) if page is not None else None,
        "seconds": round(seconds, 2),
    }
