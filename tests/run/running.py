"""Runs a program with and without trimtab, and says what came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trimtab

SOURCE = Path(trimtab.__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
SHIFTING = re.compile(r"\[W\d+ [\d:.]+|^W\d{4} [\d:.]+ \d+|0x[0-9a-f]+|\bpid \d+")
"""What differs between any two runs: times in PyTorch's own warnings, addresses, process numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One run of one program: all that can be seen of it from outside."""

    code: int
    out: str
    err: str

    @property
    def finite(self) -> bool | None:
        """What the program itself says of its weights."""
        said = re.findall(r"^finite (True|False)$", self.out, re.MULTILINE)
        return None if not said else "False" not in said

    @property
    def own_err(self) -> list[str]:
        """What the program itself said on stderr."""
        lines = self.err.splitlines(keepends=True)
        return [SHIFTING.sub("*", line) for line in lines if not line.startswith("trimtab")]

    @property
    def our_err(self) -> list[str]:
        """What trimtab said there."""
        return [line for line in self.err.splitlines() if line.startswith("trimtab")]

    @property
    def findings(self) -> list[str]:
        """What trimtab found."""
        return [line for line in self.our_err if re.match(r"trimtab (INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)", line)]


class Nest:
    """The process that forks; started when first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, request: Mapping[str, object]) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("nest.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=30)


class Workplace:
    """A folder with the scripts in it, where programs are run with and without trimtab."""

    def __init__(self, folder: Path, nest: Nest, scripts: Path = SCRIPTS) -> None:
        self.folder, self._nest = folder, nest
        shutil.copytree(scripts, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))

    def plain(self, *words: str, own_process: bool = False, stdin: str = "", **env: str) -> Ran:
        return self._run(words, guarded=False, own_process=own_process, stdin=stdin, env=env)

    def guarded(self, *words: str, own_process: bool = False, stdin: str = "", **env: str) -> Ran:
        return self._run(("run", *words), guarded=True, own_process=own_process, stdin=stdin, env=env)

    def _run(
        self, words: Sequence[str], *, guarded: bool, own_process: bool, stdin: str, env: Mapping[str, str]
    ) -> Ran:
        # Only where a script is in a package does it need the folder on its path: those are run from inside it.
        around = {k: v for k, v in os.environ.items() if not k.startswith(("TRIMTAB_", "NAN_AT", "PYTEST_", "COV_"))}
        paths = [str(self.folder), str(SOURCE)]
        around |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **env}
        files = {name: self.folder / f".{name}" for name in ("stdin", "stdout", "stderr")}
        files["stdin"].write_text(stdin, encoding="utf-8")
        for name in ("stdout", "stderr"):
            files[name].write_bytes(b"")
        if own_process or os.environ.get("TRIMTAB_TEST_OWN_PROCESS"):
            start = [sys.executable, *(("-m", "trimtab") if guarded else ()), *words]
            with files["stdin"].open() as a, files["stdout"].open("w") as b, files["stderr"].open("w") as c:
                code = subprocess.run(
                    start, stdin=a, stdout=b, stderr=c, env=around, cwd=self.folder, timeout=120, check=False
                ).returncode
        else:
            request = {"words": list(words), "guarded": guarded, "cwd": str(self.folder), "env": around}
            code = self._nest.run(request | {name: str(path) for name, path in files.items()})
        out, err = (files[name].read_bytes().decode("utf-8", "replace") for name in ("stdout", "stderr"))
        return Ran(code=code, out=out, err=err)
