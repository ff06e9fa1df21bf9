"""What can be said about a block without running it: it parses, and every name, command, option and setting exists."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any

from docs_blocks import Block

from trimtab.core.errors import MissingPackageError


def static_complaints(block: Block) -> Iterator[str]:
    """What is wrong with a block, as far as reading it tells."""
    if block.language == "python":
        try:
            tree = ast.parse(block.text)
        except SyntaxError as error:
            yield f"{block.where}: not Python: {error}"
            return
        for problem in missing_names(tree):
            yield f"{block.where}: {problem}"
    elif block.language == "toml":
        yield from setting_complaints(block)
    elif block.language in ("bash", "console"):
        lines = block.text.replace("\\\n", " ").splitlines()
        told = [line[2:] for line in lines if line.startswith("$ ")] if block.language == "console" else lines
        for line in told:
            for problem in unknown_words(line):
                yield f"{block.where}: {problem}"


def missing_names(tree: ast.AST) -> Iterator[str]:
    """Names of ours that a piece of Python takes and that are not there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trimtab":
            for name in node.names:
                if not _has(node.module or "", name.name):
                    yield f"there is no {name.name} in {node.module}"
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(r"trimtab(\.\w+)+", dotted):
                home, _, name = dotted.rpartition(".")
                if home == "trimtab" and not _has(home, name):
                    yield f"there is no {dotted}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "trimtab.Guard",
            "Guard",
            "trimtab.Guard.attach",
        ):
            known = _guard_words()
            for word in node.keywords:
                if word.arg and word.arg not in known:
                    yield f"Guard takes no {word.arg}"


def _has(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except MissingPackageError:
        return True  # an integration, without its framework
    except ImportError:
        return False
    return True


@cache
def _guard_words() -> frozenset[str]:
    import inspect

    from trimtab import Guard

    return frozenset(inspect.signature(Guard.__init__).parameters)


def setting_complaints(block: Block) -> Iterator[str]:
    """Settings that `trimtab.Config` does not take."""
    from trimtab import Config, TrimtabError

    try:
        data = tomllib.loads(block.text)
        if block.kind == "settings":
            Config.from_dict(data.get("tool", {}).get("trimtab", data))
    except (tomllib.TOMLDecodeError, TrimtabError) as error:
        yield f"{block.where}: {error}"


@cache
def _tree() -> Any:
    import typer

    from trimtab.cli.app import app

    return typer.main.get_command(app)


def unknown_words(line: str) -> Iterator[str]:
    """Commands and options of `trimtab` in a line that do not exist.

    Example:
        >>> list(unknown_words("trimtab report --htlm  # a typo"))
        ['trimtab report takes no --htlm']
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        yield f"not a command line: {line} ({error})"
        return
    for place, word in enumerate(words):
        if word.rpartition("/")[2] == "trimtab" and (place == 0 or words[place - 1] in ("&&", ";", "|")):
            ends = [n for n in range(place + 1, len(words)) if words[n] in ("&&", ";", "|", ">", "2>")]
            yield from _unknown(words[place + 1 : ends[0] if ends else len(words)])


def _unknown(words: list[str]) -> Iterator[str]:
    command, path = _tree(), "trimtab"
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            return
        if words[0] not in command.commands:
            yield f"{path} has no command {words[0]!r}"
            return
        command, path, words = command.commands[words[0]], f"{path} {words[0]}", words[1:]
    if path == "trimtab train":
        yield from _unknown_recipe(words)
        return
    yield from _flags(words, command, path)


def _unknown_recipe(words: list[str]) -> Iterator[str]:
    import typer

    from trimtab.cli.train import command_of
    from trimtab.train.recipes import RECIPES, load_recipe

    if not words or words[0].startswith("-") or words[0].isupper():
        return
    if words[0] not in dict(RECIPES):
        yield f"trimtab train has no recipe {words[0]!r}"
        return
    command: Any = typer.main.get_command(command_of(load_recipe(words[0])))
    yield from _flags(words[1:], command, f"trimtab train {words[0]}")


def _flags(words: list[str], command: Any, path: str) -> Iterator[str]:
    from trimtab.train.recipes import RECIPES

    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    for word in words:
        if path in ("trimtab run", "trimtab doctor") and (word.endswith(".py") or word == "-m"):
            return  # what follows is the script's own
        if path == "trimtab doctor" and word in dict(RECIPES):
            yield from _unknown_recipe(words[words.index(word) :])
            return
        flag = word.partition("=")[0]
        if re.match(r"--?[a-zA-Z]", flag) and flag.replace("_", "-") not in known:
            yield f"{path} takes no {flag}"
