"""The interpreter of a Python block: reads code, one block per line of JSON, answers with what it printed.

It begins with no names but `__name__`, as the reader's does; for a fragment with those of docs_reader.py as well.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    """Run blocks until there are no more: the first, and those that continue it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    answers = sys.stdout
    for line in sys.stdin:
        code, options = json.loads(line)
        out, failed = io.StringIO(), False
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
            if "cuda" in options:
                warnings.filterwarnings("ignore", message=".*(CUDA|cuda).*")
            if any(option.startswith("needs=") for option in options):  # what those packages warn of is not ours
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", module=r"trimtab\b")
            try:
                if "fragment" in options:
                    sys.path.append(str(Path(__file__).parent))
                    names |= __import__("docs_reader").names()
                exec(compile(code, "<the page>", "exec"), names)
            except BaseException:
                failed = True
                traceback.print_exc(file=out)
        answers.write(json.dumps([out.getvalue(), failed]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
