"""A drill as one HTML file: no request to anywhere, light and dark."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from trimtab.drill.score import MIN_RECALL, Report
from trimtab.report.html import source_hash

EXTRA = """
.drill { width: 100%; margin-top: 12px; border-collapse: collapse; font-size: 14px; }
.drill th { padding: 6px 16px 6px 0; color: var(--muted); font-size: 13px; font-weight: 400; text-align: left; }
.drill td { padding: 7px 16px 7px 0; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
.drill td.num { text-align: right; }
.drill .what { display: block; color: var(--muted); font-size: 13px; }
.drill .good { color: var(--good); font-weight: 600; }
.drill .bad { color: var(--bad); font-weight: 700; }
.drill .unclear { color: var(--unclear); font-weight: 600; }
.aside dt { margin-top: 8px; }
.aside dd { color: var(--muted); }
.scrolls { overflow-x: auto; }
"""


def to_html(report: Report, min_recall: float = MIN_RECALL) -> str:
    """Render a drill as a page that stands alone."""
    got, held = report.score, report.holds(min_recall)
    late = "–" if got.median_latency is None else f"{got.median_latency:g} steps"
    tiles = [
        ("of harmful faults found", f"{got.found_harmful} of {got.num_harmful}"),
        ("of all faults found", f"{got.num_found} of {got.num_faults}"),
        ("median from onset to alarm", late),
        (f"false alarms in {report.clean_steps:,} clean steps", str(got.num_false_alarms)),
        _cost(report),
    ]
    style = _style()
    return _template().render(
        style=style,
        policy=f"default-src 'none'; style-src '{source_hash(style)}'; base-uri 'none'; form-action 'none'",
        report=report,
        tone="good" if held else "bad",
        sign="✓" if held else "!",
        word="The guard holds" if held else "The guard has gaps",
        headline=f"{report.sentence}.",
        tiles=tiles,
        rows=report.ran,
    )


def _cost(report: Report) -> tuple[str, str]:
    if report.cost_percent is None:
        return f"cost of the guard: {report.cost}", "–"
    clock = "of CPU time" if report.cpu_time else "of a step"
    return f"{clock} is what the guard costs ({report.step_ms:.3g} ms without)", f"{report.cost_percent:.1f} %"


def write_page(report: Report, path: Path | str, min_recall: float = MIN_RECALL) -> Path:
    """Write the page and say where it is."""
    path = Path(path)
    path = path / "drill.html" if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_html(report, min_recall), encoding="utf-8", errors="replace", newline="\n")
    return path


@cache
def _style() -> str:
    """The style of the reports, and a table."""
    return (files("trimtab.report") / "page" / "page.css").read_text(encoding="utf-8") + EXTRA


@cache
def _template() -> Template:
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return env.from_string((files("trimtab.drill") / "page.html.j2").read_text(encoding="utf-8"))
