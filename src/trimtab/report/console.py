"""The console that everything is printed on: what comes from a file can neither act on the terminal nor style text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trimtab.core.printable import printable


class SafeConsole(Console):
    """A rich console that escapes control characters in all it prints, and takes `[bold]` for the text it is.

    Example:
        >>> import sys
        >>> SafeConsole(file=sys.stdout, width=40).print("a[red]b" + chr(27) + "[2J")
        a[red]b\\x1b[2J
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**({"highlight": False, "emoji": False, "markup": False} | how))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich renders, with unsafe text escaped; colours and cursor movements are not text."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
