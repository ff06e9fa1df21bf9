"""The tutorial of CONTRIBUTING.md, carried out as it is written, in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "pyproject.toml")


def steps() -> list[str]:
    """The numbered steps of "Add a rule", each with its code."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Add a rule")[2].partition("\n## ")[0]
    return re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]


def code_in(step: str) -> str:
    """The only block of Python in a step."""
    (found,) = re.findall(r"^ *```python\n(.*?)^ *```", step, flags=re.MULTILINE | re.DOTALL)
    return textwrap.dedent(found)


def files_in(step: str) -> list[str]:
    """The files that a step names, in their order."""
    return re.findall(r"`((?:src|tests)/[\w/]+\.py)`", step)


def replace(path: Path, old: str, new: str) -> None:
    """Change the only place where this text stands."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new), encoding="utf-8")


def words(step: str, pattern: str) -> tuple[str, ...]:
    """What a step says, where it says it in this form; line breaks do not matter."""
    found = re.search(pattern, " ".join(step.split()))
    assert found, f"the step does not say {pattern!r}: {step}"
    return found.groups()


def run(repository: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Python in the copy, which imports the copy and nothing of this checkout."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(repository / "src"), str(repository)))}
    env.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository."""
    made = tmp_path_factory.mktemp("repository")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, made / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, made / name)
    return made


def test_a_rule_is_added_as_the_tutorial_says(repository: Path) -> None:
    cases, rule, listed, fault, last, _ = steps()

    name, path = words(cases, r"in front of `(\w+)` in `([\w/.]+)`")
    replace(repository / path, f"\n{name} = [", f"\n{code_in(cases)}\n{name} = [")
    each_rule = path

    (path,) = files_in(rule)
    assert not (repository / path).exists()
    (repository / path).write_text(code_in(rule), encoding="utf-8")

    (path,) = files_in(listed)
    (follower,) = words(listed, r"in front of `(\w+)`")
    line = code_in(listed)
    replace(repository / path, "\n# In the order of cause", f"{line}\n# In the order of cause")
    replace(repository / path, f"\n    {follower},", f"\n    {line.split()[-1]},\n    {follower},")

    faults, listing = files_in(fault)
    with (repository / faults).open("a", encoding="utf-8") as file:
        file.write(f"\n\n{code_in(fault)}")
    new, known = words(fault, r"the name `([\w-]+)` to `(\w+)`")
    replace(repository / listing, f'\n{known} = """\n', f'\n{known} = """\n    {new}\n')

    folders = words(last, r"Run `pytest ([\w/ ]+)`")[0].split()
    complete = "tests/meta/test_public_face.py::test_every_rule_has_a_test_that_triggers_it_and_a_page"
    chosen = [complete, "tests/faults/test_faults.py", each_rule]
    assert all(any(one.startswith(f"{folder}/") for folder in folders) for one in chosen)
    plain = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")
    done = run(repository, *plain, *chosen, "-k", "every_rule or LOSS099 or sign-flips-midway or complete")
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout

    said = run(repository, "-m", "trimtab", "explain", "LOSS099")
    assert said.returncode == 0, said.stderr
    assert "Remove the minus sign in front of the loss." in said.stdout
