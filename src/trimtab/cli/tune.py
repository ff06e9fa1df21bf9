"""`trimtab tune`: a learning rate for a training, a clip threshold and a warm-up from a run's own record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import DIFFERENT, OK, command, console, emit
from trimtab.cli.report import RunArgument

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.report.suggest import ClipAdvice, WarmupAdvice
    from trimtab.train.lr_range import LrRange

NAME = "tune"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app = typer.Typer(
    help="Suggest a learning rate for a training, or a clip threshold or a warm-up from a run's own record.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command("lr")
@command
def lr(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="module:function or path/to/file.py:function; see below.")
    ],
    low: Annotated[float, typer.Option("--min", help="The first rate of a sweep.")] = 1e-7,
    high: Annotated[float, typer.Option("--max", help="The last rate of a sweep.")] = 10.0,
    num_steps: Annotated[int, typer.Option("--steps", help="Steps of a sweep.")] = 100,
    repeats: Annotated[int, typer.Option("--repeats", help="Sweeps, each on different batches.")] = 3,
    trial_steps: Annotated[
        int, typer.Option("--trial", min=0, help="Steps of the short trainings around the rate found; 0: none.")
    ] = 50,
    as_json: AsJson = False,
) -> int:
    """Suggest a learning rate: sweep it to see where the loss falls and diverges, then try a few in short trainings.

    The function returns a dict: model, optimizer, loader, and loss_fn(output, target) or step_fn(model, batch);
    also scaler, if there is one. Exit code 1: the loss did not fall at any rate; 2: the target could not be used.
    """
    from trimtab.doctor.target import load_target
    from trimtab.train.lr_range import find_lr

    loaded = load_target(target)
    found = find_lr(loaded, low=low, high=high, num_steps=num_steps, repeats=repeats, trial_steps=trial_steps)
    if as_json:
        emit({"target": target, "lr": found})
    else:
        _show_lr(console(), found, target)
    return OK if found.suggested is not None else DIFFERENT


@app.command("clip")
@command
def clip(
    run_dir: RunArgument = None,
    as_json: AsJson = False,
) -> int:
    """Suggest a clip threshold from the gradient norms of a run's healthy steps."""
    from trimtab.record.reader import find_run, read_run
    from trimtab.report.suggest import suggest_clip

    folder = find_run(run_dir)
    advice = suggest_clip(read_run(folder))
    if as_json:
        emit({"run_dir": str(folder), "clip": advice})
    else:
        out = console()
        for one in advice:
            _show_clip(out, one)
        _show_record(out, folder)
    return OK if any(a.threshold is not None for a in advice) else DIFFERENT


@app.command("warmup")
@command
def warmup(
    run_dir: RunArgument = None,
    as_json: AsJson = False,
) -> int:
    """Suggest a warm-up, or none, from how a run began."""
    from trimtab.record.reader import find_run, read_run
    from trimtab.report.suggest import suggest_warmup

    folder = find_run(run_dir)
    advice = suggest_warmup(read_run(folder))
    if as_json:
        emit({"run_dir": str(folder), "warmup": advice})
    else:
        out = console()
        for one in advice:
            _show_warmup(out, one)
        _show_record(out, folder)
    return OK if any(a.num_steps is not None for a in advice) else DIFFERENT


def _show_lr(out: Console, found: LrRange, target: str) -> None:
    from rich.text import Text

    from trimtab.report.text import wrapped

    width = min(out.width, 100)
    if found.suggested is None:
        out.print(Text.assemble((" NO SUGGESTION ", "bold reverse red"), f" {target}"))
        out.print(wrapped(f"{found.reason}: no learning rate makes this train.", width, "  "))
        for line in (
            "Is the loss connected to the weights, and are they in the optimizer?",
            "Do the targets belong to the inputs?",
            "If it falls only at rates outside this range: --min, --max; if slowly: --steps 400.",
        ):
            out.print(wrapped(line, width, "  → ", style="green"))
    else:
        out.print(Text.assemble((f" lr = {found.suggested:.2g} ", "bold reverse green"), f" suggested for {target}"))
        out.print(wrapped(f"Worth trying: {found.low:.2g} to {found.high:.2g}.", width, "  "))
        out.print(wrapped(f"{found.reason[0].upper()}{found.reason[1:]}.", width, "  "))
        if found.trials:
            tried = ", ".join(
                f"{by:.3g} at {rate:.2g}" if by > 0 else f"nothing at {rate:.2g}" for rate, by in found.trials.items()
            )
            out.print(wrapped(f"In short trainings at constant rates it fell by {tried}.", width, "  "))
    _draw(out, found, width)
    out.print(
        Text(
            f"{found.num_sweeps} sweeps, {found.num_steps:,} steps in all; "
            "model, optimizer, loader and RNG are as they were.",
            style="dim",
        )
    )


def _draw(out: Console, found: LrRange, width: int) -> None:
    """Draw the mean loss over the rates. Values far above the start are cut off, or the rest would be flat."""
    from rich.text import Text

    from trimtab.report.chart import MARK, chart, make_curve

    if not found.losses:
        return
    top = found.start + max(0.3 * (found.start - min(found.losses)), 0.1 * abs(found.start))
    curve = make_curve(range(len(found.losses)), [min(v, top) for v in found.losses])
    if curve is None:
        return
    out.print(Text("\nloss", style="bold") + Text(" over the learning rate (log scale), smoothed", style="dim"))
    at = {min(range(len(found.rates)), key=lambda i: abs(found.rates[i] - r)) for r in [found.suggested] if r}
    lines = chart(curve, width=width - 12, height=6, marks=at)
    num = len(lines[-2]) - 10
    first, last = f"{found.rates[0]:.0e}", f"{found.rates[-1]:.2g}"
    lines[-1] = f"{'rate':>8}  {first}{last:>{max(num - len(first), len(last) + 1)}}"
    drawing = Text("\n".join(lines), no_wrap=True, style="cyan")
    drawing.highlight_regex(MARK, "bold green")
    out.print(drawing)
    if found.suggested is not None:
        out.print(Text(f"{'':>10}{MARK} suggested", style="dim"))


def _show_clip(out: Console, advice: ClipAdvice) -> None:
    """Print the threshold, then the reasons for it."""
    value = None if advice.threshold is None else f"{advice.threshold:.3g}"
    _show(out, "clip", advice.optimizer, value, advice.reasons, f"Guard(model, optimizer, clip={value})")


def _show_warmup(out: Console, advice: WarmupAdvice) -> None:
    num = advice.num_steps
    value = None if num is None else f"{num} steps" if num else "none needed"
    how = f"LinearLR(optimizer, start_factor={1 / (num + 1):.2g}, total_iters={num}), or a lower rate" if num else ""
    _show(out, "warm-up", advice.optimizer, value, advice.reasons, how)


def _show(out: Console, what: str, optimizer: str, value: str | None, reasons: tuple[str, ...], how: str) -> None:
    from rich.text import Text

    from trimtab.report.text import wrapped

    who = f" for {optimizer}" if optimizer else ""
    head = f" {what} = {value} " if value is not None else " NO SUGGESTION "
    colour = "green" if value is not None else "yellow"
    out.print(Text.assemble((head, f"bold reverse {colour}"), who))
    for reason in reasons:
        out.print(wrapped(reason, min(out.width, 100), "  "))
    if value is not None and how:
        out.print(wrapped(how, min(out.width, 100), "  → ", style="green"))


def _show_record(out: Console, folder: Path) -> None:
    from rich.text import Text

    out.print(Text(f"record: {folder}", style="dim"), soft_wrap=True)
