"""When two outputs are the same: times, dates, run names, folders and versions never count, digits where they must."""

from __future__ import annotations

import re
from pathlib import Path

ALWAYS = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\d{8}-\d{6}-\d+-[0-9a-f]{4}"), "RUN"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+\d\d:?\d\d|Z)?"), "DATE"),
    (re.compile(r"\d+(\.\d+)? (ms|s|min|h|days?)( ago)?\b"), "TIME"),
    (re.compile(r"\b\d\d:\d\d(:\d\d)?\b"), "CLOCK"),
    (re.compile(r"\b\d+\.\d+\.\d+([+.][\w.]+)?"), "VERSION"),
    (re.compile(r"\bpid \d+ on \S+"), "pid"),
    (re.compile(r"\bdigest [0-9a-f]{6,}"), "digest"),
)
NUMBER = re.compile(r"[-+]?\d+(,\d{3})*(\.\d+)?([eE][-+]?\d+)?|\bnan\b|\binf\b")
GLYPHS = re.compile(r"[▁▂▃▄▅▆▇█×─│┤└┘┌┐]+")


def plain(text: str, folder: Path | None = None) -> str:
    """The text without what differs from run to run."""
    if folder is not None:
        text = text.replace(f"{folder.resolve()}/", "").replace(str(folder.resolve()), ".")
    for pattern, instead in ALWAYS:
        text = pattern.sub(instead, text)
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def loose(text: str) -> str:
    """The text as words: no digits, no bars of charts, no line ends, which all follow from digits."""
    return " ".join(GLYPHS.sub("~", NUMBER.sub("#", text)).split())


def same(shown: str, real: str, options: frozenset[str]) -> bool:
    """Whether what a page shows is what was produced, as strictly as its options say.

    Example:
        >>> same("loss 0.31 after 3 s", "loss 0.33 after 4 s", frozenset())
        False
        >>> same("loss 0.31 after 3 s", "loss 0.33 after 4 s", frozenset({"numbers"}))
        True
        >>> same("a\\n…\\nd", "a\\nb\\nc\\nd\\ne", frozenset({"excerpt"}))
        True
    """
    fold = loose if "numbers" in options else str
    if "excerpt" not in options:
        return fold(plain(shown)) == fold(plain(real))
    rest = fold(plain(real))
    for part in re.split(r"^\s*…\s*$", plain(shown), flags=re.MULTILINE):
        wanted = fold(part.strip("\n"))
        place = rest.find(wanted)
        if place < 0:
            return False
        rest = rest[place + len(wanted) :]
    return True


def tidy(text: str, folder: Path) -> str:
    """Real output, as it is written into a page: its folder is the reader's own."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = text.replace(f"{folder.resolve()}/", "").replace(str(folder.resolve()), ".")
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
