"""Runs what one page shows, in a folder of its own: commands in a shell, each Python block in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMAND_S = 600.0
LOOP = Path(__file__).with_name("docs_loop.py")


def environment(*first: Path) -> dict[str, str]:
    """What every command sees: this interpreter's commands (and those of `first`), plain text 80 wide, one thread."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRIMTAB_", "PYTEST_", "COV_"))}
    path = [*map(str, first), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    kept |= {"PATH": os.pathsep.join(path), "COLUMNS": "80"}
    kept |= {"NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "error"}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


class Session:
    """A folder with a shell, and the interpreter of the newest Python block."""

    def __init__(self, folder: Path, *first: Path) -> None:
        self.folder, self._environment = folder, environment(*first)
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

    def python(self, code: str, *options: str, continues: bool = False) -> tuple[str, int]:
        """What a block of Python prints; 1 where it raised. Only one that continues finds the names before it."""
        if not continues:
            self.close()
        if self._python is None:
            own = tempfile.mkdtemp(prefix="reader-", dir=self.folder) if "fragment" in options else None
            self._python = subprocess.Popen(
                ["python", str(LOOP)],
                cwd=own or self.folder,  # a fragment is for the reader's folder, not for that of the page
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        self._python.stdin.write(json.dumps([code, options]) + "\n")
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
            self._python = None
