"""A comparison of two runs for people: on a terminal, and as one HTML file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.report.chart import sparkline
from trimtab.report.compare import Comparison, Overlay, pictures
from trimtab.report.downsample import Floats
from trimtab.report.drawing import to_svg
from trimtab.report.headline import short
from trimtab.report.text import wrapped


def number(value: float | None) -> str:
    """A number of a comparison.

    Example:
        >>> number(None), number(float("nan")), number(float("inf")), number(1234.0), number(0.00123456), number(3e30)
        ('-', 'NaN', 'Inf', '1,234', '0.001235', '3e+30')
    """
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:,.0f}" if abs(value) < 1e12 and value == int(value) else f"{value:.4g}"


def times(num: int, first: int | None) -> str:
    """How often a rule spoke, and when first."""
    if first is None:
        return "-"
    return f"step {first:,}" if num == 1 else f"{num:,} times, first at step {first:,}"


def render_comparison(found: Comparison, width: int) -> RenderableType:
    """All of it for a rich console."""
    return Group(*_parts(found, max(min(width, 120), 40)))


def _parts(found: Comparison, width: int) -> Iterator[RenderableType]:
    yield wrapped(found.verdict, width, "", style="")
    if found.axis == "step":
        first = found.same_until
        same = "The losses are the same at every step that both made."
        yield Text(f"The losses first differ at step {first:,}." if first is not None else same, style="dim")
    for letter, name, headline in zip("AB", found.names, found.headlines, strict=True):
        yield Text.assemble("\n", (f"{letter} {name}", "bold"))
        yield wrapped(headline, width, "  ")
    for overlay in found.overlays:
        yield from _curves(overlay, found.axis, width)
    yield Text("\nNumbers", style="bold")
    yield _table(["", "A", "B"], [[m.name, number(m.a), number(m.b)] for m in found.measures], right=True)
    yield Text("\nFindings", style="bold")
    rows = [[f"{f.code} {f.name}", times(f.num_a, f.first_a), times(f.num_b, f.first_b)] for f in found.found]
    yield _table(["", "A", "B"], rows) if rows else Text("none in either run")
    for title, differences in (("Settings that differ", found.settings), ("What else differs", found.facts)):
        yield Text(f"\n{title}", style="bold")
        rows = [[d.name, d.a or "-", d.b or "-"] for d in differences]
        yield _table(["", "A", "B"], rows) if rows else Text("nothing")


def _table(heads: list[str], rows: list[list[str]], *, right: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for head in heads:
        table.add_column(head, justify="right" if right and head else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _curves(overlay: Overlay, axis: str, width: int) -> Iterator[Text]:
    """Both curves on the same axes, one above the other."""
    who = f"{overlay.optimizer}: " if overlay.optimizer else ""
    last = max(float(side[0][-1]) for side in (overlay.a, overlay.b) if len(side[0]))
    columns = [_columns(side, last, width - 14) for side in (overlay.a, overlay.b)]
    every = [v for part in columns for v in part if not math.isnan(v)]
    yield Text.assemble("\n", (f"{who}{overlay.title}", "bold"), (f"  to {axis} {last:,.6g}, same scale", "dim"))
    for letter, side, values in zip("AB", (overlay.a, overlay.b), columns, strict=True):
        if not len(side[0]):
            yield Text(f"  {letter} not recorded", style="dim")
            continue
        reached = round(float(side[0][-1]) / last * len(values)) if last else len(values)
        drawn = sparkline(values[: max(reached, 1)], width - 14, beside=every)
        yield Text.assemble(
            f"  {letter} {short(float(side[1][-1])):<9} ", (drawn, "cyan" if letter == "A" else "magenta")
        )


def _columns(side: tuple[Floats, Floats], last: float, num: int) -> list[float]:
    """The highest finite value in each column of a common axis; a column without a value repeats the one before."""
    at, values = side
    out = [math.nan] * num
    where = np.minimum((at / (last or 1.0) * num).astype(np.int64), num - 1)
    seen: set[int] = set()
    for column, value in zip(where.tolist(), values.tolist(), strict=True):
        seen.add(column)
        if math.isfinite(value) and not value <= out[column]:
            out[column] = value
    for column in range(1, num):
        if column not in seen:
            out[column] = out[column - 1]
    return out


@cache
def _page() -> tuple[Environment, str, str]:
    home = files("trimtab.report") / "page"
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.globals.update(number=number, times=times)
    return (
        env,
        home.joinpath("compare.html.j2").read_text(encoding="utf-8"),
        home.joinpath("lists.css").read_text(encoding="utf-8"),
    )


def comparison_html(found: Comparison) -> str:
    """The comparison as a page that stands alone."""
    env, source, style = _page()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    return env.from_string(source).render(
        found=found,
        pictures=[to_svg([picture], 1000, 280) for picture in pictures(found)],
        style=style,
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
    )


def write_comparison(found: Comparison, path: Path) -> Path:
    """Write the page; it appears under its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".writing")
    try:
        temporary.write_text(comparison_html(found), encoding="utf-8", errors="replace", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
