"""`trimtab train`: the systems of the source documents on real data, with faults to inject and a control arm."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli._shell import DIFFERENT, OK, command, console, emit, normalise, options_of

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.train.recipe import Option, Recipe, Result

NAME = "train"
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": ["-h", "--help"],
}
"""Everything after the name belongs to the recipe, whose options are known only once it is loaded."""
Say = Callable[[str], object]


@command
def run(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Which one; without it all are listed.")
    ] = None,
) -> int:
    """Train one of the documented systems on real data. `trimtab train RECIPE --help` shows the options of one.

    Every recipe takes --quick, --fault NAME, --unguarded, --compare, --resume, --run-dir, --checkpoint-dir,
    --checkpoint-every, --doctor, --device, --seed and --json beside its own options.
    """
    if recipe is None:
        _list()
        return OK
    from trimtab.train.recipes import load_recipe

    _run(command_of(load_recipe(recipe)), context.args, f"trimtab train {recipe}")
    return OK


def command_of(recipe: Recipe) -> typer.Typer:
    """A recipe as a command of its own, with its options as flags."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)
    body = _body(recipe)
    common = list(_common(recipe))
    taken = {one.name for one in common}
    parameters = [*(_parameter(option) for option in recipe.options if option.name not in taken), *common]
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {one.name: one.annotation for one in parameters}
    faults = "\n".join(f"- {fault.name}: {fault.summary}" for fault in recipe.faults)
    summary = recipe.summary[0].upper() + recipe.summary[1:]
    app.command(recipe.name, help=f"{summary}.\n\nFaults:\n\n{faults}" if faults else f"{summary}.")(body)
    return app


def _run(app: typer.Typer, args: Sequence[str], called: str) -> None:
    known = typer.main.get_command(app)
    app(args=normalise(args, options_of(known)), prog_name=called)


def _body(recipe: Recipe) -> Callable[..., None]:
    own = {option.name for option in recipe.options}

    def body(**given: Any) -> int:
        from trimtab.train.recipe import compare, run_recipe

        chosen = {
            name: _value(value, recipe, name) for name, value in given.items() if name in own and value is not None
        }
        how: dict[str, Any] = {"quick": given["quick"], "fault": given["fault"], "run_dir": given["run_dir"]}
        how |= {"checkpoint_dir": given["checkpoint_dir"], "checkpoint_every": given["checkpoint_every"]}
        chosen |= {"seed": given["seed"], "device": given["device"]}
        if given["doctor"]:
            from trimtab.cli.doctor import examine_recipe

            return examine_recipe(recipe, chosen, quick=given["quick"], fault=given["fault"], as_json=given["as_json"])
        with _shown(as_json=given["as_json"]) as (say, show):
            if given["compare"]:  # the table at the end shows everything
                results = compare(recipe, chosen, say=say, **how)
            else:
                how |= {"guarded": not given["unguarded"], "resume": given["resume"]}
                results = [run_recipe(recipe, chosen, say=say, show=show, **how)]
        if given.get("use_ddp") and os.environ.get("RANK", "0") != "0":
            return OK  # the first process speaks for all
        if given["as_json"]:
            emit({"recipe": recipe.name, "runs": results})
        else:
            _report(console(), results, compared=given["compare"])
        guarded = [one for one in results if "unguarded" not in one.arm]
        return OK if all(one.weights_finite and one.stopped is None for one in guarded) else DIFFERENT

    return command(body)


def _parameter(option: Option) -> inspect.Parameter:
    flag = f"--{option.name.replace('_', '-')}"
    text = option.help if not option.choices else f"{option.help} One of {', '.join(option.choices)}."
    kind: Any = option.type
    default = option.default
    if kind is bool and default:  # a flag is off unless given; what is on by default takes true or false
        kind, default = str, "true"
    if default not in (None, "", False) and kind is not bool:
        text = f"{text} Default: {f'{default:g}' if kind is float else default}."
    flags = [flag, *(f"--{alias.replace('_', '-')}" for alias in option.aliases)]
    annotation: Any = Annotated[kind | None, typer.Option(*flags, help=text, show_default=False)]
    if kind is bool:
        annotation = Annotated[bool, typer.Option(*flags, help=text)]
    # None is what was not given: --quick may then choose.
    given = False if kind is bool else None
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=annotation)


def _common(recipe: Recipe) -> Iterator[inspect.Parameter]:
    names = ", ".join(fault.name for fault in recipe.faults) or "none"
    options: tuple[tuple[str, Any, Any, str], ...] = (
        ("quick", bool, False, "A small run, under 20 seconds."),
        ("fault", str | None, None, f"Inject a documented incident: {names}."),
        ("unguarded", bool, False, "The control arm: the same training without a guard."),
        ("compare", bool, False, "Run clean, guarded and unguarded, and print one table."),
        ("resume", str | None, None, "Resume from the newest sound checkpoint (auto) or from a path."),
        ("run_dir", Path | None, None, "Where to record; trimtab_runs/<id> unless given."),
        ("checkpoint_dir", Path | None, None, "Where to keep checkpoints and history.json; none without it."),
        (
            "checkpoint_every",
            int | None,
            None,
            "Steps between checkpoints within an epoch; 0: none.",
        ),
        ("doctor", bool, False, "Examine data and training instead of training; exit code 1 if a check fails."),
        ("device", str, "auto", "auto (a GPU if there is one), cpu, cuda or cuda:N."),
        ("seed", int, 42, "Another seed, another run."),
        ("json", bool, False, "Print one JSON object."),
    )
    for name, kind, default, text in options:
        flag = typer.Option(f"--{name.replace('_', '-')}", help=text, rich_help_panel="Every recipe")
        called = "as_json" if name == "json" else name
        yield inspect.Parameter(
            called, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, flag]
        )


def _value(value: object, recipe: Recipe, name: str) -> object:
    option = next(one for one in recipe.options if one.name == name)
    if option.type is bool and isinstance(value, str):
        from trimtab.cli._shell import NO, YES
        from trimtab.core.errors import InputError

        if value.lower() not in YES | NO:
            raise InputError(f"--{name.replace('_', '-')} is {value!r}; expected true or false")
        return value.lower() in YES
    return value


# -- what people see -------------------------------------------------------------------------------------------------


def _list() -> None:
    from rich.text import Text

    from trimtab.train.recipes import RECIPES

    out = console()
    for name, summary in RECIPES:
        out.print(Text.assemble((f"{name:<10}", "bold"), summary), soft_wrap=True)
    out.print(Text("trimtab train NAME --help shows its options and faults.", style="dim"))


@contextmanager
def _shown(*, as_json: bool) -> Iterator[tuple[Say | None, Say | None]]:
    """Two functions: to print a line, and to show a line that grows. None if nobody reads them."""
    if as_json:
        yield None, None
        return
    from rich.text import Text

    out = console()

    def say(line: str) -> None:
        out.print(Text(line), soft_wrap=True)

    if not out.is_terminal:
        yield say, None
        return
    from rich.live import Live

    with Live(Text(""), console=out, transient=True, auto_refresh=False) as live:
        yield say, lambda line: live.update(Text(line), refresh=True)


def _report(out: Console, results: Sequence[Result], *, compared: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    if compared:
        table = Table("arm", results[0].score_name, "weights", "rejected", "steps", "seconds", box=None, pad_edge=False)
        for one in results:
            name = one.arm if one.fault is None else f"{one.arm}, {one.fault}"
            sound = "finite" if one.weights_finite else "NaN or Inf"
            cells = [name, _number(one.score), sound, str(one.rejected), str(one.num_steps), f"{one.seconds:.1f}"]
            table.add_row(*cells)
        out.print(table)
    for one in results:
        head = f"{one.arm}: {one.score_name} {_number(one.score)} after {one.num_steps} steps in {one.seconds:.1f} s"
        out.print(Text(head, style="bold"))
        if one.stopped is not None:
            out.print(Text(f"  stopped: {one.stopped}", style="red"), soft_wrap=True)
        if one.findings:
            out.print(Text(f"  found: {', '.join(one.findings)}"), soft_wrap=True)
        for action in one.actions:
            out.print(Text(f"  did: {action}"), soft_wrap=True)
        for key, value in one.facts.items():
            out.print(Text(f"  {key}: {_fact(value)}"), soft_wrap=True)
        for folder in one.run_dirs:
            out.print(Text(f"  record: {folder}", style="dim"), soft_wrap=True)


def _fact(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else str(value)
