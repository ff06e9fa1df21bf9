"""The interpreter of a page: reads the code of one block per line of JSON, answers with what it printed."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from typing import Any


def main() -> None:
    """Run blocks until there are no more; they share their names, as the reader's own session would."""
    names: dict[str, Any] = {"__name__": "__main__"}
    answers = sys.stdout
    for line in sys.stdin:
        out, failed = io.StringIO(), False
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                exec(compile(json.loads(line), "<the page>", "exec"), names)
            except BaseException:
                failed = True
                traceback.print_exc(file=out)
        answers.write(json.dumps([out.getvalue(), failed]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
