"""`trimtab run`: any PyTorch script, unchanged, under a guard."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli._shell import NO, OK, UNUSABLE, YES, Options, command

NAME = "run"
DISABLED = ("", "0")


@dataclass
class Asked:
    """The script to run once the command line is read, outside of typer, which would catch what a script raises."""

    start: Callable[[], None] | None = None

    def run(self) -> None:
        """Run the script, if one was asked for. What it raises passes through; that it cannot start is our error."""
        from trimtab.run.script import CannotStart

        try:
            if self.start is not None:
                self.start()
        except CannotStart as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(UNUSABLE) from None


def split(argv: Sequence[str], options: Options) -> tuple[list[str], list[str]]:
    """Split into our own words and the script's, which begin with its name.

    Example:
        >>> split(["run", "--clip", "1", "train.py", "--mode", "x"], Options(flags=(), valued={"--clip"}))
        (['run', '--clip', '1'], ['train.py', '--mode', 'x'])
    """
    rest = list(argv)
    ours: list[str] = []
    while rest:
        token = rest.pop(0)
        if token == "--":
            break
        if not token.startswith("-") and ours:
            return ours, [token, *rest]
        ours.append(token)
        name = token.replace("_", "-") if token.startswith("--") else token
        if name in ("-m", "--module"):
            ours += rest[:1]
            return ours, rest[1:]
        a_word = name in options.flags and rest[:1] and rest[0].lower() in YES | NO and not Path(rest[0]).exists()
        if rest and (name in options.valued or a_word):
            ours.append(rest.pop(0))
    return ours, rest


@command
def run(
    context: typer.Context,
    program: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]", help="The script, and whatever it takes.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", "--module", metavar="MODULE", help="Run a module, as `python -m` does.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="observe, advise (the default), act or raise.", show_default=False)
    ] = None,
    clip: Annotated[
        str | None, typer.Option("--clip", help="Clip the gradient norm: a number, agc, percentile or zscore.")
    ] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="Settings by name; see `trimtab presets`.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file with settings.")] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Where to record; `trimtab_runs/<id>` unless given.", show_default=False),
    ] = None,
    runs_dir: Annotated[str | None, typer.Option("--dir", hidden=True)] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option("--checkpoint-dir", help="Save certified checkpoints there.", show_default=False)
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", hidden=True)] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="auto|DIR", help="Start from the weights and moments last saved there."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on stderr.")] = False,
) -> int:
    """Run any PyTorch script under a guard, unchanged.

    `trimtab run train.py --epochs 3`, or `trimtab run -m package.train --epochs 3`. Output, input and exit code are the
    script's own. trimtab writes to stderr, and a record to ./trimtab_runs. If the guard stops the training (mode act or
    raise), the script ends with exit code 70.
    """
    from trimtab.run.runner import run_guarded
    from trimtab.run.script import Program, run_program

    words = list(program or ())
    if module is None and not words:
        raise typer.BadParameter("name a script to run, or a module with -m: trimtab run train.py", param_hint="SCRIPT")
    target = words.pop(0) if module is None else module
    what = Program(target=target, args=words, module=module is not None)
    if os.environ.get("TRIMTAB_DISABLE", "") not in DISABLED:
        context.obj.start = lambda: run_program(what)
        return OK
    settings = _settings(config=config, mode=mode, clip=clip, preset=preset, runs_dir=runs_dir)
    settings |= _places(checkpoint_dir or checkpoint, resume)
    if run_dir is not None:
        settings["run_dir"] = run_dir.absolute()
    context.obj.start = lambda: run_guarded(what, settings, quiet=quiet, as_json=as_json)
    return OK


def _settings(
    *, config: Path | None, mode: str | None, clip: str | None, preset: str | None, runs_dir: str | None
) -> dict[str, object]:
    """What every guard of the run is built with; a mistake is reported before the script starts."""
    from trimtab.core.config import resolve

    changes: dict[str, object] = {"mode": mode, "clip": None if clip is None else _number(clip), "dir": runs_dir}
    found = resolve(config, preset=preset, **changes)
    # Absolute: a script may change its working directory before it begins to train.
    return {"config": found.with_changes({"dir": os.path.abspath(found.dir)})}


def _places(checkpoint: Path | None, resume: str | None) -> dict[str, object]:
    """Where to save, and whether to resume from there; absolute, as a script may change its working directory."""
    if resume is not None and resume != "auto":
        checkpoint = checkpoint or Path(resume)
        if Path(resume).absolute() != checkpoint.absolute():
            raise typer.BadParameter("resume from the folder that is saved to, or leave --checkpoint-dir out")
    if checkpoint is None:
        if resume is not None:
            raise typer.BadParameter("--resume auto needs --checkpoint-dir DIR: the folder to resume from")
        return {}
    from trimtab.checkpoint.checkpointer import Checkpointer
    from trimtab.run.auto_guard import folder_of_rank

    with Checkpointer(folder_of_rank(checkpoint)) as ckpt:
        ckpt.claim()  # a folder that cannot be saved to is reported before the script starts
    return {"checkpoint": checkpoint.absolute(), "resume": resume is not None}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
