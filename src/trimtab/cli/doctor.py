"""`trimtab doctor`: preflight checks of a training, with evidence for every line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli._shell import DIFFERENT, OK, command, console, emit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from trimtab.doctor.checklist import Line, Report
    from trimtab.doctor.observed_step import Options
    from trimtab.doctor.target import Target
    from trimtab.train.recipe import Recipe

NAME = "doctor"
PASSED = "SANITY CHECK PASSED - Training setup is working correctly!"
FAILED = "SANITY CHECK FAILED - Issues detected in training setup!"
BUNDLED = "trimtab.doctor.sample_training:build"
SIGNS = {
    "pass": ("ok  ", "green"),
    "warn": ("WARN", "yellow"),
    "fail": ("FAIL", "bold red"),
    "not applicable": ("n/a ", "dim"),
}


@command
def run(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET]",
            help="module:function, file.py:function, a script or a recipe and its options.",
        ),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=1, help="Steps to observe, each of which is printed.  [default: 3]")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Another batch size than the loader's.", show_default=False),
    ] = None,
    amp_dtype: Annotated[
        str, typer.Option("--amp-dtype", help="Autocast to bf16 or fp16, or none; auto: as the training does.")
    ] = "auto",
    grad_log_interval: Annotated[
        int | None,
        typer.Option("--grad-log-interval", min=0, help="Print gradients every this many steps; 0: never."),
    ] = None,
    detect_anomaly: Annotated[
        bool, typer.Option("--detect-anomaly", help="Let autograd name the operation that makes a NaN.")
    ] = False,
    clip_grad_norm: Annotated[
        float, typer.Option("--clip-grad-norm", min=0.0, help="Clip the steps doctor makes itself; 0: do not.")
    ] = 0.0,
    select: Annotated[str, typer.Option("--select", help="Only these: codes, families or names.")] = "",
    ignore: Annotated[str, typer.Option("--ignore", help="All but these.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Run every experiment, however long it takes.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every step and every check; else only what is wrong.")
    ] = False,
    form: Annotated[
        str, typer.Option("--format", metavar="text|json|junit|sarif|github", help="For people, or for a CI system.")
    ] = "text",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Write junit, sarif or github there.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: --format json.")] = False,
) -> int:
    """Examine a training before its first epoch: wiring, data, optimizer, precision, and whether it can learn at all.

    The function returns a dict: model, optimizer, loader, and loss_fn(output, target) or step_fn(model, batch); also
    scaler, scheduler, val_loader, ema, if there are any. Without a target: the one named by `doctor` in
    \\[tool.trimtab], else a bundled sample. Everything is left as it was. Exit code 0: clean; 1: a check failed; 2: it
    could not run.
    """
    from trimtab.core.config_read import words
    from trimtab.core.errors import InputError
    from trimtab.doctor.ci_formats import FORMATS
    from trimtab.doctor.examine import examine
    from trimtab.doctor.observed_step import DTYPES, Options
    from trimtab.doctor.target import load_target

    if amp_dtype not in (*DTYPES, "none", "auto"):
        raise InputError(f"--amp-dtype is {amp_dtype!r}; expected bf16, fp16 or none")
    if form not in ("text", "json", *FORMATS):
        raise InputError(f"--format is {form!r}; expected text, json, {', '.join(FORMATS)}")
    if output is not None and form not in FORMATS:
        raise InputError(f"--output {output} is for --format junit, sarif or github; for the rest use > {output}")
    # Who says how many steps or gradients to print wants the lines of the documented tool.
    verbose = verbose or max_steps is not None or grad_log_interval is not None
    how = _Shown(form="json" if as_json else form, output=output, strict=strict, verbose=verbose)
    options = Options(
        max_steps=3 if max_steps is None else max_steps,
        batch_size=batch_size,
        amp_dtype=amp_dtype,
        grad_log_interval=1 if grad_log_interval is None else grad_log_interval,
        detect_anomaly=detect_anomaly,
        clip_grad_norm=clip_grad_norm,
        full=full,
    )
    if target and is_script(target[0]):
        return _script(target, options, select, ignore, how)
    spec = target_spec(target)
    loaded = load_target(spec, lenient=True)
    report = examine(
        loaded,
        options,
        select=words(select, "--select"),
        ignore=words(ignore, "--ignore"),
        again=lambda: load_target(spec, lenient=True),
    )
    return _conclude(spec, loaded, report, options, how)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """How a report is shown."""

    form: str
    output: Path | None
    strict: bool
    verbose: bool


def examine_recipe(
    recipe: Recipe, given: Mapping[str, object], *, quick: bool, fault: str | None, as_json: bool
) -> int:
    """Examine a recipe with these settings: first its data, every file of it, then the training; the exit code."""
    from rich.text import Text

    from trimtab.doctor.examine import examine
    from trimtab.doctor.observed_step import Options
    from trimtab.doctor.target import check_target
    from trimtab.train.data_problems import DataError
    from trimtab.train.recipe import build_parts, settings_of, target_of

    spec = f"trimtab train {recipe.name}"
    settings = settings_of(recipe, given, quick=quick)
    try:
        parts = build_parts(recipe, settings, fault)
        problems = tuple(parts.problems()) if parts.problems is not None else ()
    except DataError as error:
        problems = error.problems
    if problems:
        if as_json:
            emit({"target": spec, "passed": False, "verdict": FAILED, "data_problems": problems})
            return DIFFERENT
        out = console()
        for problem in problems:
            out.print(Text.assemble(("[FAIL] data  ", SIGNS["fail"][1]), problem), soft_wrap=True)
        out.print(Text(FAILED, style="bold red"))
        return DIFFERENT
    target = check_target(target_of(parts), spec, lenient=True)
    again = lambda: check_target(target_of(build_parts(recipe, settings, fault)), spec, lenient=True)  # noqa: E731
    report = examine(target, Options(), again=again)
    how = _Shown(form="json" if as_json else "text", output=None, strict=False, verbose=False)
    return _conclude(spec, target, report, Options(), how)


def is_recipe(word: str) -> bool:
    """Whether a target is the name of a recipe."""
    from trimtab.train.recipes import RECIPES

    return word in [name for name, _ in RECIPES]


def is_script(word: str) -> bool:
    """Whether a target is a script to run, and not a function to call."""
    return word.endswith(".py") and not word.startswith("-")


def _script(words_: list[str], options: Options, select: str, ignore: str, how: _Shown) -> int:
    from trimtab.core.config_read import words
    from trimtab.run.preflight import examine_script
    from trimtab.run.script import Program

    report, seen = examine_script(
        Program(target=words_[0], args=words_[1:]),
        options,
        select=words(select, "--select"),
        ignore=words(ignore, "--ignore"),
    )
    return _conclude(words_[0], seen, report, options, how)


def _conclude(spec: str, target: Target, report: Report, options: Options, how: _Shown) -> int:
    """Print the report; returns the exit code."""
    from trimtab.doctor.checklist import environment
    from trimtab.doctor.ci_formats import FORMATS

    failed = not report.ok or (how.strict and any(line.status.value == "warn" for line in report.lines))
    where = environment(options, target)
    if how.form == "json":
        emit(_plain(spec, where, report, passed=not failed))
    elif how.form in FORMATS:
        text = FORMATS[how.form](spec, report, strict=how.strict)
        if how.output is None:
            print(text, end="")
        else:
            how.output.parent.mkdir(parents=True, exist_ok=True)
            how.output.write_text(text, encoding="utf-8", errors="replace")
            print(how.output)
    elif how.verbose:
        _show_all(console(), spec, where, report, options.grad_log_interval, passed=not failed)
    else:
        _show_wrong(console(), spec, where, report, passed=not failed)
    return DIFFERENT if failed else OK


def target_spec(target: list[str] | None) -> str:
    """The training that you named, or that of the settings, or the bundled one."""
    if target:
        return target[0]
    from trimtab.core.config import discover

    return str(discover(Path.cwd()).get("doctor") or BUNDLED)


def _plain(spec: str, where: Mapping[str, object], report: Report, *, passed: bool) -> dict[str, object]:
    from trimtab.doctor.short_checklist import summary

    counts = {status: sum(line.status.value == status for line in report.lines) for status in SIGNS}
    return {
        "target": spec,
        "passed": passed,
        "verdict": PASSED if passed else FAILED,
        "counts": counts,
        "seconds": report.seconds,
        "environment": where,
        "steps": report.steps,
        "summary": summary(report.lines),
        "lines": report.lines,
        "tracebacks": report.traces,
    }


def _show_wrong(out: Console, spec: str, where: Mapping[str, object], report: Report, *, passed: bool) -> None:
    """Only what failed or deserves a second look, and how many checks say nothing about this training."""
    from rich.text import Text

    from trimtab.doctor.ci_formats import counts

    for text in _banner(spec, where):
        out.print(Text(text, style="dim"), soft_wrap=True)
    out.print()
    wrong = [line for line in report.lines if not line.ok]
    width = max((len(line.title) for line in wrong), default=0)
    for line in wrong:
        for entry in _entry(line, width):
            out.print(entry, soft_wrap=True)
    if wrong:
        out.print()
    _show_summary(out, report)
    out.print(Text(f"\n-v shows every check; {report.seconds:.1f} s; everything is as it was.", style="dim"))
    verdict = f"SANITY CHECK {'PASSED' if passed else 'FAILED'} - {counts(report)}"
    out.print(Text(verdict, style="bold green" if passed else "bold red"), soft_wrap=True)


def _show_all(
    out: Console, spec: str, where: Mapping[str, object], report: Report, every: int, *, passed: bool
) -> None:
    """Every step and every check; what is wrong is repeated at the end, where it is read."""
    from rich.text import Text

    from trimtab.doctor.ci_formats import counts

    for text in _banner(spec, where):
        out.print(Text(text, style="dim"), soft_wrap=True)
    out.print()
    for step in report.steps:
        for text in step.lines(gradients=every > 0 and step.step % every == 0):
            out.print(Text(text), soft_wrap=True)
    out.print()
    width = max((len(line.title) for line in report.lines), default=0)
    for line in report.lines:
        for entry in _entry(line, width):
            out.print(entry, soft_wrap=True)
    wrong = [line for line in report.lines if not line.ok]
    if wrong:
        out.print(Text("\nTo fix:", style="bold"))
    for line in wrong:
        sign, style = SIGNS[line.status.value]
        lead = (f"[{sign}] {line.code} {line.name}: ", style)
        out.print(Text.assemble(lead, line.cause, ("\n       fix: ", "green"), line.fix), soft_wrap=True)
    out.print()
    _show_summary(out, report)
    out.print(
        Text(f"\n{counts(report)}; {report.seconds:.1f} s; everything is as it was.", style="dim"), soft_wrap=True
    )
    out.print(Text(PASSED if passed else FAILED, style="bold green" if passed else "bold red"), soft_wrap=True)


def _show_summary(out: Console, report: Report) -> None:
    """The documented list of eight lines."""
    from rich.text import Text

    from trimtab.doctor.short_checklist import summary

    for one in summary(report.lines):
        sign, style = SIGNS[one.status.value]
        out.print(Text.assemble((f"[{sign}] {one.title}", style), f": {one.evidence}"), soft_wrap=True)


def _banner(spec: str, where: Mapping[str, Any]) -> Iterator[str]:
    yield f"trimtab {where['trimtab']}, torch {where['torch']}, Python {where['python']}, {where['platform']}"
    gpus = f", {', '.join(where['gpus'])} (CUDA {where['cuda']})" if "gpus" in where else ""
    yield (
        f"device {where['device']}{gpus}, {where['cpus']} CPUs, {where['threads']} threads, amp {where['amp_dtype']}, "
        f"{where['default_dtype']}, matmul {where['matmul_precision']}, seed {where['seed']}"
    )
    yield (
        f"{spec}: {where['model']}, {where['parameters']:,} parameters, {where['trainable']:,} trainable, "
        f"{', '.join(where['optimizers'])}"
    )


def _entry(line: Line, width: int) -> Iterator[Text]:
    from rich.text import Text

    sign, style = SIGNS[line.status.value]
    lead = f"[{sign}] {line.code:<8}{line.title:<{width}}  "
    if line.ok:
        yield Text.assemble((lead, style), (line.evidence, "dim" if line.status.value == "not applicable" else ""))
        return
    yield Text.assemble((lead, style), (f"{line.name}: {line.cause}", "bold"))
    yield Text(f"       {line.evidence}")
    yield Text.assemble(("       fix: ", "green"), line.fix, (f"   (trimtab explain {line.name})", "dim"))
