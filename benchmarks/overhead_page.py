"""What `overhead.py` makes of its timings: the estimate, the tables, and the figures in README.md and docs.

Everything here is arithmetic and text; nothing is timed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BARE, CLIP, GUARD, GUARD_CLIP = "unguarded", "`clip_grad_norm_`", "Guard", "Guard, clip=1.0"
ATTACH, RUN, UNRECORDED = "`Guard.attach`", "`trimtab run`", "Guard, no record"
LOW = 1 / 7
STEADY = 100
NUM_DRAWS = 400
README_COMMAND = "`python benchmarks/overhead.py`"
BEGIN, END = "<!-- overhead: begin -->", "<!-- overhead: end -->"
Floats = npt.NDArray[np.float64]

METHOD = f"""\
Every arm trains its own copy of one model, on the same batches as the others. The arms take turns in short blocks of
steps, in shuffled order, in one process with one torch thread. The batches can be learned: a guard that finds something
costs more. What is timed is the processor time of whole steps (forward, backward, step, zero_grad; hooks included) from
step {STEADY} on: that of the main thread, and that of all other threads until the records of the block are written.
Objects that are there before the first timed block are frozen for Python's garbage collector.

**The estimate.** Some work comes only every so many steps, so a block is compared with blocks at the same place of a
cycle of steps, in which all of that comes round. Of the blocks at one place the estimate takes one of the quietest, the
{100 * LOW:.0f} % quantile; then the mean over all places. This is the cost on a quiet machine. What comes only once in
1,000 steps is added with its share. "adds" is the difference to the unguarded arm. In brackets: the middle 90 % of
{NUM_DRAWS} bootstrap draws over blocks.

**The check.** "paired" takes no quiet blocks: it is the median, at each place, of the differences to the unguarded
block of the same round, then the mean over all places. A busy machine is slower, so its µs are usually more than in
"adds": compare the ratios. Where the ratio of "paired" is outside of the interval of the other, believe neither.
A ratio is n/a where the interval of {CLIP} reaches zero.
"""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The timings of one arm, in µs per step: a row for each cycle, a column for each block in it."""

    name: str
    main: Floats
    background: Floats
    rare: float = 0.0
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an arm costs a step: the estimate, and the bounds of its bootstrap interval."""

    step_us: float
    adds_us: float
    low_us: float
    high_us: float
    paired_us: float
    paired_ratio: float
    background_us: float
    percent: float
    ratio: float
    ratio_low: float
    ratio_high: float


def quiet(blocks: Floats) -> float:
    """The low quantile of each column, averaged: work that only some columns have stays in.

    Example:
        >>> quiet(np.array([[1.0, 5.0], [1.0, 5.0], [9.0, 7.0]]))  # one slow cycle, and one column with more work
        3.0
    """
    return float(np.quantile(blocks, LOW, axis=0).mean())


def rare_share(usual: Sequence[float], rare: Sequence[float], every: int) -> float:
    """What steps that come only once in `every` steps add to each step."""
    if not rare:
        return 0.0
    return float((np.quantile(rare, LOW) - np.quantile(usual, 0.5)) / every)


def costs(arms: Sequence[Timed], seed: int = 0) -> dict[str, Cost]:
    """The cost of each arm, beside the unguarded arm (the first) and in units of `clip_grad_norm_`."""
    names = [arm.name for arm in arms]
    main, behind = (np.stack([getattr(arm, part) for arm in arms]) for part in ("main", "background"))
    rare = np.array([arm.rare for arm in arms])
    _, num_cycles, num_places = main.shape

    def total(picked: npt.NDArray[np.intp]) -> Floats:
        """Per arm, from the cycles picked for each place; the same for all arms, as they ran side by side."""
        places = np.arange(num_places)
        of_main, of_others = (np.quantile(x[:, picked, places], LOW, axis=1).mean(axis=1) for x in (main, behind))
        return np.asarray(of_main + of_others + rare)

    each = total(np.tile(np.arange(num_cycles)[:, None], (1, num_places)))
    chance = np.random.default_rng(seed)
    draws = np.stack([total(chance.integers(0, num_cycles, (num_cycles, num_places))) for _ in range(NUM_DRAWS)])
    added, drawn = each - each[0], draws - draws[:, :1]
    both = main + behind
    paired = np.median(both - both[:1], axis=1).mean(axis=1) + rare - rare[0]
    unit = names.index(CLIP) if CLIP in names else None
    if unit is not None and np.quantile(drawn[:, unit], 0.05) <= 0:
        unit = None  # too noisy to be a unit
    out = {}
    for i, name in enumerate(names):
        ratio, ratios = np.nan, np.full(NUM_DRAWS, np.nan)
        if unit is not None:
            ratio, ratios = added[i] / added[unit], drawn[:, i] / drawn[:, unit]
        low, high = np.quantile(drawn[:, i], (0.05, 0.95))
        ratio_low, ratio_high = np.quantile(ratios, (0.05, 0.95))
        out[name] = Cost(
            step_us=float(each[i]),
            adds_us=float(added[i]),
            low_us=float(low),
            high_us=float(high),
            paired_us=float(paired[i]),
            paired_ratio=np.nan if unit is None else float(paired[i] / paired[unit]),
            background_us=quiet(behind[i]) - quiet(behind[0]),
            percent=float(100 * added[i] / each[0]),
            ratio=float(ratio),
            ratio_low=float(ratio_low),
            ratio_high=float(ratio_high),
        )
    return out


def ratio_words(c: Cost) -> str:
    """The ratio to clipping, with its interval."""
    return "n/a" if np.isnan(c.ratio) else f"{c.ratio:.2f}x ({c.ratio_low:.2f} to {c.ratio_high:.2f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cost_table(found: dict[str, Cost]) -> str:
    """One row for each arm but the unguarded one."""
    rows = [
        (
            name,
            f"{c.adds_us:+,.0f} ({c.low_us:+,.0f} to {c.high_us:+,.0f})",
            f"{c.percent:+.1f}",
            ratio_words(c),
            f"{c.background_us:+,.0f}",
            f"{c.paired_us:+,.0f}" + ("" if np.isnan(c.paired_ratio) else f" ({c.paired_ratio:.2f}x)"),
        )
        for name, c in found.items()
        if name != BARE
    ]
    return table(("arm", "adds µs per step", "adds %", f"of {CLIP}", "in other threads", "paired"), rows)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure and the limit that was set for it."""

    what: str
    value: float
    limit: float
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the figure is within the limit; one that was not measured is not."""
        return self.value <= self.limit

    def line(self) -> str:
        """A line of the results file."""
        number = f"{self.value:,.2f}" if abs(self.limit) < 10 else f"{self.value:,.0f}"
        return f"- {self.what}: {number}{self.unit} (at most {self.limit:g}{self.unit}): " + (
            "holds" if self.holds else "FAILS"
        )


def claims_of(name: str, found: dict[str, Cost], limit: float) -> list[Claim]:
    """The limits of one model in steady state."""
    out = [Claim(what=f"{name}: Guard against {CLIP}", value=found[GUARD].ratio, limit=limit, unit="x")]
    if GUARD_CLIP in found:
        more = found[GUARD_CLIP].ratio - found[GUARD].ratio
        out.append(Claim(what=f"{name}: clipping on top of Guard", value=more, limit=0.3, unit="x"))
    if RUN in found:
        over = found[RUN].adds_us - found[GUARD].adds_us
        out.append(Claim(what=f"{name}: {RUN} over Guard", value=over, limit=30, unit=" µs"))
    return out


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model in steady state: what it is, and the cost of each arm."""

    name: str
    num_params: int
    num_tensors: int
    data: str
    blocks: str
    found: dict[str, Cost]
    findings: dict[str, tuple[str, ...]]

    @property
    def title(self) -> str:
        """What it is, in a line."""
        bare_ms = self.found[BARE].step_us / 1e3
        return (
            f"{self.name}, {self.num_params:,} parameters in {self.num_tensors} tensors, {self.data}, "
            f"{bare_ms:.2f} ms a step"
        )

    def section(self) -> str:
        """Its part of the results file."""
        notes = [f"- findings under {arm}: {', '.join(names)}" for arm, names in self.findings.items() if names]
        return "\n".join([f"### {self.title}", "", f"{self.blocks}.", "", cost_table(self.found), "", *notes])


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first steps of fresh guards: what they add in the main thread, beside the steady state (None: not known)."""

    name: str
    build_ms: float
    first: Cost
    early: Cost
    late: Cost
    steady_us: float | None

    @property
    def ratio(self) -> float:
        """The early steps in units of the steady state."""
        return float("nan") if self.steady_us is None else self.early.adds_us / self.steady_us


def start_table(starts: Sequence[Start]) -> str:
    """One row for each model."""

    def interval(c: Cost, unit: float = 1.0, digits: int = 0) -> str:
        low, mid, high = (f"{us / unit:+,.{digits}f}" for us in (c.low_us, c.adds_us, c.high_us))
        return f"{mid} ({low} to {high})"

    rows = [
        (
            s.name,
            f"{s.build_ms:.1f}",
            interval(s.first, 1e3, 2),
            interval(s.early),
            interval(s.late),
            "n/a" if s.steady_us is None else f"{s.steady_us:+,.0f}",
            "n/a" if s.steady_us is None else f"{s.ratio:.2f}x",
        )
        for s in starts
    ]
    head = ("model", "`Guard(...)` ms", "step 0 adds ms", "steps 1 to 60 add µs", "steps 61 to 99 add µs", "steady µs")
    return table((*head, "1 to 60 of steady"), rows)


def sweep_table(models: Sequence[Model]) -> str:
    """One row for each number of tensors."""
    rows = [
        (
            f"{m.num_tensors:,}",
            f"{m.found[BARE].step_us / 1e3:,.2f}",
            *(f"{c.adds_us:+,.0f} ({c.low_us:+,.0f} to {c.high_us:+,.0f})" for c in (m.found[CLIP], m.found[GUARD])),
            ratio_words(m.found[GUARD]),
            "n/a" if np.isnan(m.found[GUARD].paired_ratio) else f"{m.found[GUARD].paired_ratio:.2f}x",
        )
        for m in models
    ]
    return table(("tensors", "unguarded ms", f"{CLIP} adds µs", "Guard adds µs", f"of {CLIP}", "paired"), rows)


def processor_words(model_name: str) -> str:
    """A processor as people call it.

    Example:
        >>> processor_words("Intel(R) Xeon(R) Processor @ 2.80GHz")
        '2.8 GHz Xeon'
    """
    speed = re.search(r"([\d.]+)\s*GHz", model_name)
    kind = re.search(r"Xeon|EPYC|Core|Ryzen", model_name)
    if speed is None or kind is None:
        return model_name
    return f"{float(speed[1]):.1f} GHz {kind[0]}"


def readme_row(models: Sequence[Model], processor: str) -> str:
    """The row of README.md: the largest model, and the smallest in brackets."""
    large, small = models[-1], models[0]

    def words(model: Model) -> str:
        guard, clip = model.found[GUARD], model.found[CLIP]
        return f"guard {guard.percent:+.1f} %, {CLIP} {clip.percent:+.1f} %"

    return (
        f"| cost, one thread of a {processor}, whole step of a {large.num_params / 1e6:.1f} M-parameter GPT "
        f"| {words(large)} (an MLP with {small.num_params:,} parameters: {words(small)}) | {README_COMMAND} |"
    )


def with_row(text: str, row: str) -> str:
    """README.md with its row for this command replaced."""
    lines = text.split("\n")
    places = [i for i, line in enumerate(lines) if line.startswith("|") and line.endswith(f"| {README_COMMAND} |")]
    if len(places) != 1:
        raise ValueError(f"{len(places)} rows end in {README_COMMAND}; expected one to replace")
    lines[places[0]] = row
    return "\n".join(lines)


def with_block(text: str, block: str) -> str:
    """A page with what is between its two marks replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and {END} once each, in this order")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{block.strip()}\n\n{END}{rest.split(END)[1]}"


def docs_block(
    models: Sequence[Model], sizes: Sequence[Model], starts: Sequence[Start], processor: str, source: str
) -> str:
    """What docs/explanation/performance.md says of the CPU; every table is one of the results file."""
    mark = f"<!-- from: {source} -->"
    told = (
        f"One thread of a {processor}: what a whole step costs *more*, in processor time, in steady state, recorded. "
        f"In brackets: the middle 90 % of bootstrap draws; [the results](../../{source}) say how the estimate is made. "
        '"paired" is a second estimate, not of a quiet machine: its µs are usually more, its ratios should agree.'
    )
    out = ["\n".join(textwrap.wrap(told, 120, break_on_hyphens=False, break_long_words=False))]
    for model in models:
        out += [f"{model.title[0].upper()}{model.title[1:]}:", f"{mark}\n{cost_table(model.found)}"]
    if sizes:
        out += ["By the number of tensors, all of them small:", f"{mark}\n{sweep_table(sizes)}"]
    if starts:
        out += ["The first steps of a new guard, in the main thread:", f"{mark}\n{start_table(starts)}"]
    return "\n\n".join(out)
