"""Runs what one page shows, in a folder of its own: commands in a shell, Python in one process that keeps its names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND_S = 600.0
# A line of JSON holds the code of one block; the answer is a line of JSON with what it printed.
LOOP = """
import contextlib, io, json, logging, sys, traceback
names, answers = {"__name__": "__main__"}, sys.stdout
for line in sys.stdin:
    out, failed = io.StringIO(), False
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            exec(compile(json.loads(line), "<the page>", "exec"), names)
        except BaseException:
            failed = True
            traceback.print_exc(file=out)
    answers.write(json.dumps([out.getvalue(), failed]) + "\\n")
    answers.flush()
"""


def environment(root: Path) -> dict[str, str]:
    """What every command sees: this interpreter's commands, plain text 80 wide, one thread."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRIMTAB_", "PYTEST_", "COV_"))}
    kept |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}", "COLUMNS": "80"}
    kept |= {"NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "error"}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "TRIMTAB_REPO": str(root)}


class Session:
    """A folder with a shell and, from the first Python block on, an interpreter."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self._environment = folder, environment(root)
        self._python: subprocess.Popen[str] | None = None

    def shell(self, command: str) -> tuple[str, int]:
        """What a command prints, stdout and stderr as they come, and its exit code."""
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"still running after {COMMAND_S:.0f} s", 124
        return done.stdout, done.returncode

    def python(self, code: str) -> tuple[str, int]:
        """What a block of Python prints; 1 where it raised."""
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-u", "-c", LOOP],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        self._python.stdin.write(json.dumps(code) + "\n")
        self._python.stdin.flush()
        answer: Any = self._python.stdout.readline()
        if not answer:
            return "the interpreter has ended", 1
        printed, failed = json.loads(answer)
        return printed, int(failed)

    def close(self) -> None:
        """End the interpreter."""
        if self._python is not None:
            self._python.communicate()
