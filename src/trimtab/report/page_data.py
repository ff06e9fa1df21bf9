"""The numbers of the report page as JSON that no HTML parser can trip over; long arrays travel as base64."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from trimtab.report.figures import Figures, Panel
from trimtab.report.heat import HeatMap
from trimtab.report.incidents import Incident
from trimtab.report.summary import Deed, Summary

MAX_MARKS = 500


def page_data(summary: Summary, figures: Iterable[Figures]) -> dict[str, Any]:
    """Everything `charts.js` draws: one section per optimizer, with what was found and done in it."""
    numbered = list(enumerate(summary.incidents, start=1))
    return {
        "sections": [
            {
                "optimizer": f.optimizer,
                "first": f.first_step,
                "last": f.last_step,
                "panels": [_panel(p) for p in f.panels],
                "heat": _heat(f.heat) if f.heat is not None else None,
                "incidents": [_incident(n, i) for n, i in numbered if i.optimizer == f.optimizer][:MAX_MARKS],
                "deeds": [_deed(d) for d in summary.deeds if d.optimizer == f.optimizer][:MAX_MARKS],
            }
            for f in figures
        ]
    }


def to_script(data: Any) -> str:
    """JSON for a `<script type="application/json">`: `<` is escaped, so nothing in it can end the element.

    Example:
        >>> to_script({"name": "</script>"})
        '{"name":"\\\\u003c/script>"}'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").encode("utf-8", "replace").decode()


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.title,
        "log": panel.log,
        "series": [
            {
                "name": s.name,
                "as": s.drawn_as,
                "num": s.num,
                "bad": s.num_bad,
                "steps": _base64(s.steps, "<f8"),
                "values": _base64(s.values, "<f8"),
            }
            for s in panel.series
        ],
    }


def _heat(heat: HeatMap) -> dict[str, Any]:
    return {
        "names": heat.names,
        "first": heat.first_step,
        "width": heat.width,
        "columns": heat.codes.shape[1],
        "codes": _base64(heat.codes, "u1"),
        "low": [round(float(v), 3) for v in heat.low],
        "high": [round(float(v), 3) for v in heat.high],
    }


def _incident(number: int, incident: Incident) -> dict[str, Any]:
    return {
        "number": number,
        "from": incident.onset,
        "to": incident.last_step,
        "severity": incident.severity.name.lower(),
        "steps": sorted({t.finding.step for t in incident.troubles}),
        "text": "\n".join(
            f"step {t.finding.step}: {t.finding.code} {t.finding.name}: {t.finding.message}"
            for t in incident.troubles[:6]
        ),
    }


def _deed(deed: Deed) -> dict[str, Any]:
    became = "" if deed.applied is None else ", done" if deed.applied else ", could not be done"
    detail = f": {deed.detail}" if deed.detail else ""
    return {
        "at": deed.at,
        "text": f"before step {deed.at}: {deed.words} because of {', '.join(deed.because)}{became}{detail}",
    }


def _base64(values: Any, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode("ascii")
