"""Where a Python program begins that a guarded program started as a command: guarded, too, else as it would have.

It is run by its path (`python child.py START PROGRAM ...`): it is found in whatever environment the command gets.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the program that the command line names after `START`."""
    start, *words = sys.argv[1:]
    sys.path[0] = ""  # not the folder of this file, whose modules have common names
    root = str(Path(__file__).parents[2])
    try:
        import trimtab  # noqa: F401
    except ImportError:
        sys.path.append(root)
    from trimtab.run.children import decoded
    from trimtab.run.runner import run_child
    from trimtab.run.script import CannotStart, Program

    module = words[0] == "-m"
    target, *args = words[1:] if module else words
    try:
        run_child(Program(target=target, args=args, module=module), decoded(start))
    except CannotStart as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
