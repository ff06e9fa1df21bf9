"""What a notebook shows for a guard, a run, a verdict or a finding: a small piece of HTML that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from trimtab.core.severity import Severity

if TYPE_CHECKING:
    from trimtab.core.types import Finding

NUM_SHOWN = 5
_COLOURS = {Severity.WARN: "#9a6700", Severity.ERROR: "#cf222e", Severity.FATAL: "#a40e26"}
_BOX = "border:1px solid #8884;border-radius:6px;padding:.6em .9em;max-width:60em;font-family:sans-serif"
_WIDTH, _HEIGHT, _NUM_POINTS = 360, 48, 180


def safe(text: object) -> str:
    """Text for HTML; half a surrogate pair is replaced.

    Example:
        >>> safe("<b>")
        '&lt;b&gt;'
    """
    return escape(str(text)).encode("utf-8", "replace").decode()


def finding_html(finding: Finding) -> str:
    """One finding: what, where, when, and what to do first."""
    where = f" in {safe(', '.join(finding.subject[:3]))}" if finding.subject else ""
    more = f" and {len(finding.subject) - 3} more" if len(finding.subject) > 3 else ""
    todo = f'<div style="margin-top:.2em">Do first: {safe(finding.advice[0])}</div>' if finding.advice else ""
    return (
        f'<div style="margin:.4em 0;padding-left:.6em;border-left:4px solid {_COLOURS[finding.severity]}">'
        f"<b>step {finding.step:,}: {safe(finding.code)} {safe(finding.name)}</b>{where}{more}"
        f"<div>{safe(finding.message)}</div>{todo}</div>"
    )


def box(title: str, facts: Sequence[tuple[str, object]] = (), findings: Iterable[Finding] = (), below: str = "") -> str:
    """A frame with a title, facts on one line, the first findings, and a piece of HTML `below`."""
    every = list(findings)
    line = " · ".join(f"{safe(name)} <b>{safe(value)}</b>" for name, value in facts)
    rest = f"<div>… and {len(every) - NUM_SHOWN:,} more findings</div>" if len(every) > NUM_SHOWN else ""
    return (
        f'<div style="{_BOX}"><div style="font-weight:600">{safe(title)}</div><div>{line}</div>'
        f"{''.join(map(finding_html, every[:NUM_SHOWN]))}{rest}{below}</div>"
    )


def curve_svg(values: Sequence[float], label: str) -> str:
    """A small line of a scalar; where nothing is finite there is none. Each stretch shows its lowest and its highest.

    Example:
        >>> curve_svg([float("nan")], "loss")
        ''
        >>> curve_svg([1.0, 3.0, 2.0], "loss").count("<path")
        1
    """
    num = max(1, math.ceil(len(values) / _NUM_POINTS))
    parts = [[v for v in values[i : i + num] if math.isfinite(v)] for i in range(0, len(values), num)]
    points = [(i, v) for i, part in enumerate(parts) if part for v in dict.fromkeys((min(part), max(part)))]
    if not points:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    span, last = high - low, max(len(parts) - 1, 1)
    if not math.isfinite(span):
        return ""

    def place(i: int, value: float) -> str:
        return f"{i / last * _WIDTH:.1f},{_HEIGHT - 2 - ((value - low) / span if span else 0.5) * (_HEIGHT - 4):.1f}"

    words = f"{label}: first {points[0][1]:.3g}, lowest {low:.3g}, highest {high:.3g}, last {points[-1][1]:.3g}"
    return (
        f'<svg role="img" aria-label="{safe(words)}" width="{_WIDTH}" height="{_HEIGHT}" style="display:block;'
        f'margin-top:.4em"><path d="M{" L".join(place(i, v) for i, v in points)}" fill="none" stroke="#0969da" '
        f'stroke-width="1.5"/></svg><div style="font-size:85%">{safe(words)}</div>'
    )
