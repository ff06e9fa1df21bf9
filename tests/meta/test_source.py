"""Rules that every source file keeps, checked by reading it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import trimtab

HOME = Path(trimtab.__file__).parent
INTEGERS = {"arange", "randperm", "randint", "tril_indices", "triu_indices"}
"""Made of integers whatever the default type is."""
FACTORIES = INTEGERS | {
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
    "tensor",
    "zeros",
}
TYPED_BY_INPUT = {"tensor", "as_tensor", "asarray"}
MODEL_MADE_BY_DEFAULTS = {"compat/nn/activation_comparison.py", "compat/nn/layers.py", "losses/module.py"}
"""Modules and their parameters are made as PyTorch's own are: of the default type, on the default device."""


def files() -> Iterator[Path]:
    skipped = (
        "train/recipes",
        "train/demo",
        "train/selftest",
        "drill",
    )  # programs of their own, run under their own defaults
    yield from (p for p in sorted(HOME.rglob("*.py")) if not p.relative_to(HOME).as_posix().startswith(skipped))


def unplaced(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that make a tensor of the default type or on the default device."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        name, given = node.func.attr, {k.arg for k in node.keywords}
        if name not in FACTORIES or None in given:
            continue
        floats = any(isinstance(n, ast.Constant) and isinstance(n.value, float) for a in node.args for n in ast.walk(a))
        needs_type = name not in INTEGERS | TYPED_BY_INPUT or (name in TYPED_BY_INPUT and floats)
        if "device" not in given or (needs_type and "dtype" not in given):
            yield node.lineno, ast.unparse(node)


def test_every_tensor_says_where_it_is_made_and_of_what() -> None:
    """`torch.set_default_device` and `torch.set_default_dtype` are the program's: they must not reach ours."""
    found = {
        name: calls
        for path in files()
        if (name := path.relative_to(HOME).as_posix()) not in MODEL_MADE_BY_DEFAULTS
        if (calls := list(unplaced(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == {}


def test_the_check_can_fail() -> None:
    bad = ["torch.zeros(3)", "torch.zeros(3, dtype=d)", "torch.tensor(0.5, device=d)", "torch.arange(3)"]
    good = ["torch.zeros(3, dtype=d, device=d)", "torch.tensor(x, device=d)", "torch.arange(3, device=d)"]
    assert all(list(unplaced(ast.parse(line))) for line in bad)
    assert not any(list(unplaced(ast.parse(line))) for line in good)


UNPLAIN = (
    r"\banew\b",
    r"\bfor ever\b",
    r"\bleapt\b",
    r"\bmend(s|ed|ing)?\b",
    r"\bin the midst of\b",
    r"\bis no number\b",
    r"\bto the bit\b",
    r"\bin the place of\b",
    r"\bthe (pilot|flight|crew|passenger|letter|mailbox)s?\b",
)
"""Words that a reader stumbles over; plain ones say the same."""


def test_the_words_are_plain() -> None:
    root = HOME.parent.parent
    found = []
    for path in (
        *HOME.rglob("*.py"),
        *(root / "docs").rglob("*.md"),
        *root.glob("*.md"),
        *(root / "tools").glob("*.py"),
    ):
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{path.relative_to(root)}:{i}: {m[0]}" for one in UNPLAIN if (m := re.search(one, line, re.I))]
    known = {"schedule.py"}  # names the fields of states that earlier releases saved
    assert [one for one in found if one.partition(":")[0].rpartition("/")[2] not in known] == []
