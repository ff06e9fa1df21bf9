"""A run while it is going, for a terminal: how far it is, its curves, each module's health, what was found last."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from trimtab.core.errors import RecordError
from trimtab.core.printable import brief
from trimtab.core.types import Column, Finding, Kind
from trimtab.record.reader import RunFollower
from trimtab.record.run_list import RunEntry, State, look_at
from trimtab.report.chart import pick_peaks, sparkline
from trimtab.report.figures import FIRST, INF, LAST, NAN, NO_GRADIENT, ZERO, HeatMap, HeatTable
from trimtab.report.summary import CLOSED, count
from trimtab.report.text import SEVERITY_COLOURS, wrapped

SHOWN = (
    ("loss", "loss", 1.0),
    ("val_loss", "validation loss", 1.0),
    ("grad_norm", "gradient norm", 1.0),
    ("update_ratio", "update ratio", 1.0),
    ("lr", "learning rate", 1.0),
    ("scale", "loss scale", 1.0),
    ("gpu_memory", "GPU memory, GB", 1e-9),
    ("gpu_utilisation", "GPU busy, %", 100.0),
    ("data_wait", "data wait, %", 100.0),
)
"""The numbers that have a line of their own, what they are called, and by what they are multiplied to be read."""
NORMAL, HIGH, LOW, BAD, NOTHING, UNKNOWN = "─", "▲", "▼", "×", "0", " "
FAR = 10.0
"""A module's gradient this many times above or below its usual size is marked."""
MAX_STRETCHES = 40
RATE_S = 20.0
"""Steps per second are counted over this long."""
_LABEL = 16


@dataclass(slots=True)
class _Series:
    values: list[float] = field(default_factory=list)


class LiveRun:
    """A run that is followed: all that a screen shows of it, kept up to date at a cost that does not grow with it."""

    def __init__(self, follower: RunFollower, *, num_steps: int | None = None) -> None:
        self.follower = follower
        self.total, self._total_given = num_steps, num_steps is not None
        self.series: dict[tuple[str, str], _Series] = {}
        self.last_step: dict[str, int] = {}
        self.entry: RunEntry = look_at(follower.run.folder)
        self._heat: dict[str, HeatTable] = {}
        self._num_taken = 0
        self._rate: deque[tuple[float, int]] = deque()

    def update(self, now_s: float | None = None) -> bool:
        """Take in what the run has written; whether there was anything new."""
        grown = self.follower.update()
        now_s = time.time() if now_s is None else now_s
        self.entry = look_at(self.follower.run.folder, now_s)
        if len(self.follower.run) < self._num_taken:  # it was thinned: begin again
            self.series.clear()
            self._heat.clear()
            self._num_taken = 0
        for sample in self.follower.run.samples(start=self._num_taken):
            self._take(sample.optimizer, sample.phase, sample.step, sample.scalars)
            norms = sample.col(Kind.GRAD, Column.L2)
            if norms.size and sample.phase == "train":
                heat = self._heat.setdefault(sample.optimizer, HeatTable(MAX_STRETCHES))
                heat.add(sample.step, sample.names(Kind.GRAD), norms)
        self._num_taken = len(self.follower.run)
        self._rate.append((now_s, self.num_steps))
        while len(self._rate) > 2 and self._rate[0][0] < now_s - RATE_S:
            self._rate.popleft()
        return grown

    def _take(self, optimizer: str, phase: str, step: int, scalars: object) -> None:
        assert isinstance(scalars, dict)
        if phase == "train":
            self.last_step[optimizer] = max(step, self.last_step.get(optimizer, -1))
        if not self._total_given and scalars.get("total_steps", 0.0) >= 1:
            self.total = round(scalars["total_steps"])
        rates = [value for name, value in scalars.items() if name.startswith("lr/")]
        if rates:
            self._add(optimizer, "lr", max(rates) * scalars.get("lr_multiplier", 1.0))
        for name, _, factor in SHOWN:
            if name in scalars:
                self._add(optimizer, name, scalars[name] * factor)

    def _add(self, optimizer: str, name: str, value: float) -> None:
        self.series.setdefault((optimizer, name), _Series()).values.append(float(value))

    @property
    def num_steps(self) -> int:
        """Steps made, of the optimizer that made most."""
        return max(self.last_step.values(), default=-1) + 1

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.entry.state is not State.LIVE

    def rate(self) -> float | None:
        """Steps per second: as seen here, else on average since the start; None where neither is known."""
        if len(self._rate) > 1:
            (first_s, first), (last_s, last) = self._rate[0], self._rate[-1]
            if last_s - first_s >= 2.0 and last > first and not self.ended:
                return (last - first) / (last_s - first_s)
        took_s = self.entry.written_s - self.entry.started_s
        return self.num_steps / took_s if math.isfinite(took_s) and took_s > 0 and self.num_steps else None

    def eta_s(self) -> float | None:
        """Seconds to the end, where it is known how many steps there will be: by the record, or given here."""
        rate = self.rate()
        if self.total is None or rate is None or self.ended:
            return None
        return max(self.total - self.num_steps, 0) / rate

    def strips(self, optimizer: str, num_rows: int) -> list[tuple[str, str]]:
        """One strip of marks per module, of as deep a level of the module tree as fits into `num_rows`."""
        heat = self._heat[optimizer].finish() if optimizer in self._heat else None
        return module_strips(heat, num_rows) if heat is not None else []

    @property
    def optimizers(self) -> list[str]:
        """In the order of their first step."""
        return list(self.last_step) or [""]


def module_strips(heat: HeatMap, num_rows: int) -> list[tuple[str, str]]:
    """The health of each module over time: the worst of its tensors in each stretch, against their own usual size."""
    groups = group_modules(heat.names, num_rows)
    marks = _marks(heat)
    return [(name, "".join(_worst(marks[rows, i]) for i in range(marks.shape[1]))) for name, rows in groups.items()]


def group_modules(names: Sequence[str], num_rows: int) -> dict[str, list[int]]:
    """Rows by module, at the deepest level at which there are at most `num_rows` of them; the rest is one group.

    Example:
        >>> group_modules(["a.0.w", "a.0.b", "a.1.w", "head.w"], 3)
        {'a.0': [0, 1], 'a.1': [2], 'head': [3]}
        >>> group_modules(["a.0.w", "a.0.b", "a.1.w", "head.w"], 2)
        {'a': [0, 1, 2], 'head': [3]}
    """
    modules = [name.split(".")[:-1] or [name] for name in names]
    groups: dict[str, list[int]] = {}
    for depth in range(max(map(len, modules), default=1), 0, -1):
        groups = {}
        for i, parts in enumerate(modules):
            groups.setdefault(".".join(parts[:depth]), []).append(i)
        if len(groups) <= num_rows:
            return groups
    kept = list(groups.items())[: max(num_rows - 1, 1)]
    rest = [i for _, rows in list(groups.items())[len(kept) :] for i in rows]
    return dict(kept) | {f"{len(groups) - len(kept)} more": rest}


_ORDER = (UNKNOWN, NOTHING, NORMAL, LOW, HIGH, BAD)  # what is worse replaces what is better


def _marks(heat: HeatMap) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The place of each cell's mark in the order above."""
    codes = heat.codes
    known = (codes >= FIRST) & (codes <= LAST)
    span = (heat.high - heat.low)[:, None]
    logs = np.where(known, heat.low[:, None] + (codes.astype(np.float64) - FIRST) / (LAST - FIRST) * span, np.nan)
    usual = np.array([np.median(row[~np.isnan(row)]) if (~np.isnan(row)).any() else 0.0 for row in logs])[:, None]
    far = math.log2(FAR)
    with np.errstate(invalid="ignore"):
        marks = np.select(
            [(codes == NAN) | (codes == INF), logs > usual + far, logs < usual - far, known],
            [_ORDER.index(mark) for mark in (BAD, HIGH, LOW, NORMAL)],
            default=_ORDER.index(UNKNOWN),
        )
    return np.where((codes == ZERO) | (codes == NO_GRADIENT), _ORDER.index(NOTHING), marks)


def _worst(column: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> str:
    return _ORDER[int(column.max(initial=0))]


def render_live(live: LiveRun, width: int, height: int, *, keys: bool = True) -> RenderableType:
    """One screen, at most `height` lines high."""
    width, height = max(width, 20), max(height, 5)
    head = [*_head(live, width)]
    curves = [line for name in live.optimizers for line in _curves(live, name, width)]
    found = [*_findings(live, width)]
    foot = [Text("q quit", style="dim")] if keys else []
    room = height - len(head) - len(foot)
    curves = curves[: max(room, 0)]
    room -= len(curves)
    found = found[: max(room - 1, 0)]  # a screen with trouble on it shows the trouble before the modules
    room -= len(found)
    strips = [line for name in live.optimizers for line in _strips(live, name, width, room // len(live.optimizers))]
    return Group(*[line for part in (head, curves, strips[: max(room, 0)], found, foot) for line in part])


def _head(live: LiveRun, width: int) -> Iterator[Text]:
    run, entry = live.follower.run, live.entry
    num = len(run.findings)
    word, colour = _state_words(live)
    name = f" {brief(entry.folder.name, 60)}"
    script = f" · {brief(entry.info.script, 30)}" if entry.info is not None and entry.info.script else ""
    model = f" · {brief(entry.info.model, 30)}" if entry.info is not None else ""
    yield _cut(Text.assemble((f" {word} ", f"bold reverse {colour}"), (name, "bold"), script, model), width)
    parts = [f"step {max(live.num_steps - 1, 0):,}" + (f" of {live.total:,}" if live.total else "")]
    rate, eta_s = live.rate(), live.eta_s()
    if rate is not None:
        parts.append(f"{rate:.3g} steps/s")
    if eta_s is not None:
        parts.append(f"{duration(eta_s)} left")
    since_s = time.time() - entry.started_s if not live.ended else entry.written_s - entry.started_s
    if math.isfinite(since_s) and since_s >= 0:
        parts.append(f"running for {duration(since_s)}" if not live.ended else f"ran for {duration(since_s)}")
    parts.append(count(num, "finding") if num else "no findings")
    yield _cut(Text(" · ".join(parts)), width)


def _state_words(live: LiveRun) -> tuple[str, str]:
    if not live.ended:
        return ("LIVE", "red") if live.follower.run.findings else ("LIVE", "green")
    closing = live.follower.run.closing
    if closing is None:
        return "NOT CLOSED", "yellow"
    return ("ENDED", "blue") if closing.reason == CLOSED else (f"ENDED: {brief(closing.reason, 30)}", "yellow")


def _curves(live: LiveRun, optimizer: str, width: int) -> Iterator[Text]:
    label = f"{brief(optimizer, 10)} " if optimizer else ""
    for name, title, _ in SHOWN:
        series = live.series.get((optimizer, name))
        if series is None:
            continue
        values = np.asarray(series.values, dtype=np.float64)
        room = max(width - _LABEL - len(label) - 12, 8)
        shown = values[pick_peaks(values, room)]
        line = sparkline([float(v) for v in shown], room)
        last = float(values[-1])
        value = f"{last:.3g}" if math.isfinite(last) else str(last).upper().replace("NAN", "NaN").replace("INF", "Inf")
        text = Text.assemble((f"{label}{title:<{_LABEL}}", "bold"), f"{value:<11} ", (line, "cyan"))
        text.highlight_regex(BAD, "bold red")
        yield _cut(text, width)


def _strips(live: LiveRun, optimizer: str, width: int, num_lines: int) -> Iterator[Text]:
    if num_lines < 2:
        return
    strips = live.strips(optimizer, num_lines - 1)
    if not strips:
        return
    who = f" of {brief(optimizer, 20)}" if optimizer else ""
    yield _cut(
        Text.assemble(
            (f"modules{who}", "bold"),
            (
                f"  gradient: {NORMAL} usual  {HIGH} over {FAR:g}x  {LOW} under 1/{FAR:g}  {NOTHING} none  {BAD} NaN",
                "dim",
            ),
        ),
        width,
    )
    names = max(min(max(len(name) for name, _ in strips), width // 3), 4)
    for name, strip in strips:
        text = Text.assemble(f"  {brief(name, names):<{names}} ", (strip[-(width - names - 4) :], "green"))
        text.highlight_regex(f"[{HIGH}{BAD}]", "bold red")
        text.highlight_regex(f"[{LOW}{NOTHING}](?=[^a-z]*$)", "yellow")
        yield _cut(text, width)


def _findings(live: LiveRun, width: int) -> Iterator[Text]:
    found = live.follower.run.findings
    if not found:
        return
    earlier = f" ({len(found) - 2} earlier: trimtab report)" if len(found) > 2 else ""
    yield _cut(Text.assemble(("found", "bold"), (earlier, "dim")), width)
    for finding in reversed(found[-2:]):
        yield from _finding(finding, width)


def _finding(finding: Finding, width: int) -> Iterator[Text]:
    title = Text.assemble(
        f"  step {finding.step:,}: {brief(finding.code, 10)} ",
        (brief(finding.name, 40), SEVERITY_COLOURS[finding.severity]),
    )
    yield _cut(title, width)
    for text, lead in [(finding.message, "    "), *[(point, "  → ") for point in finding.advice[:1]]]:
        for line in wrapped(brief(text, 3 * width), width, lead).split("\n"):
            yield _cut(line, width)


def _cut(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(width, overflow="ellipsis")
    return text


def duration(seconds: float) -> str:
    """A span of time for a person.

    Example:
        >>> duration(4.2), duration(90), duration(7500), duration(200_000)
        ('4 s', '1 min 30 s', '2 h 5 min', '2 d 7 h')
    """
    whole = int(seconds)
    for size, unit, smaller, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    return f"{whole} s"


def plain_lines(live: LiveRun, num_findings_told: int) -> Iterator[str]:
    """What is new, for a pipe or a log: one line on where the run is, and one per finding."""
    parts = [f"step {max(live.num_steps - 1, 0)}"]
    for optimizer in live.optimizers:
        lead = f"{brief(optimizer, 20)} " if optimizer else ""
        for name, title, _ in SHOWN:
            series = live.series.get((optimizer, name))
            if series is not None:
                parts.append(f"{lead}{title} {series.values[-1]:.4g}")
    rate, eta_s = live.rate(), live.eta_s()
    parts += [f"{rate:.3g} steps/s"] if rate is not None else []
    parts += [f"{duration(eta_s)} left"] if eta_s is not None else []
    yield "  ".join(parts)
    for finding in live.follower.run.findings[num_findings_told:]:
        yield brief(str(finding), 500)
        if finding.advice:
            yield f"  → {brief(finding.advice[0], 500)}"


def ended_words(live: LiveRun) -> str:
    """How it ended, when, and how many steps it made."""
    closing = live.follower.run.closing
    how = "not closed: the run was killed, or its machine is gone" if closing is None else brief(closing.reason, 200)
    when = datetime.fromtimestamp(live.entry.written_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    found = count(len(live.follower.run.findings), "finding")
    return f"ended ({how}) at {when} after {count(live.num_steps, 'step')}, {found}"


def follow(folder: str, num_steps: int | None = None) -> LiveRun:
    """Begin to follow a run; RecordError where there is no record."""
    live = LiveRun(RunFollower(folder), num_steps=num_steps)
    if not live.update() and not len(live.follower.run):
        raise RecordError(f"{folder} holds no whole line yet; try again in a moment")
    return live
