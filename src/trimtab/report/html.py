"""A run as one HTML file: no request to anywhere, readable in ten years, safe whatever names the run used."""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from trimtab.core.config import Config
from trimtab.core.types import RunInfo
from trimtab.record.reader import Run
from trimtab.report.figures import Figures, make_figures
from trimtab.report.incidents import Incident
from trimtab.report.page_data import page_data, to_script
from trimtab.report.summary import CLOSED, NOT_CLOSED, Deed, Health, Summary, Track, summarise

MAX_INCIDENTS = 200
MAX_DEEDS = 100
NAME = "report.html"

_TONES = {
    Health.HEALTHY: ("good", "✓"),
    Health.RECOVERED: ("good", "✓"),
    Health.SICK: ("bad", "✕"),
    Health.STOPPED: ("bad", "■"),
    Health.INTERRUPTED: ("unclear", "!"),
}


class Fact(NamedTuple):
    """A name and its value, for a list of definitions."""

    name: str
    value: str


class Done(NamedTuple):
    """One thing that was done, as often as it was done alike."""

    when: str
    what: str
    because: str
    became: str
    detail: str


def to_html(run: Run, summary: Summary | None = None) -> str:
    """Render a run as a page that stands alone."""
    summary = summarise(run) if summary is None else summary
    near: dict[str, list[int]] = {}
    for incident in summary.incidents:
        near.setdefault(incident.optimizer, []).append(incident.onset)
    figures = make_figures(run, near)
    return str(
        _template().render(
            **_assets(),
            summary=summary,
            verdict=_verdict(summary, figures),
            tiles=_tiles(summary),
            notices=list(_notices(summary, figures)),
            facts=list(_facts(summary, run.info)),
            settings=list(changed_settings(run.info.config)) if run.info is not None else [],
            versions=[Fact(str(k), str(v)) for k, v in run.info.versions.items()] if run.info is not None else [],
            sections=[_section(f, summary) for f in figures],
            incidents=summary.incidents[:MAX_INCIDENTS],
            deeds_of=lambda incident: list(_done(_deeds_of(incident, summary))),
            other_deeds=list(_done(_unrelated(summary))),
            codes=list(dict.fromkeys(t.finding.code for i in summary.incidents for t in i.troubles)),
            folder=shlex.quote(str(run.folder)),
            data=Markup(to_script(page_data(summary, figures))),
        )
    )


def write_html(run: Run, path: Path | str | None = None, summary: Summary | None = None) -> Path:
    """Write the page, by default into the folder of the run, and say where it is.

    It appears under its name only when it is complete: a reader never sees half a page.
    """
    path = Path(path) if path is not None else run.folder / NAME
    path = path / NAME if path.is_dir() else path
    text = to_html(run, summary)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".writing")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@cache
def _assets() -> dict[str, Any]:
    page = files("trimtab.report") / "page"
    style, script = (page.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "charts.js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return {"style": Markup(style), "script": Markup(script), "policy": Markup(policy)}


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


@cache
def _template() -> Any:
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["number"] = number
    env.filters["count"] = count
    source = (files("trimtab.report") / "page" / "page.html.j2").read_text(encoding="utf-8")
    return env.from_string(source)


def number(value: object) -> str:
    """A number short enough to read; anything else as it is.

    Example:
        >>> number(1234567.0), number(0.000123456), number(float("nan")), number("x")
        ('1.235e+06', '0.0001235', 'NaN', 'x')
    """
    if isinstance(value, bool | int) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}" if math.isfinite(value) else "Inf" if value > 0 else "-Inf"


def count(num: int, what: str) -> str:
    """So many of something: `1 step`, `2,000 steps`."""
    return f"{num:,} {what}" if num == 1 else f"{num:,} {what}s"


def _verdict(summary: Summary, figures: tuple[Figures, ...]) -> dict[str, str]:
    tone, sign = _TONES[summary.health]
    word = summary.health.value
    if not figures and not summary.incidents:  # a run without a step is neither healthy nor sick
        tone, sign, word = "unclear", "!", "nothing recorded"
    return {"tone": tone, "sign": sign, "word": word.capitalize()}


def _tiles(summary: Summary) -> list[Fact]:
    loss = summary.tracks[0].loss
    tiles = [Fact("steps", f"{sum(t.num_steps for t in summary.tracks):,}")]
    if loss is not None:
        tiles.append(Fact("loss, first → last", f"{loss.first:.3g} → {loss.last:.3g}"))
    val = summary.tracks[0].val_loss
    if val is not None:
        tiles.append(Fact("best validation loss", f"{val.lowest:.3g}"))
    tiles.append(Fact("incidents", f"{len(summary.incidents):,}"))
    tiles.append(Fact("updates kept out", f"{summary.num_rejected:,}"))
    return tiles


def _notices(summary: Summary, figures: tuple[Figures, ...]) -> Iterator[str]:
    if not figures:
        yield "No training step was recorded: the run ended before its first step, or has not made one yet."
    elif all(t.loss is None for t in summary.tracks):
        yield "No loss was recorded. With guard.step(loss) it is, and far more can be found."
    if summary.ending == NOT_CLOSED:
        yield "The record was not closed: the run was cut short, or is still going. This page shows it up to here."
    elif summary.ending != CLOSED:
        yield f"The run ended with: {summary.ending}"


def _facts(summary: Summary, info: RunInfo | None) -> Iterator[Fact]:
    size = f", {summary.num_parameters:,} parameters" if summary.num_parameters else ""
    yield Fact("Model", f"{summary.model}{size}")
    labels = [name for name in (info.optimizers if info is not None else ()) if name]
    if labels:
        yield Fact("Optimizers" if len(labels) > 1 else "Optimizer", ", ".join(labels))
    if summary.mode:
        yield Fact("Mode", summary.mode)
    if summary.started:
        yield Fact("Started", _time(summary.started))
    yield Fact("Run", summary.run_id)


def _time(text: str) -> str:
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return text


def changed_settings(config: Mapping[str, Any]) -> Iterator[Fact]:
    """The settings of a run that are not the defaults.

    Example:
        >>> list(changed_settings({"mode": "act", "clip": {"norm": 1.0}, "full_every": 50}))
        [Fact(name='clip.norm', value='1.0')]
    """
    default = _flat(Config().to_dict())
    for name, value in _flat(config).items():
        if name not in ("mode", "dir") and value != default.get(name):  # those two are told elsewhere
            yield Fact(name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def _flat(config: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{lead}{key}.") if isinstance(value, Mapping) else {f"{lead}{key}": value}
    return flat


def _section(figures: Figures, summary: Summary) -> dict[str, Any]:
    track = next((t for t in summary.tracks if t.optimizer == figures.optimizer), None)
    return {
        "optimizer": figures.optimizer,
        "panels": [{"title": p.title, "note": p.note, "words": _words(p.title, track)} for p in figures.panels],
        "rows": len(figures.heat.names) if figures.heat is not None else 0,
        "width": figures.heat.width if figures.heat is not None else 1,
    }


def _words(title: str, track: Track | None) -> str:
    """What a chart shows, for those who cannot see it."""
    curve = {"Loss": track.loss, "Gradient norm": track.grad_norm}.get(title) if track is not None else None
    if curve is None:
        return f"{title} over the steps of the run."
    bad = f", {count(curve.num_nonfinite, 'non-finite value')}" if curve.num_nonfinite else ""
    return (
        f"{title} over {count(curve.num, 'step')}: first {curve.first:.3g}, lowest {curve.lowest:.3g}, "
        f"highest {curve.highest:.3g}, last {curve.last:.3g}{bad}."
    )


def _belongs(deed: Deed, incident: Incident) -> bool:
    return deed.optimizer == incident.optimizer and incident.onset <= deed.about <= incident.last_step


def _deeds_of(incident: Incident, summary: Summary) -> list[Deed]:
    return [d for d in summary.deeds if _belongs(d, incident)]


def _unrelated(summary: Summary) -> list[Deed]:
    return [d for d in summary.deeds if not any(_belongs(d, i) for i in summary.incidents[:MAX_INCIDENTS])]


def _done(deeds: list[Deed]) -> Iterator[Done]:
    """One line per deed; the same over and over is one line."""
    for _, group in groupby(deeds[:MAX_DEEDS], key=lambda d: (d.kind, dict(d.args), d.because, d.applied, d.detail)):
        alike = list(group)
        deed = alike[0]
        when = f"before step {deed.at}"
        if len(alike) > 1:
            when = f"before steps {deed.at} to {alike[-1].at}, {len(alike)} times"
        args = "".join(f", {name} {number(float(value))}" for name, value in deed.args.items())
        became = {None: "no outcome on record", True: "done", False: "could not be done"}[deed.applied]
        yield Done(when, f"{deed.kind}{args}", ", ".join(deed.because), became, deed.detail)
    if len(deeds) > MAX_DEEDS:
        yield Done("later", f"and {len(deeds) - MAX_DEEDS} more", "", "", "--json lists all of them")
