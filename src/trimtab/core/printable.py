"""Text from files and names that is safe on a terminal: control, bidirectional and invisible characters are escaped.

An escape sequence in a tensor's name could otherwise recolour, overwrite or retitle the terminal that shows it, and a
bidirectional override could make one name look like another.
"""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

FINDINGS_LOG = "trimtab.findings"
"""Where a guard logs its findings: whoever shows them in another way silences this logger alone."""
LINES_LOG = "trimtab.lines"
"""Where the documented lines of a preset go."""
LOGGERS = ("trimtab", "trimtab.checkpoint", "trimtab.record", FINDINGS_LOG, LINES_LOG)
"""All that trimtab logs to: a filter of a logger is not asked about the messages of its children."""


def printable(text: object, *, one_line: bool = False) -> str:
    """`text` with everything escaped that a terminal would act on or hide; line breaks and tabs may stay.

    Example:
        >>> print(printable("loss" + chr(27) + "[2J" + chr(0x202E) + "gnp"))
        loss\\x1b[2J\\u202egnp
        >>> print(printable("one" + chr(10) + "two", one_line=True))
        one\\ntwo
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = "" if one_line else "\n\t"
    return "".join(c if c in kept or _is_safe(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def brief(value: object, length: int = 200) -> str:
    """A value from a file on one line of at most `length` characters, whatever it is.

    Example:
        >>> brief("a" * 300, 10), brief(16**5000)
        ('aaaaaaaaa…', 'a number of 20001 bits')
    """
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"
    try:
        text = printable(value, one_line=True)
    except (ValueError, RecursionError):  # a long number inside of it, or too deep
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= length else f"{text[: length - 1]}…"


def safe_json(text: str) -> str:
    """JSON that means the same, with those characters escaped that JSON lets through and a terminal acts on.

    Example:
        >>> print(safe_json('{"name": "a' + chr(0x9B) + '2Jb"}'))
        {"name": "a\\u009b2Jb"}
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t\r" or _is_safe(c) else json.dumps(c)[1:-1] for c in text)


def make_log_printable() -> None:
    """See to it that no message of trimtab's log brings control characters from a file to the terminal."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _Printable) for one in logger.filters):
            logger.addFilter(_Printable())


@contextmanager
def silenced(name: str = "trimtab") -> Iterator[None]:
    """Let a logger of trimtab's and its children say nothing for a while.

    Example:
        >>> with silenced():
        ...     logging.getLogger("trimtab.record").warning("not heard")
    """
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Printable(logging.Filter):
    """Escapes what a message holds; one that is printable as it is stays untouched."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except (TypeError, ValueError, KeyError):  # logging itself reports a message that does not fit its arguments
            return True
        if (safe := printable(text)) != text:
            record.msg, record.args = safe, ()
        return True


def _is_safe(character: str) -> bool:
    """Whether a terminal just shows it; spaces of all widths are no letters, but harmless."""
    return character.isprintable() or unicodedata.category(character) == "Zs"
