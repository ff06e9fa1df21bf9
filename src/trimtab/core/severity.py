"""How bad a finding is; apart from the other types, so that settings can be read without numpy."""

from __future__ import annotations

from enum import IntEnum


class Severity(IntEnum):
    """How bad a finding is. There is no INFO: a finding is always an alarm, notices go to the log."""

    WARN = 1
    ERROR = 2
    FATAL = 3

    @classmethod
    def parse(cls, text: str | int | Severity) -> Severity:
        """Read `"warn"`, `"ERROR"`, `2` or a Severity."""
        try:
            return cls[text.upper()] if isinstance(text, str) else cls(text)
        except (KeyError, ValueError):
            raise ValueError(f"severity {text!r} is none of warn, error, fatal") from None
