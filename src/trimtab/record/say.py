"""Prints a line above whatever progress bar is live."""

from __future__ import annotations

import sys
from typing import TextIO

from trimtab.core.printable import printable


def say(line: str, stream: TextIO) -> None:
    """Print one line to a stream without tearing a live tqdm bar apart; nothing in it acts on the terminal."""
    line = printable(line)
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None and len(getattr(bars, "_instances", ())) > 0:
        bars.write(line, file=stream)
        return
    stream.write(line + "\n")
    stream.flush()
