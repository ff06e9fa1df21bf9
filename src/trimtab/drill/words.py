"""The words for a drill, the same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trimtab.drill.score import FOUND, MISSED, NA, NOT_RUN, OTHERWISE, Report, Row, Score, score

MIN_RECALL = 0.8


def ran(report: Report) -> list[Row]:
    """The rows of faults that could be put in."""
    return [row for row in report.rows if row.status in (FOUND, OTHERWISE, MISSED)]


def tone(row: Row) -> str:
    """`good`, `bad`, or `unclear` where it hardly matters."""
    if row.status == FOUND:
        return "good"
    return "bad" if row.harmful else "unclear"


def found_by(row: Row) -> str:
    """Which finding named a fault.

    Example:
        >>> found_by(Row(fault="bit-flip", group="numerics", what="", seed=0, status=MISSED))
        'MISSED'
    """
    if row.status == MISSED:
        return "MISSED"
    return row.by if row.status == FOUND else f"MISSED (said: {row.by})"


def after(row: Row) -> str:
    """How many steps after its onset."""
    return "" if row.latency is None or row.status != FOUND else str(row.latency)


def lost(row: Row) -> str:
    """What became of the unguarded run."""
    if row.hidden:
        return f"hidden: {row.harm}"
    return row.harm if row.harmful else f"harmless here ({row.harm})"


def set_aside(report: Report, status: str) -> Iterator[tuple[str, str]]:
    """Faults that were not put in: the reason, and which ones."""
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        if row.status == status and row.fault not in reasons.setdefault(row.reason, []):
            reasons[row.reason].append(row.fault)
    for reason, names in reasons.items():
        yield reason, ", ".join(names)


def not_applicable(report: Report) -> list[tuple[str, str]]:
    """Faults that do not apply to this training, by reason."""
    return list(set_aside(report, NA))


def not_run(report: Report) -> list[tuple[str, str]]:
    """Faults that ran out of time, or whose process broke, by reason."""
    return list(set_aside(report, NOT_RUN))


def alarms(report: Report) -> Iterable[str]:
    """The findings of clean runs."""
    return (f"{t.code} {t.name} at step {t.step}: {t.message}" for t in report.false_alarms)


def holds(report: Report, min_recall: float = MIN_RECALL) -> bool:
    """Whether there was no false alarm, and enough of the harmful faults were found."""
    got = counted(report)
    return not report.false_alarms and (got.num_harmful == 0 or got.recall_harmful >= min_recall)


def counted(report: Report) -> Score:
    """The report in numbers."""
    return score(report.rows, len(report.false_alarms))


def in_all(report: Report) -> str:
    """What the one sentence leaves out."""
    got = counted(report)
    parts = [f"of all {got.num_faults} faults {got.num_found} were found", f"{got.num_harmless} did no harm here"]
    if got.num_not_applicable:
        parts.append(f"{got.num_not_applicable} do not apply here")
    if got.num_not_run:
        parts.append(f"{got.num_not_run} were not run")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def cost(report: Report) -> str:
    """What the guard costs, or why that is not known."""
    if report.cost_reason:
        return f"not measured ({report.cost_reason})"
    if report.cost_percent is None:
        return f"not measurable: the noise is {report.noise_percent:.0f} % of a step of {report.step_ms:.3g} ms"
    how = " (of CPU time: the machine is busy)" if report.cpu_time else ""
    return f"{report.cost_percent:.1f} % of a step of {report.step_ms:.3g} ms{how}"
