"""A run as one HTML file: no request to anywhere, readable in ten years, safe whatever names the run used."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape
from numpy.typing import ArrayLike

from trimtab.core.config import Config
from trimtab.core.types import RunInfo
from trimtab.record.reader import Run
from trimtab.report.evidence import evidence_words
from trimtab.report.figures import Axis, Figures, HeatMap, Panel, Series, make_figures
from trimtab.report.headline import belongs, in_words, make_headline, short, trace_of
from trimtab.report.summary import (
    CLOSED,
    NOT_CLOSED,
    Deed,
    Health,
    Incident,
    Summary,
    Track,
    count,
    summarise,
    words_on,
)
from trimtab.report.traces import read_traces

NAME = "report.html"
SCRIPTS = ("tools.js", "charts.js", "heat.js")


def to_html(run: Run, summary: Summary | None = None) -> str:
    """Render a run as a page that stands alone."""
    summary = summarise(run) if summary is None else summary
    traces = read_traces(run.folder)
    near: dict[str, list[int]] = {}
    for incident in summary.incidents:
        near.setdefault(incident.optimizer, []).append(incident.onset)
    figures = make_figures(run, near)
    return str(
        _template().render(
            **_assets(),
            summary=summary,
            headline=make_headline(summary, traces),
            verdict=verdict(summary),
            tiles=tiles(summary),
            notices=list(notices(summary, figures)),
            facts=list(facts(summary, run.info)),
            settings=list(changed_settings(run.info.config)) if run.info is not None else [],
            sections=[section(f, summary) for f in figures],
            incidents=summary.incidents[:MAX_INCIDENTS],
            trace_of=lambda incident: trace_of(incident, traces),
            evidence=evidence_words,
            in_words=in_words,
            quote=shlex.quote,
            deeds_of=lambda incident: list(done(deeds_of(incident, summary))),
            other_deeds=list(done(unrelated(summary))),
            codes=list(dict.fromkeys(t.finding.code for i in summary.incidents for t in i.troubles)),
            folder=shlex.quote(str(run.folder)),
            data=to_script(page_data(summary, figures)),
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
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")  # half a surrogate is no text
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@cache
def _assets() -> dict[str, str]:
    """Style and script, and the policy that lets a browser run them and nothing else."""
    page = files("trimtab.report") / "page"
    style, *scripts = (page.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", *SCRIPTS))
    script = "\n".join(scripts)
    policy = (
        f"default-src 'none'; style-src '{source_hash(style)}'; script-src '{source_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return {"style": style, "script": script, "policy": policy}


def source_hash(text: str) -> str:
    """What a content policy calls a style or a script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


@cache
def _template() -> Template:
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["number"] = number
    env.filters["count"] = count
    env.filters["coded"] = coded
    env.filters["sentence"] = lambda text: f"{text[:1].upper()}{text[1:]}"
    source = (files("trimtab.report") / "page" / "page.html.j2").read_text(encoding="utf-8")
    return env.from_string(source)


MAX_MARKS = 500


def page_data(summary: Summary, figures: Iterable[Figures]) -> dict[str, object]:
    """Everything that the scripts draw: the charts of a run, with what was found and done in it."""
    numbered = list(enumerate(summary.incidents, start=1))
    named = {name for i in summary.incidents for t in i.troubles for name in t.finding.subject}
    return {
        "sections": [
            {
                "optimizer": f.optimizer,
                "first": f.first_step,
                "last": f.last_step,
                "axes": [_axis(a) for a in f.axes],
                "panels": [_panel(p) for p in f.panels],
                "heats": [_heat(h) for h in f.heats],
                "named": sorted(named & set(f.heat.names))[:MAX_MARKS] if f.heat is not None else [],
                "incidents": [_incident(n, i) for n, i in numbered][:MAX_MARKS],
                "deeds": [_deed(d) for d in summary.deeds][:MAX_MARKS],
            }
            for f in figures
        ]
    }


def to_script(data: object) -> str:
    """JSON for a `<script type="application/json">`: `<` is escaped, so nothing in it can end the element.

    Example:
        >>> to_script({"name": "</script>"})
        '{"name":"\\\\u003c/script>"}'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").encode("utf-8", "replace").decode()


def _axis(axis: Axis) -> dict[str, object]:
    return {"name": axis.name, "steps": _base64(axis.steps, "<f8"), "values": _base64(axis.values, "<f8")}


def _panel(panel: Panel) -> dict[str, object]:
    return {
        "title": panel.title,
        "log": panel.log,
        "unit": panel.unit,
        "band": panel.band,
        "series": [_series(s) for s in panel.series],
    }


def _series(series: Series) -> dict[str, object]:
    data: dict[str, object] = {
        "name": series.name,
        "as": series.drawn_as,
        "smooth": series.smooth,
        "num": series.num,
        "bad": series.num_bad,
        "end": _base64([series.end], "<f8"),
        "steps": _base64(series.steps, "<f8"),
        "values": _base64(series.values, "<f8"),
    }
    if not np.array_equal(series.steps, series.last) or not np.array_equal(series.low, series.high, equal_nan=True):
        data["last"] = _base64(series.last, "<f8")
        data["low"], data["high"] = _base64(series.low, "<f8"), _base64(series.high, "<f8")
        data["bads"] = _base64(series.bad, "<u4")
    return data


def _heat(heat: HeatMap) -> dict[str, object]:
    return {
        "metric": heat.metric,
        "names": heat.names,
        "first": heat.first_step,
        "width": heat.width,
        "columns": heat.codes.shape[1],
        "codes": _base64(heat.codes, "u1"),
        "low": [round(float(v), 3) for v in heat.low],
        "high": [round(float(v), 3) for v in heat.high],
    }


def _incident(number: int, incident: Incident) -> dict[str, object]:
    return {
        "number": number,
        "from": incident.onset,
        "to": incident.last_step,
        "severity": incident.severity.name.lower(),
        "steps": sorted({t.finding.step for t in incident.troubles}),
        "text": "\n".join(
            f"step {t.finding.step:,}: {in_words(t.finding.name)}: {t.finding.message}" for t in incident.troubles[:6]
        ),
    }


def _deed(deed: Deed) -> dict[str, object]:
    became = "" if deed.applied is None else ", done" if deed.applied else ", could not be done"
    detail = f": {deed.detail}" if deed.detail else ""
    return {
        "at": deed.at,
        "text": f"before step {deed.at}: {deed.words} because of {', '.join(deed.because)}{became}{detail}",
    }


def _base64(values: ArrayLike, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode("ascii")


MAX_INCIDENTS = 200
MAX_LOSSES = 3
MAX_DEEDS = 100

_TONES = {
    Health.EMPTY: ("unclear", "!"),
    Health.HEALTHY: ("good", "✓"),
    Health.RECOVERED: ("good", "✓"),
    Health.SICK: ("bad", "✕"),
    Health.STOPPED: ("bad", "■"),
    Health.INTERRUPTED: ("unclear", "!"),
    Health.UNFINISHED: ("unclear", "…"),
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


_CODE = re.compile(r"`([^`\n]+)`")


def coded(text: str) -> Markup:
    """Text as HTML, with what stands between backticks as code.

    Example:
        >>> print(coded("Set `clip=1.0` <now>"))
        Set <code>clip=1.0</code> &lt;now&gt;
    """
    return Markup(_CODE.sub(lambda m: f"<code>{m[1]}</code>", str(escape(text))))  # escaped before


def verdict(summary: Summary) -> dict[str, str]:
    """The word at the top, its sign and its colour."""
    tone, sign = _TONES[summary.health]
    return {"tone": tone, "sign": sign, "word": summary.health.value.capitalize()}


def tiles(summary: Summary) -> list[Fact]:
    """The few numbers that are shown large; several optimizers make their steps side by side."""
    shown = [Fact("steps", f"{max(t.num_steps for t in summary.tracks):,}")]
    for track in summary.tracks[:MAX_LOSSES]:
        whose = f" of {track.optimizer}" if track.optimizer else ""
        if track.loss is not None:
            shown.append(Fact(f"loss{whose}, first → last", f"{short(track.loss.began)} → {short(track.loss.ended)}"))
    val = summary.tracks[0].val_loss
    if val is not None:
        shown.append(Fact("best validation loss", f"{val.lowest:.3g}"))
    for num, one, several in (
        (len(summary.incidents), "incident", "incidents"),
        (summary.num_rejected, "update rejected", "updates rejected"),
    ):
        shown.append(Fact(one if num == 1 else several, f"{num:,}"))
    return shown


def notices(summary: Summary, figures: tuple[Figures, ...]) -> Iterator[str]:
    """What the reader must know before looking at anything."""
    if not figures:
        yield "No training step was recorded: the run ended before its first step, or has not made one yet."
    elif all(t.loss is None for t in summary.tracks):
        yield "No loss was recorded. With guard.step(loss) it is, and far more can be found."
    if summary.ending == NOT_CLOSED:
        yield "The record was not closed: the run was killed, or is still going. This page shows it up to here."
    elif summary.ending != CLOSED:
        yield f"The run ended with: {summary.ending}"


def facts(summary: Summary, info: RunInfo | None) -> Iterator[Fact]:
    """What was trained, and by what."""
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
    if summary.ranks:
        yield Fact("Ranks", words_on(summary.ranks))
    if info is not None and info.versions:
        yield Fact("Versions", ", ".join(f"{name} {version}" for name, version in info.versions.items()))


def _time(text: str) -> str:
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return text


def changed_settings(config: Mapping[str, object]) -> Iterator[Fact]:
    """The settings of a run that are not the defaults.

    Example:
        >>> list(changed_settings({"mode": "act", "clip": {"norm": 1.0}, "full_every": 50}))
        [Fact(name='clip.norm', value='1.0')]
    """
    default = _flat(Config().to_dict())
    for name, value in _flat(config).items():
        if name not in ("mode", "dir") and value != default.get(name):  # those two are shown elsewhere
            yield Fact(name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def _flat(config: Mapping[str, object], lead: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{lead}{key}.") if isinstance(value, Mapping) else {f"{lead}{key}": value}
    return flat


def section(figures: Figures, summary: Summary) -> dict[str, object]:
    """The texts around the charts."""
    track = next((t for t in summary.tracks if t.optimizer == figures.optimizer), None)
    return {
        "optimizer": figures.optimizer,
        "marked": bool(summary.incidents),
        "axes": [a.name for a in figures.axes],
        "panels": [{"title": p.title, "note": p.note, "words": _words(p.title, track)} for p in figures.panels],
        "metrics": [{"name": h.metric, "rows": len(h.names), "width": h.width} for h in figures.heats],
        "rows": len(figures.heat.names) if figures.heat is not None else 0,
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


def deeds_of(incident: Incident, summary: Summary) -> list[Deed]:
    """What was done about an incident."""
    return [d for d in summary.deeds if belongs(d, incident)]


def unrelated(summary: Summary) -> list[Deed]:
    """What was done without any of the incidents that are shown."""
    return [d for d in summary.deeds if not any(belongs(d, i) for i in summary.incidents[:MAX_INCIDENTS])]


def done(deeds: list[Deed]) -> Iterator[Done]:
    """One line per deed; the same over and over is one line."""
    for _, group in groupby(deeds[:MAX_DEEDS], key=lambda d: (d.kind, dict(d.args), d.because, d.applied, d.detail)):
        alike = list(group)
        deed = alike[0]
        when = f"before step {deed.at}"
        if len(alike) > 1:
            when = f"before steps {deed.at} to {alike[-1].at}, {len(alike)} times"
        became = {None: "no outcome on record", True: "done", False: "could not be done"}[deed.applied]
        yield Done(when, deed.words, ", ".join(deed.because), became, deed.detail)
    if len(deeds) > MAX_DEEDS:
        yield Done("later", f"and {len(deeds) - MAX_DEEDS} more", "", "", "--json lists all of them")
