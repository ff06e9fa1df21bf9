"""`trimtab init`: write every setting into a project, commented, to be changed."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli._shell import OK, command, emit, fail

NAME = "init"


@command
def run(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            help="A TOML file or a folder.  [default: ./pyproject.toml if there is one, else ./trimtab.toml]",
            show_default=False,
        ),
    ] = None,
    print_it: Annotated[bool, typer.Option("--print", help="Print it and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Write the settings of trimtab into a project: all of them with their defaults, commented, each with its meaning.

    They go to the end of pyproject.toml as \\[tool.trimtab], or into a new trimtab.toml. A file that already has such
    settings is left as it is.
    """
    if print_it:
        text = settings_template()
        if as_json:
            emit({"text": text})
        else:
            print(text, end="")
        return OK
    file = settings_file(path or Path())
    written = add_settings(file)
    if written is None:
        fail(f"{file} already has settings of trimtab; edit them there, or see all with `trimtab init --print`")
    if as_json:
        emit({"path": str(file), "created": written})
    else:
        how = "written with all settings" if written else "[tool.trimtab] added to it"
        print(f"{file}: {how}. Every setting is a comment: remove the # to change it.")
    return OK


MEANINGS: Mapping[str, str] = {
    "preset": 'named defaults that explicit settings override, such as "camoxpert"; see `trimtab presets`',
    "mode": "observe: change nothing; advise: reject updates with NaN or Inf; act: also roll back, cut the learning "
    "rate, stop; raise: stop at the first grave finding",
    "clip": 'clip the gradient norm: a number such as 1.0, or "agc", "percentile", "zscore"; none: do not clip',
    "lag": "how many steps later the host judges a step; none: 0 on CPU, 1 on accelerators",
    "reject_nonfinite": "keep updates with NaN or Inf out of the weights",
    "reject_above": "also reject updates whose gradient norm is above this",
    "select": "rules to use: codes, families or names; see `trimtab rules`",
    "ignore": "rules not to use",
    "severity": 'another severity per rule: { exploding-gradient = "warn" }',
    "rules": "other thresholds per rule: { exploding-gradient = { ratio = 20 } }",
    "full_every": "a thorough look at weights and updates every this many steps; 0: never",
    "stages": "each process holds pipeline stages of its own: norms, clipping and rejection are those of all",
    "activations": "count dead and saturated units in thorough looks",
    "trace": "run a step with NaN or Inf again, once per incident, to name the operation, module and samples",
    "kernels": "triton, torch, or whichever fits (auto)",
    "record": "keep a record of the run",
    "dir": "where records go",
    "max_record_bytes": "older tables are thinned beyond this size",
    "checkpoint_every": "steps between checkpoints, where the guard was given `checkpoint=`",
    "checkpoint_on_signal": "save before SIGTERM and Ctrl-C end the process",
    "doctor": "what `trimtab doctor` and `trimtab drill` examine when not told: module:function",
    "policy": "how often and how strongly mode act acts",
}
EXAMPLES = {"preset": '"camoxpert"', "clip": "1.0", "lag": "1", "reject_above": "100.0", "doctor": '"train:build"'}
"""What stands for a setting whose default is none: TOML has no word for that."""
_WIDTH = 110


def settings_template(table: str = "tool.trimtab") -> str:
    """Every setting with its default, commented, under the name of a table; without a name there is no table.

    Example:
        >>> print(settings_template().splitlines()[0])
        [tool.trimtab]
    """
    return "\n".join(_lines(table)) + "\n"


def _lines(table: str) -> Iterator[str]:
    from trimtab.core.config import Config

    if table:
        yield f"[{table}]"
    yield "# Settings of trimtab: each line is the default, or an example if there is none. Remove the # to change it."
    for name, value in Config().to_dict().items():
        if name != "policy":
            yield ""
            yield from textwrap.wrap(MEANINGS[name], _WIDTH, initial_indent="# ", subsequent_indent="# ")
            yield f"# {name} = {_toml(name, value)}"
    yield ""
    yield f"# {MEANINGS['policy']}: steps between two actions, the most actions in a run, …"
    inner = ", ".join(f"{name} = {_toml(name, value)}" for name, value in Config().to_dict()["policy"].items())
    yield from (f"# {line}" for line in [f"policy = {{ {inner} }}"])


def _toml(name: str, value: object) -> str:
    if value is None or name in EXAMPLES:
        return EXAMPLES[name]
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{json.dumps(k)} = {_toml(name, v)}" for k, v in value.items()) + " }" if value else "{}"
        )
    return json.dumps(value)


def settings_file(path: Path) -> Path:
    """The file that settings go to: `path` itself, or in a folder its pyproject.toml, else a new trimtab.toml."""
    if path.is_dir() or not path.suffix:
        return path / ("pyproject.toml" if (path / "pyproject.toml").is_file() else "trimtab.toml")
    return path


def add_settings(file: Path) -> bool | None:
    """Append the commented settings to a file, or make it; whether it was made, None where it already has some.

    Nothing that is in the file is changed. ConfigError where it is not TOML.
    """
    from trimtab.core.errors import ConfigError

    whole = file.name == "trimtab.toml"
    try:
        before = file.read_bytes().decode("utf-8")  # line ends stay as they are
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(settings_template("" if whole else "tool.trimtab"), encoding="utf-8", newline="\n")
        return True
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}; give the path of a TOML file") from None
    try:
        data = tomllib.loads(before)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML, so nothing was added to it: {error}") from None
    tool = data.get("tool", {})
    if whole or not isinstance(tool, dict) or "trimtab" in tool:
        return None
    end = "\r\n" if "\r\n" in before else "\n"
    after = f"{before.rstrip()}{end}{end}{settings_template().replace(chr(10), end)}".lstrip()
    if tomllib.loads(after) != data | {"tool": tool | {"trimtab": {}}}:
        raise ConfigError(f"[tool.trimtab] cannot be added to {file}; see `trimtab init --print` and add it by hand")
    temporary = file.with_name(file.name + ".writing")
    try:
        temporary.write_bytes(after.encode("utf-8"))
        temporary.chmod(file.stat().st_mode & 0o777)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return False
