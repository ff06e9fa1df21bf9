"""A run as one HTML file: no request to anywhere, readable in ten years, safe whatever names the run used."""

from __future__ import annotations

import base64
import hashlib
import shlex
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from trimtab.record.reader import Run
from trimtab.report import page_words
from trimtab.report.figures import make_figures
from trimtab.report.page_data import page_data, to_script
from trimtab.report.summary import Summary, summarise

NAME = "report.html"
SCRIPTS = ("tools.js", "charts.js", "heat.js")


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
            verdict=page_words.verdict(summary),
            tiles=page_words.tiles(summary),
            notices=list(page_words.notices(summary, figures)),
            facts=list(page_words.facts(summary, run.info)),
            settings=list(page_words.changed_settings(run.info.config)) if run.info is not None else [],
            sections=[page_words.section(f, summary) for f in figures],
            incidents=summary.incidents[: page_words.MAX_INCIDENTS],
            deeds_of=lambda incident: list(page_words.done(page_words.deeds_of(incident, summary))),
            other_deeds=list(page_words.done(page_words.unrelated(summary))),
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
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return {"style": style, "script": script, "policy": policy}


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


@cache
def _template() -> Any:
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["number"] = page_words.number
    env.filters["count"] = page_words.count
    source = (files("trimtab.report") / "page" / "page.html.j2").read_text(encoding="utf-8")
    return env.from_string(source)
