"""The `trimtab` command: an entry point and a list of commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import typer
from typer.core import TyperGroup

from trimtab.cli import (
    checkpoint,
    compare,
    demo,
    doctor,
    drill,
    explain,
    export,
    init,
    presets,
    report,
    rules,
    run,
    runs,
    selftest,
    trace,
    train,
    tune,
    ui,
    watch,
)
from trimtab.cli._shell import UNUSABLE, emit_error, normalise, options_of
from trimtab.core.printable import printable

app = typer.Typer(
    name="trimtab",
    help="Keeps PyTorch training on course: watches, names what is wrong, and keeps bad updates out of the weights.",
    epilog="Start with `trimtab demo`. Every command takes --json.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
for module in (demo, init, run, doctor, drill, report):
    app.command(module.NAME)(module.run)
for module in (runs, watch, ui, compare, export):
    app.command(module.NAME)(module.run)
app.command(report.REPLAY)(report.replay)
for module in (trace, rules, explain, presets, selftest):
    app.command(module.NAME)(module.run)
app.command(train.NAME, context_settings=train.CONTEXT)(train.run)
app.add_typer(tune.app, name=tune.NAME)
app.add_typer(checkpoint.app, name=checkpoint.NAME)


def _version(wanted: bool) -> None:
    if wanted:
        from trimtab import __version__

        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options that belong to no command."""


@cache
def _commands() -> TyperGroup:
    """Each command with its options, built once in a process."""
    known = typer.main.get_command(app)
    assert isinstance(known, TyperGroup)
    return known


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 fine, 1 a check failed, 2 could not be done, 130 interrupted."""
    given, script = list(sys.argv[1:] if argv is None else argv), list[str]()
    known = _commands()
    if given[:1] == [run.NAME]:
        given, script = run.split(given, options_of(known.commands[run.NAME]))
    if given[:1] == [doctor.NAME]:
        ours, rest = run.split(given, options_of(known.commands[doctor.NAME]))
        given, script = (ours, rest) if rest and doctor.is_script(rest[0]) else (given, script)
        if rest and doctor.is_recipe(rest[0]):  # its options are those of the recipe
            given = [train.NAME, *rest, *ours[1:], "--doctor"]
    if given[:1] == [drill.NAME]:
        given = drill.today(given)
    # One word can be a flag of one command and take a value in another: the command decides.
    own = known.commands.get(given[0]) if given else None
    words = [*normalise(given, options_of(own or known)), *(["--", *script] if script else [])]
    asked = run.Asked()
    try:
        _call(words, asked, as_json="--json" in words[: len(words) - len(script)])
    except SystemExit as end:
        if end.code or asked.start is None:
            raise
    asked.run()


def _call(words: list[str], asked: run.Asked, *, as_json: bool) -> None:
    """Have the command parsed and run; a mistake in the words themselves is JSON, too, where JSON was asked for."""
    if not as_json:
        app(args=words, prog_name="trimtab", obj=asked)
        return
    try:
        code = app(args=words, prog_name="trimtab", obj=asked, standalone_mode=False)
    except Exception as error:
        say = getattr(error, "format_message", None)  # of click, or of the copy of it inside typer
        if say is None:
            raise
        emit_error(say(), "UsageError")
        print(f"error: {printable(say())}", file=sys.stderr)
        raise SystemExit(UNUSABLE) from None
    raise SystemExit(code if isinstance(code, int) else 0)
