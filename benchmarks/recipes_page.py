"""The page that benchmarks/recipes.py writes, and where its numbers are kept until then."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from recipes_claims import Claim, Judged, told

from trimtab import __version__

BEGIN, END = "<!-- recipes:begin -->", "<!-- recipes:end -->"
ROOT = Path(__file__).parent.parent


class Cache:
    """What was measured, one file per section, rewritten after every job: a killed run loses nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._kept: dict[str, dict[str, Any]] = {}

    def section(self, name: str) -> dict[str, Any]:
        """Everything known of a section, by the name of the job."""
        if name not in self._kept:
            path = self._folder / f"{name}.json"
            self._kept[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return self._kept[name]

    def has(self, section: str, job: str, spec: Any, state: str | None) -> bool:
        """Whether a job was done without an error, as it is now asked for, on these sources (None: on any)."""
        kept = self.section(section).get(job)
        if kept is None or "error" in kept["value"] or kept["spec"] != json.loads(json.dumps(spec)):
            return False
        return state is None or kept["state"] == state

    def put(self, section: str, job: str, spec: Any, value: Any, state: str) -> None:
        """Keep a result, with the circumstances."""
        self.section(section)[job] = {
            "value": value,
            "spec": spec,
            "state": state,
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "load": round(os.getloadavg()[0], 1),
        }
        new = self._folder / f"{section}.json.new"
        new.write_text(json.dumps(self.section(section), indent=1), encoding="utf-8")
        os.replace(new, self._folder / f"{section}.json")

    def values(self, section: str) -> dict[str, Any]:
        """The results alone."""
        return {name: kept["value"] for name, kept in self.section(section).items()}


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def commit() -> str:
    """Which state of the sources this is."""
    return _git("rev-parse", "--short", "HEAD") + (" with changes" if _git("status", "--short", "src") else "")


def state() -> str:
    """The sources as a short number: the same as long as nothing under src changes."""
    return hashlib.sha256((_git("rev-parse", "HEAD:src") + _git("diff", "HEAD", "--", "src")).encode()).hexdigest()[:12]


def page(sections: Mapping[str, Judged], cache: Cache, seeds: Sequence[int], words: str) -> str:
    """All sections, then the environment."""
    claims = [claim for judged in sections.values() for claim in judged.claims if claim.test is not None]
    missed = [claim for claim in claims if not claim.holds]
    lines = [
        "# The five systems, end to end on real data",
        "",
        f"`{words}`: {len(claims) - len(missed)} of {len(claims)} expectations hold"
        + (f", {len(missed)} do not (MISS)." if missed else "."),
        "",
        f"Seed {seeds[0]} is the default and was looked at while the recipes were made; "
        f"{', '.join(map(str, seeds[1:]))} were not."
        if len(seeds) > 1
        else f"Seed {seeds[0]}.",
    ]
    for judged in sections.values():
        lines += ["", f"## {judged.title}", "", judged.about, "", *_claims(judged.claims)]
        for table in judged.tables:
            lines += ["", f"{table.title}:", "", _row(table.head), _row("---" for _ in table.head)]
            lines += [_row(row) for row in table.rows]
        for note in judged.notes:
            lines += ["", note]
    lines += ["", "## Environment", "", *_environment(sections, cache)]
    return "\n".join([*lines, ""])


def summary(sections: Mapping[str, Judged], out: Path, page: Path = ROOT / "README.md") -> str:
    """The short table for `page`: one row for each recipe and fault, and a link to the rest."""
    inside = out.resolve().is_relative_to(ROOT)
    where = out.resolve().relative_to(ROOT).as_posix() if inside else out.as_posix()
    link = Path(os.path.relpath(out.resolve(), page.resolve().parent)).as_posix() if inside else where
    head = ["`trimtab train`", "held-out", "clean", "what goes wrong", "guarded", "unguarded"]
    lines = [
        "Lowest and highest value over the seeds; only the default seed was used to choose settings "
        "(`python benchmarks/recipes.py`;",
        f"every expectation and whether it was met: [`{where}`]({link})):",
        "",
        _row(head),
        _row("---" for _ in head),
    ]
    for name, judged in sections.items():
        lines += [_row([name, *cells]) for cells in judged.summary]
    return "\n".join(lines)


def put_between_marks(path: Path, text: str) -> None:
    """Put a text in the place of the one between the marks of a page."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no {BEGIN} ... {END}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _claims(claims: Sequence[Claim]) -> list[str]:
    columns = list(dict.fromkeys(name for claim in claims for name in claim.values))
    lines = [_row(["", "expected", *columns, ""]), _row("---" for _ in range(len(columns) + 3))]
    for claim in claims:
        cells = [told(claim.values[name]) if name in claim.values else "" for name in columns]
        lines.append(_row([claim.what, claim.bound, *cells, f"**{claim.verdict}**"]))
    return lines


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _environment(sections: Mapping[str, Judged], cache: Cache) -> list[str]:
    lines = [
        f"trimtab {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {_processor()}, "
        f"{os.cpu_count()} cores. Two workers with one thread each, but for what is measured alone.",
        "",
        _row(["section", "commit", "from", "to (UTC)", "load average"]),
        _row(["---"] * 5),
    ]
    for name in sections:
        kept = cache.section(name).values()
        if kept:
            commits = ", ".join(dict.fromkeys(one["commit"] for one in kept))
            dates, loads = sorted(one["date"] for one in kept), [one["load"] for one in kept]
            lines.append(_row([name, commits, dates[0], dates[-1], f"{min(loads)} to {max(loads)}"]))
    return lines


def _processor() -> str:
    found = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in found.read_text().splitlines() if "model name" in line]
    return names[0] if names else platform.processor()
