"""Charts as pictures that stand alone: SVG as text, PNG through Pillow. Both draw the same shapes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any

import numpy as np

from trimtab.core.errors import MissingPackageError
from trimtab.core.printable import brief
from trimtab.report.chart import is_wide
from trimtab.report.downsample import Floats, downsample

COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a")
INK, FAINT, BAD = "#24292f", "#d0d7de", "#cf222e"
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 34, 44
NUM_BUCKETS = 400
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series over `x`, in order: what it is called, its values, and whether it is drawn as points."""

    name: str
    x: Floats
    values: Floats
    as_points: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One chart: lines on a common axis, with titles and units."""

    title: str
    lines: tuple[Line, ...]
    x_title: str = "step"
    y_title: str = ""
    log: bool | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """One thing to draw: `kind` is line, area, dot or text."""

    kind: str
    points: tuple[Point, ...]
    colour: str
    width: float = 1.0
    text: str = ""
    anchor: str = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """From values to places on the picture."""

    x_low: float
    x_high: float
    low: float
    high: float
    log: bool
    width: int
    height: int

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        return LEFT + (value - self.x_low) / (span or 1.0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high, here = (
            (math.log10(v) for v in (self.low, self.high, max(value, self.low)))
            if self.log
            else (self.low / 2, self.high / 2, value / 2)  # halves: the whole span may lie beyond all floats
        )
        return self.height - BOTTOM - (here - low) / ((high - low) or 1.0) * (self.height - TOP - BOTTOM)


def shapes(picture: Picture, width: int = 800, height: int = 280) -> Iterator[Shape]:
    """All of a picture: axes, and for each line a band of its extremes with a line through the middle."""
    values = np.concatenate([line.values for line in picture.lines] or [np.empty(0)])
    finite = values[np.isfinite(values)]
    places = np.concatenate([line.x for line in picture.lines] or [np.empty(0)])
    yield Shape("text", ((LEFT, 18),), INK, 14, brief(picture.title, 80))
    if not finite.size:
        yield Shape("text", ((LEFT, height / 2),), INK, 12, "no finite value was recorded")
        return
    log = is_wide(finite.tolist()) if picture.log is None else picture.log and float(finite.min()) > 0
    low, high = _room(float(finite.min()), float(finite.max()), log)
    axes = _Axes(
        x_low=float(places.min()), x_high=float(places.max()), low=low, high=high, log=log, width=width, height=height
    )
    yield from _frame(picture, axes)
    for number, line in enumerate(picture.lines):
        yield from _drawn(line, axes, COLOURS[number % len(COLOURS)])
    yield from _legend(picture, axes)


def _room(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return low, high
    space = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (low - space, high + space) if math.isfinite(low - space) and math.isfinite(high + space) else (low, high)


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers between two values.

    Example:
        >>> ticks(0.0, 10.0, False), ticks(0.05, 200.0, True)
        ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.1, 1.0, 10.0, 100.0])
    """
    if log:
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        every = max(1, (last - first) // 5)
        found = [10.0**e for e in range(first, last + 1, every)]
        return found if len(found) > 1 else [low, high]
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(span / 4))
    size = next(size * m for m in (1, 2, 5, 10) if span / (size * m) <= 6)
    first = math.ceil(low / size - 1e-9)
    return [i * size for i in range(first, math.floor(high / size + 1e-9) + 1)]


def _frame(picture: Picture, axes: _Axes) -> Iterator[Shape]:
    bottom, right = axes.height - BOTTOM, axes.width - RIGHT
    for value in ticks(axes.low, axes.high, axes.log):
        y = axes.y(value)
        yield Shape("line", ((LEFT, y), (right, y)), FAINT)
        yield Shape("text", ((LEFT - 6, y + 4),), INK, 11, f"{value:.3g}", "end")
    for value in ticks(axes.x_low, axes.x_high, log=False):
        x = axes.x(value)
        yield Shape("line", ((x, bottom), (x, bottom + 4)), INK)
        yield Shape("text", ((x, bottom + 17),), INK, 11, f"{value:,.6g}", "middle")
    yield Shape("line", ((LEFT, bottom), (right, bottom)), INK)
    yield Shape("text", (((LEFT + right) / 2, axes.height - 8),), INK, 11, picture.x_title, "middle")
    scale = f"{picture.y_title} (log scale)" if axes.log else picture.y_title
    yield Shape("text", ((right, 18),), INK, 11, scale.strip(), "end")


def _drawn(line: Line, axes: _Axes, colour: str) -> Iterator[Shape]:
    bottom = axes.height - BOTTOM
    if line.as_points or len(line.values) == 1:
        for x, value in zip(line.x.tolist(), line.values.tolist(), strict=True):
            if math.isfinite(value):
                yield Shape("dot", ((axes.x(x), axes.y(value)),), colour, 3.0)
        return
    order = np.argsort(line.x, kind="stable")
    at = line.x[order]
    buckets = downsample(np.arange(len(at)), line.values[order], num_buckets=NUM_BUCKETS)
    stretch: list[tuple[float, float, float, float]] = []
    for first, low, middle, high, bad in zip(
        buckets.first, buckets.low, buckets.middle, buckets.high, buckets.bad, strict=True
    ):
        x = axes.x(float(at[first]))
        if bad:
            yield Shape("line", ((x, bottom), (x, bottom - 10)), BAD, 2.0)
        if math.isnan(middle):
            yield from _stretch(stretch, colour)
            stretch = []
        else:
            stretch.append((x, axes.y(float(low)), axes.y(float(middle)), axes.y(float(high))))
    yield from _stretch(stretch, colour)


def _stretch(points: Sequence[tuple[float, float, float, float]], colour: str) -> Iterator[Shape]:
    """A part of a line without a gap."""
    if any(low != high for _, low, _, high in points):
        upper, lower = [(x, high) for x, _, _, high in points], [(x, low) for x, low, _, _ in points]
        yield Shape("area", (*upper, *reversed(lower)), colour)
    if points:
        middle = tuple((x, y) for x, _, y, _ in points)
        yield Shape("line", middle if len(middle) > 1 else (middle[0], (middle[0][0] + 1, middle[0][1])), colour, 1.5)


def _legend(picture: Picture, axes: _Axes) -> Iterator[Shape]:
    if len(picture.lines) < 2 and not any(line.name for line in picture.lines):
        return
    x = float(LEFT + 8 * len(brief(picture.title, 80)) + 24)
    for number, line in enumerate(picture.lines):
        colour = COLOURS[number % len(COLOURS)]
        name = brief(line.name, 36)
        yield Shape("line", ((x, 14), (x + 16, 14)), colour, 3.0)
        yield Shape("text", ((x + 21, 18),), INK, 11, name)
        x += 34 + 6.5 * len(name)


def to_svg(pictures: Sequence[Picture], width: int = 800, height: int = 280) -> str:
    """All pictures below each other, as one SVG file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * len(pictures)}" '
        f'viewBox="0 0 {width} {height * len(pictures)}" font-family="sans-serif" role="img" '
        f'aria-label="{_safe(", ".join(p.title for p in pictures))}"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for number, picture in enumerate(pictures):
        inner = "".join(_svg(shape) for shape in shapes(picture, width, height))
        parts.append(f'<g transform="translate(0 {number * height})">{inner}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _safe(text: str) -> str:
    return escape(brief(text, 300)).encode("utf-8", "replace").decode()


def _svg(shape: Shape) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
    (x, y) = shape.points[0]
    match shape.kind:
        case "line":
            return f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"/>'
        case "area":
            return f'<polygon points="{points}" fill="{shape.colour}" fill-opacity="0.2"/>'
        case "dot":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{shape.width:g}" fill="{shape.colour}"/>'
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{shape.width:g}" text-anchor="{shape.anchor}" fill="{shape.colour}"'
    return f"<text {place}>{_safe(shape.text)}</text>"


def to_png(pictures: Sequence[Picture], width: int = 800, height: int = 280, scale: int = 2) -> bytes:
    """The same as a PNG with `scale` pixels for each of SVG's; needs Pillow."""
    try:
        image_of: Any = import_module("PIL.Image")
        draw_of: Any = import_module("PIL.ImageDraw")
        font_of: Any = import_module("PIL.ImageFont")
    except ImportError as error:
        raise MissingPackageError(f"a PNG needs Pillow ({error}): pip install pillow; --svg needs nothing") from error
    image = image_of.new("RGB", (width * scale, height * scale * len(pictures)), "white")
    pen = draw_of.Draw(image, "RGBA")
    for number, picture in enumerate(pictures):
        for shape in shapes(picture, width, height):
            _paint(pen, shape, number * height, scale, font_of)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _paint(pen: Any, shape: Shape, down: float, scale: int, fonts: Any) -> None:
    points = [(x * scale, (y + down) * scale) for x, y in shape.points]
    match shape.kind:
        case "line":
            pen.line(points, fill=shape.colour, width=max(round(shape.width * scale), 1), joint="curve")
        case "area":
            pen.polygon(points, fill=shape.colour + "33")
        case "dot":
            (x, y), r = points[0], shape.width * scale
            pen.ellipse((x - r, y - r, x + r, y + r), fill=shape.colour)
        case _:
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
            font = fonts.load_default(size=shape.width * scale)
            pen.text(points[0], brief(shape.text, 120), fill=shape.colour, font=font, anchor=anchor)
