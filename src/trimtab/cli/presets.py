"""`trimtab presets`: the named sets of settings, or everything about one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.core.presets import Preset

NAME = "presets"
LIMITS = {
    "exploding": "global norm above which gradients explode",
    "vanishing": "norm below which gradients vanish",
    "high": "times the clip: a norm above that is reported at once",
    "zero": "norm below which a parameter's gradient counts as zero",
    "zero_share": "share of zero gradients above which there is a warning",
}


@command
def run(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A preset: then everything about it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """List the presets: named settings for `Guard(preset=...)`.

    With a name: its settings, hints and output lines, and where its source contradicts itself.
    """
    from trimtab.core.presets import PRESETS, get_preset

    chosen = None if name is None else get_preset(name)
    if as_json:
        emit({"preset": _data(chosen)} if chosen is not None else {"presets": [_data(p) for p in PRESETS]})
    elif chosen is not None:
        _show_one(console(), chosen)
    else:
        _show_all(console(), PRESETS)
    return OK


def _data(preset: Preset) -> dict[str, object]:
    return {f.name: getattr(preset, f.name) for f in fields(preset)} | {"bands": [b._asdict() for b in preset.bands]}


def _show_all(out: Console, presets: tuple[Preset, ...]) -> None:
    documented = [p for p in presets if p.lines]
    _table(
        out,
        ("preset", "clip", "output lines", "LR, warm-up", "document"),
        [(p.name, _clip(p), _lines(p), _rate(p), p.source) for p in documented],
    )
    out.print()
    _table(
        out,
        ("architecture", "clip", "what"),
        [(p.name, _clip(p), p.title) for p in presets if p not in documented],
    )
    out.print('\nUse one: Guard(..., preset="camoxpert"). All of it: trimtab presets camoxpert')


def _table(out: Console, titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, style in zip(titles, ("bold", "cyan", "", "", "dim"), strict=False):
        table.add_column(title, style=style, no_wrap=title != titles[-1])
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _show_one(out: Console, preset: Preset) -> None:
    from rich.rule import Rule
    from rich.text import Text

    from trimtab.report.text import wrapped

    width = min(out.width, 100)

    def section(title: str, rows: list[tuple[str, str]]) -> None:
        if rows:
            out.print(Text(f"\n{title}", style="bold"))
            wide = max(len(key) for key, _ in rows)
            for key, value in rows:
                out.print(wrapped(value, width, f"  {key:<{wide}}  "))

    out.print(Rule(Text.assemble((preset.name, "bold"), f" {preset.title}"), align="left"))
    out.print(wrapped(preset.source, width, "from "))
    if preset.aliases:
        out.print(f"also {', '.join(preset.aliases)}")
    settings = {key: value for key, value in preset.settings.items() if key != "clip"}
    section("Settings of the guard", [("clip", _clip(preset)), *_flat(settings)])
    section("Hints for a trainer (a guard does not touch these)", _flat(preset.hints))
    section("Output lines", [(s, f"{_example(s)} ({_cadence(s, every)})") for s, every in preset.lines.items()])
    section("Their warnings", [(_value(limit), LIMITS[key]) for key, limit in preset.limits.items()])
    section("What a norm means", [(f"{b.low:g} to {b.high:g}", f"{b.of}: {b.meaning}") for b in preset.bands])
    if preset.notes:
        out.print(Text("\nContradictions, and what is done about them" if preset.lines else "\nNote", style="bold"))
    for note in preset.notes:
        out.print(wrapped(note, width, "  - "))


def _flat(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted names."""
    out: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            out += _flat(value, f"{prefix}{key}.")
        else:
            out.append((prefix + key, _value(value)))
    return out


def _value(value: object) -> str:
    if isinstance(value, tuple | list):
        return " to ".join(_value(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _clip(preset: Preset) -> str:
    clip = preset.settings.get("clip")
    if isinstance(clip, dict):
        if "strategy" in clip:
            return f"{clip['strategy']} {clip['ratio']}"
        return f"{clip['norm']} above {clip['above']:g}"
    return "none" if clip is None else str(clip)


def _lines(preset: Preset) -> str:
    rare = [every for every in preset.lines.values() if every > 1]
    return " ".join(preset.lines) + (f" every {rare[0]}" if rare else "")


def _cadence(style: str, every: int) -> str:
    from trimtab.compat.lines import EVENTS

    if style in EVENTS:
        return "as it happens"
    if every <= 1:
        return "every step" if every else "with every validation"
    return f"every {every} steps"


def _rate(preset: Preset) -> str:
    hints = preset.hints
    if "base_lr" not in hints:
        return "-"
    warm = f", {hints['warmup_steps']}" if "warmup_steps" in hints else ""
    if "warmup_frac" in hints:
        warm = f", {100 * hints['warmup_frac']:g} %"
    return f"{_rate_text(hints['base_lr'])}{warm}"


def _rate_text(lr: float) -> str:
    digits, power = f"{lr:e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def _example(style: str) -> str:
    """The line with numbers in it, as it will look."""
    from trimtab.compat import lines

    examples = {
        "a11": lambda: lines.gradient_health(150, 125.43, 340.12, 3.2e-08, 45.67),
        "b5": lambda: lines.high_norm(2.5, 0.5),
        "b8": lambda: lines.norm_summary(0.381, 0.498).strip(),
        "b9": lambda: lines.nonfinite_gradients(5, float("inf")).split("\n")[0],
        "c4": lambda: lines.step_diagnostics(10, 3.2, 2.0, 1.5, 11.25, 3.45e-06),
        "d2": lambda: lines.norm_before_clipping(2.5),
        "e13": lambda: lines.gradient_diagnostics(0, 1.23, [0.5, 1.1], num_zero=0, num_nonfinite=0, num_parameters=12),
    }
    return examples[style]()
