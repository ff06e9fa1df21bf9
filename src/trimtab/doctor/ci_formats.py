"""A checklist for continuous integration: JUnit XML, SARIF, and the annotations of GitHub Actions."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from trimtab.core.printable import printable
from trimtab.doctor.checklist import Line, Report, Status

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Status.FAIL: "error", Status.WARN: "warning"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a repository a training is built; empty where no file is known."""

    path: str = ""
    line: int = 1


def place_of(spec: str) -> Place:
    """The file and line of a target: `module:function`, `path/to/file.py:function`, or a script.

    Example:
        >>> place_of("no_such_module:build")
        Place(path='', line=1)
    """
    where, colon, name = spec.rpartition(":")
    where, name = (where, name) if colon and where else (spec, "")
    path = Path(where) if where.endswith(".py") else _module_path(where)
    if path is None or not path.is_file():
        return Place()
    try:
        shown = path.resolve().relative_to(Path.cwd().resolve())
    except ValueError:
        return Place()  # not in this repository: an annotation would point nowhere
    return Place(path=shown.as_posix(), line=_line_of(path, name))


def _module_path(name: str) -> Path | None:
    beside = Path(*name.split(".")).with_suffix(".py") if name else Path()
    if beside.is_file():
        return beside
    try:
        found = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(found.origin) if found is not None and found.origin else None


def _line_of(path: Path, name: str) -> int:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return 1
    defined = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    return next((node.lineno for node in defined if node.name == name), 1)


def _words(line: Line) -> str:
    """What is wrong, what was seen, and what to do."""
    parts = [line.cause, line.evidence, f"Fix: {line.fix}" if line.fix else ""]
    return printable(" ".join(part if part.endswith((".", "!", "?")) else f"{part}." for part in parts if part))


def to_junit(spec: str, report: Report, *, strict: bool = False) -> str:
    """JUnit XML: a check is a test case; what could not be checked is skipped. A warning fails where it is strict."""
    failed = [line for line in report.lines if _fails(line, strict)]
    skipped = report.of(Status.NA)
    suite = ElementTree.Element(
        "testsuite",
        name=f"trimtab doctor {printable(spec, one_line=True)}",
        tests=str(len(report.lines)),
        failures=str(len(failed)),
        errors="0",
        skipped=str(len(skipped)),
        time=f"{report.seconds:.3f}",
    )
    for line in report.lines:
        called = printable(f"{line.code} {line.name}", one_line=True)
        case = ElementTree.SubElement(suite, "testcase", classname="trimtab.doctor", name=called)
        if _fails(line, strict):
            failure = ElementTree.SubElement(
                case, "failure", type=line.status.value, message=printable(line.cause, one_line=True)
            )
            failure.text = _words(line)
        elif line.status is Status.NA:
            ElementTree.SubElement(case, "skipped", message=printable(line.evidence, one_line=True))
        else:
            out = _words(line) if line.status is Status.WARN else printable(line.evidence)
            ElementTree.SubElement(case, "system-out").text = out
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _fails(line: Line, strict: bool) -> bool:
    return line.status is Status.FAIL or (strict and line.status is Status.WARN)


def to_sarif(spec: str, report: Report, *, strict: bool = False) -> str:
    """SARIF 2.1.0, for code scanning: one result per failure and warning."""
    from trimtab import __version__

    wrong = [line for line in report.lines if not line.ok]
    place = place_of(spec)
    where = [] if not place.path else [_location(place)]
    rules = {
        line.code: {
            "id": line.code,
            "name": line.name,
            "shortDescription": {"text": printable(line.title)},
            "help": {"text": f"trimtab explain {line.name}"},
        }
        for line in wrong
    }
    results = [
        {
            "ruleId": line.code,
            "level": "error" if _fails(line, strict) else "warning",
            "message": {"text": _words(line)},
            "locations": where,
        }
        for line in wrong
    ]
    tool = {"driver": {"name": "trimtab doctor", "version": __version__, "rules": list(rules.values())}}
    data = {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": tool, "results": results}]}
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _location(place: Place) -> dict[str, object]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": place.path, "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": place.line},
        }
    }


def to_github(spec: str, report: Report, *, strict: bool = False) -> str:
    """Annotations of GitHub Actions, one line per failure and warning, and a count."""
    return "\n".join(_annotations(spec, report, strict)) + "\n"


def _annotations(spec: str, report: Report, strict: bool) -> Iterator[str]:
    place = place_of(spec)
    where = f"file={_property(place.path)},line={place.line}," if place.path else ""
    for line in report.lines:
        if not line.ok:
            level = "error" if _fails(line, strict) else _LEVELS[line.status]
            title = _property(f"{line.code} {line.name}")
            yield f"::{level} {where}title={title}::{_data(_words(line))}"
    yield f"::notice title=trimtab doctor::{_data(f'{spec}: {counts(report)}')}"


def _data(text: str) -> str:
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def counts(report: Report) -> str:
    """How many checks ended how.

    Example:
        >>> counts(Report(lines=()))
        '0 passed'
    """
    num = {status: len(report.of(status)) for status in Status}
    parts = [f"{num[Status.FAIL]} failed"] if num[Status.FAIL] else []
    parts += [f"{num[Status.WARN]} warning{'s' * (num[Status.WARN] != 1)}"] if num[Status.WARN] else []
    parts.append(f"{num[Status.PASS]} passed")
    parts += [f"{num[Status.NA]} could not be checked"] if num[Status.NA] else []
    return ", ".join(parts)


FORMATS: dict[str, Callable[..., str]] = {"junit": to_junit, "sarif": to_sarif, "github": to_github}
