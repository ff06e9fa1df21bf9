"""A sink that prints the documented lines at the documented cadence, with measured numbers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol, TextIO

from trimtab.compat import lines
from trimtab.compat.lines import CADENCE, EVENTS, LIMITS, STYLES, Facts
from trimtab.core.errors import ConfigError, InputError
from trimtab.core.presets import get_preset
from trimtab.core.printable import LINES_LOG
from trimtab.core.types import Record, RunInfo, Sample
from trimtab.record.sinks import say

log = logging.getLogger(LINES_LOG)
STREAMS = ("stderr", "stdout")


class Bar(Protocol):
    """What is used of a tqdm bar."""

    def set_postfix(self, values: dict[str, str], refresh: bool) -> object:
        """Show these values."""
        ...


class LineSink:
    """Prints the documented lines of one style.

    `style` is `a11`, `b5`, `b8`, `b9`, `c4`, `d2`, `e13`, several joined by `+`, or the name of a preset that has
    lines. `every` changes the cadence in steps. Lines go to the logger `trimtab.lines` (warnings at WARNING, the
    rest at INFO), to `stream` (an open one, or "stderr", "stdout") above any live tqdm bar, or to the function `write`.
    `bar` is a tqdm bar that shows loss and gradient norm. A line with a number that was not measured is left out.

    Example:
        >>> from trimtab.core.types import Layout
        >>> import numpy as np
        >>> empty = Layout(names=(), kinds=(), numel=())
        >>> scalars = {"grad_norm": 2.0, "clip_coef": 0.5}
        >>> LineSink("d2", write=print).write(Sample(step=0, layout=empty, table=np.empty((0, 7)), scalars=scalars))
        Gradient norm before clipping: 2.000000
        Gradient norm after clipping: 1.000000
    """

    says_lines: ClassVar[bool] = True

    def __init__(
        self,
        style: str,
        every: int | None = None,
        stream: TextIO | str | None = None,
        *,
        write: Callable[[str], object] | None = None,
        bar: Bar | None = None,
    ) -> None:
        if isinstance(stream, str) and stream not in STREAMS:
            raise InputError(f"the lines cannot go to {stream!r}; expected {' or '.join(STREAMS)}, or an open stream")
        if every is not None and (not isinstance(every, int) or every < 1):
            raise InputError(f"every = {every!r}; expected after how many steps a line comes, 1 or more")
        self._styles, self._limits = _chosen(style)
        if every is not None:
            self._styles = {name: was if name in EVENTS else every for name, was in self._styles.items()}
        self._stream, self._write, self._bar = stream, write, bar
        self._facts: dict[str, Facts] = {}
        self._clip: float | None = None
        self._hinted: set[str] = set()

    def write(self, record: Record) -> None:
        """Print the lines that are due for a sample."""
        if isinstance(record, RunInfo):
            self._begin(record)
        elif isinstance(record, Sample) and record.phase in ("train", "val"):
            facts = self._facts.get(record.optimizer)
            if facts is None:
                facts = self._facts[record.optimizer] = Facts(self._limits, self._clip)
            for name, every in self._styles.items():
                self._print(STYLES[name](record, every, facts), record.optimizer)
            for hint in facts.hints - self._hinted:
                self._hinted.add(hint)
                log.info("%s", hint)
            self._show(record)

    def close(self) -> None:
        """Print the summary of the last epoch; the stream stays open."""
        if "b8" in self._styles:
            for optimizer, facts in self._facts.items():
                self._print(facts.epoch.summary(), optimizer)

    def _begin(self, info: RunInfo) -> None:
        clip = info.config.get("clip")
        self._clip = clip.get("norm") if isinstance(clip, dict) else None
        every, full = self._styles.get("c4"), int(info.config.get("full_every", 0))
        if every is not None and (full == 0 or every % full):
            log.info(
                "the line of every %d steps has the norm of the weights, which is measured every %d: "
                "the line comes only at steps with both; set full_every = %d",
                every,
                full,
                every,
            )

    def _print(self, due: Iterable[tuple[int, str]], optimizer: str) -> None:
        for level, text in due:
            line = f"{optimizer}: {text}" if optimizer else text
            if self._write is not None:
                self._write(line)
            elif self._stream is not None:
                say(line, getattr(sys, self._stream) if isinstance(self._stream, str) else self._stream)
            else:
                log.log(level, "%s", line)

    def _show(self, sample: Sample) -> None:
        loss, norm = sample.scalars.get("loss"), sample.scalars.get("grad_norm")
        if self._bar is not None and sample.phase == "train" and loss is not None and norm is not None:
            self._bar.set_postfix(lines.bar_values(loss, norm), refresh=False)


def _chosen(style: str) -> tuple[dict[str, int], dict[str, float]]:
    """The styles with their cadence, and the thresholds of their warnings."""
    names = [part.strip().lower() for part in str(style).split("+")]
    if all(name in CADENCE for name in names):
        limits = {key: value for name in names for key, value in LIMITS.get(name, {}).items()}
        return {name: CADENCE[name] for name in names}, limits
    try:
        preset = get_preset(style)
    except ConfigError as error:
        raise InputError(f"{style!r} names no lines; expected {', '.join(CADENCE)}, or a preset: {error}") from None
    if not preset.lines:
        raise InputError(f"the preset {preset.name!r} has no lines of its own; expected one of {', '.join(CADENCE)}")
    return dict(preset.lines), dict(preset.limits)


def from_text(where: str) -> LineSink:
    """The sink that `lines:STYLE` or `lines:STYLE:stderr` names; `where` is what follows `lines:`."""
    style, _, stream = where.partition(":")
    return LineSink(style, stream=stream or None)
