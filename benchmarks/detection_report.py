"""The score of the detection benchmark as Markdown."""

from __future__ import annotations

import math
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from detection_score import GROUPS, KINDS, NAMED_WITHIN, OURS, RISE, Judged, Share, latency, median, score
from detection_signals import SIGNALS
from peers import PEERS

from trimtab import __version__

REPO = Path(__file__).parent.parent
BEGIN, END = "<!-- detection:begin -->", "<!-- detection:end -->"
TITLES = {"report": "Report half (held back)", "tune": "Tune half (looked at while the rules were made)"}
MAX_LISTED = 400


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def header(halves: dict[str, list[Judged]], command: str, stale: int = 0) -> str:
    """When and with what the runs were made, and how many there are."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=REPO)
    dirty = subprocess.run(["git", "status", "--porcelain", "src", "tests"], capture_output=True, text=True, cwd=REPO)
    commit = (git.stdout.strip() or "unknown") + (" with changes" if dirty.stdout.strip() else "")
    counts = "; ".join(
        f"{half} half {len(runs)} runs ({Share.of(r.meta.healthy for r in runs).hits} healthy, "
        f"{sum(not r.meta.healthy for r in runs)} faults, {sum(r.meta.harmful for r in runs)} of them harmful and "
        f"{sum(bool(r.meta.error) for r in runs if not r.meta.healthy)} ended by an exception; "
        f"families {', '.join(sorted({r.meta.family for r in runs}))})"
        for half, runs in halves.items()
    )
    note = f"\n\n{stale} traces are older than the sensors or the cases." if stale else ""
    return (
        f"# Detection: faults found, healthy runs left alone\n\n{time.strftime('%Y-%m-%d')}, trimtab {__version__} at "
        f"{commit}, torch {torch.__version__}, Python {platform.python_version()}, CPU, one torch thread.\n\n"
        f"Command: `{command}`. {counts}.\n\n"
        "Every run is recorded once (mode observe, default settings); trimtab's verdicts are made again from the "
        "record with the rules as they are, and the peers' rules, re-stated from their documented behaviour with "
        "default settings, see loss and gradient norm of the same steps. Detected: an alarm at or after the onset and "
        "none before it. Intervals are Wilson 95 %. Latency is in steps from the onset to the first alarm." + note
    )


def comparison(runs: list[Judged]) -> str:
    """Trimtab beside every peer on the same traces."""
    rows = []
    for name in (OURS, *PEERS):
        row = score(runs, name)
        shares = (row.harmful, row.everything, row.false_alarms, row.early, row.harmful_lenient)
        rows.append([f"**{name}**" if name == OURS else name, *map(short, shares), number(row.latency)])
    head = (
        "detector",
        "recall, harmful faults",
        "recall, all faults",
        "false-alarm runs",
        "alarm before the onset",
        "recall, harmful, earlier alarms forgiven",
        "median latency",
    )
    return table(head, rows)


def half_report(half: str, runs: list[Judged], *, lists: bool = True) -> str:
    """Everything about one half."""
    ours = score(runs, OURS)
    faults = [r for r in runs if not r.meta.healthy]
    found = [r for r in faults if r.ours.detected(r.meta.onset)]
    summary = [
        ("recall over harmful faults", str(ours.harmful)),
        ("recall over all faults", str(ours.everything)),
        ("healthy runs with a finding", str(ours.false_alarms)),
        ("fault runs with a finding before the onset", str(ours.early)),
        ("detected, first finding rightly named", str(Share.of(r.named() for r in found))),
        (f"detected, rightly named within {NAMED_WITHIN} steps", str(Share.of(r.named(NAMED_WITHIN) for r in found))),
        ("median latency", number(ours.latency)),
    ]
    parts = [
        f"## {TITLES.get(half, half)}",
        table(("trimtab", "share (95 % interval; count)"), summary),
        by("kind", KINDS, faults),
        by("group", GROUPS, faults),
        "### Early warning\n\n" + _early_warning(faults) + "\n\n" + _signals(runs),
        "### Beside the peers, on the same traces\n\n" + comparison(runs),
    ]
    return "\n\n".join(parts + (_lists(runs) if lists else [])) + "\n"


def _signals(runs: list[Judged]) -> str:
    """What single quantities say before the loss does: a jump is a value above 3x its largest of the last 32 steps."""
    sick = [r for r in runs if not r.meta.healthy and r.blow_up is not None and r.meta.kind in ("abrupt", "drift")]
    well = [r for r in runs if r.meta.healthy]
    rows = []
    for signal in SIGNALS:
        leads = [r.blow_up - step for r in sick if r.blow_up is not None and (step := r.jumps.get(signal)) is not None]
        rows.append(
            [
                signal,
                short(Share(sum(lead > 0 for lead in leads), len(sick))),
                short(Share(sum(lead >= 0 for lead in leads), len(sick))),
                number(median(lead for lead in leads if lead >= 0)),
                short(Share.of(r.jumps.get(signal) is not None for r in well)),
            ]
        )
    head = ("a jump of", "before the rise", "by the rise", "median lead", "jumps in healthy runs")
    return table(head, rows)


def by(what: str, order: tuple[str, ...], faults: list[Judged]) -> str:
    """Recall, names and latency for every value of one field of the meta data."""
    known = [*order, *sorted({getattr(r.meta, what) for r in faults} - set(order))]
    rows = []
    for value in known:
        some = [r for r in faults if getattr(r.meta, what) == value]
        found = [r for r in some if r.ours.detected(r.meta.onset)]
        steps = sorted(latency(r) for r in found)
        rows.append(
            [
                value or "(none)",
                str(len(some)),
                str(Share.of(r.ours.detected(r.meta.onset) for r in some if r.meta.harmful)),
                str(Share.of(r.ours.detected(r.meta.onset) for r in some)),
                short(Share.of(r.named() for r in found)),
                number(median(steps)),
                f"{steps[math.ceil(0.9 * len(steps)) - 1]} / {steps[-1]}" if steps else "–",
            ]
        )
    head = (what, "faults", "recall, harmful", "recall, all", "rightly named", "median latency", "90 % / max")
    return table(head, [row for row in rows if row[1] != "0"])


def _early_warning(faults: list[Judged]) -> str:
    rising = [r for r in faults if r.meta.kind in ("drift", "abrupt") and r.blow_up is not None]
    found = [r for r in rising if r.ours.detected(r.meta.onset)]
    leads = [(r.blow_up or 0) - (r.ours.since_onset or 0) for r in found]
    if not rising:
        return f"No drift or abrupt fault ended in a loss above {RISE:g}x its median before the onset."
    return (
        f"{len(rising)} drift or abrupt faults ended in a loss that is not finite or above {RISE:g}x its median before "
        f"the onset. Found {len(found)}; median lead {number(median(leads))} steps"
        + (f" (mean {statistics.fmean(leads):.1f})" if leads else "")
        + f". Found before that rise: {Share(sum(lead > 0 for lead in leads), len(rising))}; at the same step or "
        f"before: {Share(sum(lead >= 0 for lead in leads), len(rising))}."
    )


def _lists(runs: list[Judged]) -> list[str]:
    faults = [r for r in runs if not r.meta.healthy]
    early = [r for r in faults if r.ours.early(r.meta.onset)]
    missed = [r for r in faults if r.ours.since_onset is None and r not in early]
    wrong = [r for r in faults if r.ours.detected(r.meta.onset) and not r.named()]
    alarmed = [r for r in runs if r.meta.healthy and r.findings]
    broken = [r for r in runs if r.problems]
    crashed = [r for r in runs if r.meta.healthy and r.meta.error]
    return [
        _list("Missed", [f"{_about(r)}, expected {' or '.join(r.meta.names)}{_error(r)}" for r in missed]),
        _list("Early: a finding before the onset", [f"{_about(r)}: {_first(r)}" for r in early]),
        _list(
            "Wrong name first",
            [
                f"{_about(r)}, expected {' or '.join(r.meta.names)}"
                f"{' (named later)' if r.named(NAMED_WITHIN) else ''}: {_first(r, r.meta.onset)}"
                for r in wrong
            ],
        ),
        _list("False alarms", [f"{r.meta}: {_first(r)}" for r in alarmed]),
        _list("Healthy runs that ended in an exception", [f"{r.meta}{_error(r)}" for r in crashed]),
        _list("Traces with problems", [f"{r.meta}: {'; '.join(r.problems[:3])}" for r in broken]),
    ]


def _about(run: Judged) -> str:
    harm = "harmful" if run.meta.harmful else "harmless"
    return f"{run.meta} ({run.meta.group}, {run.meta.kind or 'no kind'}, onset {run.meta.onset}, {harm})"


def _error(run: Judged) -> str:
    return f"; ended by {run.meta.error}" if run.meta.error else ""


def _first(run: Judged, since: int = 0) -> str:
    step, _, text = next(f for f in run.findings if f[0] >= since)
    return f"step {step}: {text}"


def _list(title: str, lines: list[str]) -> str:
    more = [f"- and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    body = "\n".join([f"- {line}" for line in lines[:MAX_LISTED]] + more)
    return f"### {title}: {len(lines)}" + (f"\n\n{body}" if body else "")


def short(share: Share) -> str:
    """A share without its interval."""
    return f"{share.hits / share.num:.3f} ({share.hits}/{share.num})" if share.num else "–"


def number(value: float | None) -> str:
    """A number; a dash where there is none."""
    return "–" if value is None else f"{value:g}"


def write_page(text: str, path: Path) -> bool:
    """Put a text between the markers of a page; False where it has none."""
    old = path.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        return False
    before, rest = old.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    return True
