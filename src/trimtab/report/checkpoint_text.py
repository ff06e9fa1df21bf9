"""Checkpoints as text: a folder of them, one of them, two side by side. Data in, something to print out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.core.printable import brief
from trimtab.report.summary import count
from trimtab.report.text import wrapped

if TYPE_CHECKING:
    from trimtab.checkpoint.inspect import Difference, SectionRow, Seen, SettingChange, Sheet, TensorChange
    from trimtab.core.types import Snapshot

COLOURS = {"good": "green", "candidate": "yellow", "bad": "red"}
NUM_TENSORS = 12
NUM_CHANGES = 12
NUM_SETTINGS = 15
UNNAMED = ("rng", "guard")  # below these names only the number of differences is shown
_UNITS = ("B", "KB", "MB", "GB", "TB")


def byte_size(num: float) -> str:
    """A size in powers of ten.

    Example:
        >>> byte_size(532), byte_size(41_200), byte_size(2_500_000_000)
        ('532 B', '41.2 KB', '2.5 GB')
    """
    for unit in _UNITS:
        if num < 999.5 or unit == _UNITS[-1]:
            break
        num /= 1000
    return f"{num:.3g} {unit}"


def ago(seconds: float) -> str:
    """How long ago, in one unit.

    Example:
        >>> ago(40), ago(200), ago(20_000), ago(400_000)
        ('40 s ago', '3 min ago', '5 h ago', '4 days ago')
    """
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(int(seconds), 0)} s ago"


def moment(created: float | None) -> str | None:
    """A time as ISO 8601 in UTC."""
    return None if created is None else datetime.fromtimestamp(created, UTC).isoformat(timespec="seconds")


# -- a folder -------------------------------------------------------------------------------------------------------


def render_list(
    seen: Sequence[Seen], folder: Path, *, resume: Snapshot | None, good: Snapshot | None, now: float, width: int
) -> RenderableType:
    """All checkpoints of a folder, the newest last; what resume takes is marked."""
    return Group(*_listed(seen, folder, resume, good, now, min(width, 100)))


def _listed(
    seen: Sequence[Seen], folder: Path, resume: Snapshot | None, good: Snapshot | None, now: float, width: int
) -> Iterator[RenderableType]:
    kept, apart = [one for one in seen if not one.quarantined], [one for one in seen if one.quarantined]
    total = byte_size(sum(one.num_bytes for one in seen))
    yield Text.assemble((count(len(kept), "checkpoint"), "bold"), f" in {folder}", (f", {total} in all", "dim"))
    if kept:
        yield _table(kept, resume, now, width)
    if apart:
        yield Text("\nIn quarantine, never resumed from", style="bold")
        yield _table(apart, None, now, width)
    if resume is None:
        yield Text("\nNothing here to resume from.", style="bold red")
    else:
        other = (
            f'; with prefer="good" it takes step {good.step}' if good is not None and good.path != resume.path else ""
        )
        yield Text()
        yield wrapped(f"resume takes this one if its checksums hold{other}.", width, "→ ", style="green")


def _table(seen: Sequence[Seen], resume: Snapshot | None, now: float, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    several = len({one.snapshot.run for one in seen if one.snapshot.digest}) > 1
    branched = any(one.snapshot.branch for one in seen)
    for title in ("step", *(["branch"] if branched else [])):
        table.add_column(title, justify="right", no_wrap=True)
    if several:
        table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("written", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("metrics and reason", overflow="fold")
    for one in seen:
        snapshot = one.snapshot
        notes = [_some([f"{brief(name, 60)} {value:.4g}" for name, value in snapshot.metrics.items()])]
        notes.append("repaired: zeros where NaN or Inf were" if snapshot.repaired else "")
        notes.append(snapshot.reason)
        mark = "→" if resume is not None and snapshot.path == resume.path else " "
        state = "damaged" if one.damaged else "doubtful" if one.doubtful else snapshot.state
        table.add_row(
            Text(mark, style="green"),
            str(snapshot.step),
            *([str(snapshot.branch)] if branched else []),
            *([Text(snapshot.run or "-")] if several else []),
            Text(state, style=COLOURS[snapshot.state]),
            "?" if one.created is None else ago(now - one.created),
            byte_size(one.num_bytes),
            Text("\n".join(filter(None, notes))),
        )
    return table


# -- one of them ----------------------------------------------------------------------------------------------------


def render_sheet(sheet: Sheet, *, width: int, all_tensors: bool = False) -> RenderableType:
    """What one checkpoint holds."""
    return Group(*_sheet(sheet, min(width, 100), all_tensors))


def _sheet(sheet: Sheet, width: int, all_tensors: bool) -> Iterator[RenderableType]:
    snapshot = sheet.snapshot
    if snapshot is None:
        yield Text.assemble((" FOREIGN ", "bold reverse yellow"), f" {sheet.path}, {byte_size(sheet.num_bytes)}")
        yield wrapped("Not written by trimtab: no checksums, no verdict. Nothing in it was executed.", width, "")
        if sheet.nonfinite:
            yield wrapped(f"NaN or Inf in {_some(sheet.nonfinite, 3)}", width, "! ", style="bold red")
    else:
        label = Text(f" {snapshot.state.upper()} ", style=f"bold reverse {COLOURS[snapshot.state]}")
        branch = f" of branch {snapshot.branch}" if snapshot.branch else ""
        branch += f" of run {snapshot.run}" if snapshot.run else ""
        yield Text.assemble(label, f" step {snapshot.step}{branch}, {byte_size(sheet.num_bytes)}, {sheet.path}")
        if snapshot.reason:
            yield wrapped(snapshot.reason, width, "  ")
        if snapshot.repaired:
            yield wrapped("Repaired: zeros where NaN or Inf were. Resumed from only if asked for.", width, "  ")
        yield Text(f"written {moment(sheet.created)} by {sheet.writer}, digest {snapshot.digest[:12]}", style="dim")
        for name in ("metrics", "verdict", "versions"):
            if facts := _facts(sheet.meta.get(name)):
                yield wrapped(facts, width, f"{name:<9}", style="bold")
    for section in sheet.sections:
        if section.tensors:
            yield from _section(section, all_tensors)
    if plain := [section.name for section in sheet.sections if not section.tensors]:
        yield Text.assemble("\n", ("without tensors", "bold"), f"  {_some(plain)}")


def _facts(values: object) -> str:
    if not isinstance(values, Mapping):
        return ""
    return _some(
        [f"{brief(k, 60)} {v:.6g}" if isinstance(v, float) else f"{brief(k, 60)} {brief(v)}" for k, v in values.items()]
    )


def _some(names: Sequence[str], shown: int = 20) -> str:
    """Some of them, and how many more there are: a file may hold any number."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(brief(name) for name in names[:shown]) + more


def _section(section: SectionRow, all_tensors: bool) -> Iterator[RenderableType]:
    num = len(section.tensors)
    held = f"{count(num, 'tensor')}, {byte_size(section.num_bytes)}"
    yield Text.assemble("\n", (brief(section.name) or "tensors", "bold"), (f"  {held}", "dim"))
    shown = section.tensors if all_tensors else section.tensors[:NUM_TENSORS]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(overflow="fold")
    for justify in ("left", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    for one in shown:
        shape = " x ".join(map(str, one.shape)) or "scalar"
        table.add_row(f"  {brief(one.name, 500)}", one.dtype, brief(shape, 100), byte_size(one.num_bytes))
    yield table
    if len(shown) < num:
        yield Text(f"  … and {num - len(shown)} more; --all lists them", style="dim")


# -- two of them ----------------------------------------------------------------------------------------------------


def render_difference(found: Difference, a: str, b: str, *, width: int) -> RenderableType:
    """What differs between two checkpoints, the largest change first."""
    return Group(*_difference(found, a, b, min(width, 100)))


def _difference(found: Difference, a: str, b: str, width: int) -> Iterator[RenderableType]:
    label, colour = ("IDENTICAL", "green") if found.identical else ("DIFFERENT", "yellow")
    tensors = f"{len(found.tensors)} of {count(found.num_tensors, 'tensor')}"
    summary = "in every bit" if found.identical else f"{tensors} and {count(len(found.settings), 'setting')} differ"
    yield Text.assemble((f" {label} ", f"bold reverse {colour}"), f" {summary}")
    yield Text(f"a: {a}\nb: {b}", style="dim")
    for section, changes in _by_section(found.tensors).items():
        head = f"  {count(len(changes), 'tensor')}: norm of the difference / norm of a, the largest first"
        yield Text.assemble((f"\n{brief(section)}", "bold"), (head, "dim"))
        yield _changes(changes[:NUM_CHANGES])
        if len(changes) > NUM_CHANGES:
            yield Text(f"  … and {len(changes) - NUM_CHANGES} more; --json lists them", style="dim")
    settings = [change for change in found.settings if not _is_unnamed(change.name)]
    if settings:
        yield Text.assemble(("\nsettings", "bold"), ("  a → b", "dim"))
        for one in settings[:NUM_SETTINGS]:
            yield wrapped(f"{brief(one.name)}: {_or_none(one.a)} → {_or_none(one.b)}", width, "  ")
        if len(settings) > NUM_SETTINGS:
            yield Text(f"  … and {len(settings) - NUM_SETTINGS} more; --json lists them", style="dim")
    yield from _unnamed((*found.tensors, *found.settings))
    if found.same and not found.identical:
        yield Text.assemble(("\nidentical", "bold"), f"  {_some(found.same)}")


def _changes(changes: Sequence[TensorChange]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for one in changes:
        size, about = _change(one)
        table.add_row(f"  {size}", brief(one.name.partition(".")[2] or one.name, 500), about)
    return table


def _by_section(changes: Sequence[TensorChange]) -> dict[str, list[TensorChange]]:
    """The model first: it is what people look for."""
    found: dict[str, list[TensorChange]] = {}
    for change in changes:
        if not _is_unnamed(change.name):
            found.setdefault(change.name.partition(".")[0], []).append(change)
    return dict(sorted(found.items(), key=lambda item: item[0] != "model"))


def _change(change: TensorChange) -> tuple[str, str]:
    if change.what == "only_a":
        return "only a", change.a
    if change.what == "only_b":
        return "only b", change.b
    if change.what == "kind":
        return "other", f"{change.a} → {change.b}"
    if change.relative is None:
        return "changed", change.b
    if math.isnan(change.relative):
        return "NaN/Inf", change.b
    return ("from 0" if math.isinf(change.relative) else f"{change.relative:.3g}"), change.b


def _is_unnamed(name: str) -> bool:
    return not set(UNNAMED).isdisjoint(name.split("."))


def _unnamed(changes: Sequence[TensorChange | SettingChange]) -> Iterator[RenderableType]:
    tally = Counter(_unnamed_part(one.name) for one in changes if _is_unnamed(one.name))
    if tally:
        others = _some([f"{name} ({count(num, 'value')})" for name, num in tally.items()])
        yield Text.assemble(("\nalso different", "bold"), f"  {others}")


def _unnamed_part(name: str) -> str:
    """The name up to where names end to matter: `loader.place.rng`."""
    parts = name.split(".")
    return ".".join(parts[: 1 + next(i for i, part in enumerate(parts) if part in UNNAMED)])


def _or_none(value: str | None) -> str:
    return "not there" if value is None else brief(value)
