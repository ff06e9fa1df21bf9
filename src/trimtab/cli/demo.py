"""`trimtab demo`: a real training that breaks, beside the same one under a guard."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit, fail

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from trimtab.train.demo import Arm, DemoResult, Plan, Progress

NAME = "demo"
ARMS = {
    "clean": "no faults: what should come out",
    "unguarded": "with the faults",
    "guarded": "with the faults, under trimtab.Guard",
}


@command
def run(
    quick: Annotated[bool, typer.Option("--quick", help="Two epochs: a few seconds, less to see.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another seed, another run.")] = 0,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Where to record; `trimtab_runs/<id>` unless given.", show_default=False),
    ] = None,
    runs_dir: Annotated[Path | None, typer.Option("--dir", envvar="TRIMTAB_DIR", hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Watch a training break, and the same one survive under a guard.

    A small network learns handwritten digits three times: undisturbed, with faults, and with the same faults under a
    guard. The faults: one NaN pixel in one image, and a learning rate 300 times too high for five steps.
    """
    if os.environ.get("TRIMTAB_DISABLE") not in (None, "", "0"):
        fail("TRIMTAB_DISABLE is set, so there is no guard to show; unset it and try again")
    from trimtab.core.config import DEFAULT_DIR
    from trimtab.core.printable import FINDINGS_LOG, silenced
    from trimtab.train.demo import Plan, run_demo

    plan = Plan(seed=seed, num_epochs=2, nan_step=25) if quick else Plan(seed=seed)
    began = time.perf_counter()
    runs_dir = runs_dir or Path(DEFAULT_DIR)
    if as_json:
        with silenced(FINDINGS_LOG):
            result = run_demo(plan, runs_dir, lambda step, arms: None, run_dir)
        page = _write_page(result)
        emit(_data(result, page, time.perf_counter() - began))
        return OK
    out = console()
    _show_intro(out, plan)
    # Findings are shown at the end; log lines would break the progress bars.
    with silenced(FINDINGS_LOG), _progress_on(out, plan) as progress:
        result = run_demo(plan, runs_dir, progress, run_dir)
    page = _write_page(result)
    _show_result(out, result, page, time.perf_counter() - began)
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


def _show_intro(out: Console, plan: Plan) -> None:
    """Print what is about to happen."""
    from rich.text import Text

    from trimtab.train.demo import NUM_TRAIN, SPIKE_FACTOR, SPIKE_STEPS

    out.print(Text(f"A small CNN with BatchNorm learns {NUM_TRAIN:,} handwritten digits, three times.", style="bold"))
    last = plan.spike_step + SPIKE_STEPS - 1
    out.print(f"  fault 1, step {plan.nan_step}: one pixel of one image is NaN")
    out.print(f"  fault 2, steps {plan.spike_step} to {last}: the learning rate is {SPIKE_FACTOR:g} times too high")
    out.print("  All three have the same seed, batches and settings.\n")


@contextmanager
def _progress_on(out: Console, plan: Plan) -> Iterator[Progress]:
    """Three live bars on a terminal, a plain line per epoch elsewhere."""
    if not out.is_terminal:
        yield _plain_progress(out, plan)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    with Bars(
        TextColumn("  {task.description:<10}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
        TextColumn("loss {task.fields[loss]:<8}  test accuracy {task.fields[accuracy]:>6}"),
        console=out,
    ) as bars:
        tasks = [bars.add_task(name, total=plan.num_steps, loss="", accuracy="") for name in ARMS]

        def report(step: int, arms: list[Arm]) -> None:
            for task, arm in zip(tasks, arms, strict=True):
                bars.update(task, completed=step, loss=_number(arm.loss), accuracy=_percent(arm.accuracy))

        yield report


def _plain_progress(out: Console, plan: Plan) -> Progress:
    per_epoch = plan.num_steps // plan.num_epochs

    def report(step: int, arms: list[Arm]) -> None:
        if step % per_epoch == 0:
            states = "  ".join(f"{a.name} {_number(a.loss)}" for a in arms)
            out.print(f"  step {step:>3}/{plan.num_steps}  loss: {states}")

    return report


def _show_result(out: Console, result: DemoResult, page: Path | None, seconds: float) -> None:
    """The arms side by side, what the guard found, and where to go from here."""
    from rich.padding import Padding
    from rich.text import Text

    from trimtab.report.chart import BAD, sparkline
    from trimtab.report.text import wrapped

    width = min(out.width, 100)
    out.print()
    out.print(Padding(_table(result), (0, 0, 0, 2), expand=False))
    out.print(f"\n{_conclusion(result)}")
    out.print(Text.assemble(("\nTraining loss", "bold"), " (log scale)"))
    every_loss = [v for arm in result.arms for v in arm.losses]
    for arm in result.arms:
        line = Text(f"  {arm.name:<10} {sparkline(arm.losses, 62, beside=every_loss)}")
        line.highlight_regex(BAD, "bold red")
        out.print(line)
    out.print(Text("\nWhat the guard found, and did", style="bold"))
    actions = _actions(result.run_dir)
    for finding in result.findings:
        out.print(Text.assemble(f"  step {finding.step:>3}  ", (finding.code, "bold"), " ", (finding.name, "red")))
        out.print(wrapped(finding.message, width, " " * 12))
        for point in finding.advice[:1]:
            out.print(wrapped(point, width, f"{'':10}→ ", style="green"))
        for text in actions.get((finding.step, finding.code), ()):
            out.print(wrapped(text, width, f"{'':6}done: ", style="cyan"))
    if not result.findings:
        out.print("  nothing")
    out.print(Text.assemble(("\nNext", "bold"), (f"  (this took {seconds:.0f} s)", "dim")))
    if page is not None:
        out.print(f"  open {page}", soft_wrap=True)
    if result.run_dir is not None:
        out.print(f"  trimtab report {result.run_dir}", soft_wrap=True)
        out.print(f"  trimtab replay {result.run_dir}", soft_wrap=True)
    if result.findings:
        out.print(f"  trimtab explain {result.findings[0].code}")


def _actions(run_dir: Path | None) -> dict[tuple[int, str], list[str]]:
    """What was done about which finding, by the record. That an update was skipped is in its message already."""
    if run_dir is None:
        return {}
    from trimtab.record.reader import read_run

    record, found = read_run(run_dir), dict[tuple[int, str], list[str]]()
    for decision in record.decisions:
        for action in decision.actions:
            became = next((o for o in record.outcomes if o.at == decision.at and o.action == action), None)
            if became is not None and became.applied and action.kind != "skip":
                found.setdefault((decision.about, decision.because[0]), []).append(became.detail)
    return found


def _conclusion(result: DemoResult) -> str:
    """What the numbers say, in two sentences."""
    clean, unguarded, guarded = result.arms
    lost = next((step for step, loss in enumerate(unguarded.losses) if not math.isfinite(loss)), None)
    first = f"Unguarded, the run is lost at step {lost}" if lost is not None else "Unguarded, the run goes on"
    gap = 100 * (clean.test_accuracy - guarded.test_accuracy)
    if not guarded.weights_finite:
        return f"{first}; guarded as well: this is a bug, please report it."
    if abs(gap) < 0.05:
        return f"{first}. Guarded, it goes on and ends as well as the clean run."
    compared = f"{gap:.1f} points below" if gap > 0 else f"{-gap:.1f} points above"
    return f"{first}. Guarded, it goes on and ends {compared} the clean run."


def _table(result: DemoResult) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for title in ("final loss", "test accuracy", "weights", "rejected steps"):
        table.add_column(title, justify="right")
    for arm in result.arms:
        good = arm.weights_finite and math.isfinite(arm.final_loss)
        table.add_row(
            Text(arm.name, style="bold"),
            Text(_number(arm.final_loss), style="" if good else "red"),
            Text(_percent(arm.test_accuracy), style="green" if arm.test_accuracy > 0.9 else "red"),
            Text("finite" if arm.weights_finite else "NaN", style="" if arm.weights_finite else "red"),
            "–" if arm.num_rejected is None else str(arm.num_rejected),
        )
    return table


def _number(value: float) -> str:
    """A loss in at most eight characters."""
    return "NaN" if math.isnan(value) else f"{value:.3g}"


def _percent(value: float) -> str:
    """A fraction for people; empty while it is not known."""
    return "" if math.isnan(value) else f"{100 * value:.1f} %"
