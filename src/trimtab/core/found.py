"""How a rule words its finding: one call instead of ten lines in every rule."""

from __future__ import annotations

from trimtab.core.types import Finding, Rule
from trimtab.core.window import Window


def found(rule: Rule, window: Window, message: str, subject: tuple[str, ...] = (), **evidence: float | None) -> Finding:
    """A finding of `rule` about the newest sample; evidence that is None is left out."""
    return Finding(
        code=rule.code,
        name=rule.name,
        step=window.now.step,
        severity=rule.severity,
        message=message,
        subject=subject,
        evidence={key: float(value) for key, value in evidence.items() if value is not None},
    )


def listed(names: tuple[str, ...], num: float | None = None) -> str:
    """Names for a sentence: the first few, and how many more there are."""
    total = int(num) if num is not None else len(names)
    head = ", ".join(names[:3])
    return f"{head} and {total - 3} more" if total > 3 and len(names) >= 3 else head
