"""Named sets of settings: one for each documented system, and what is usual for an architecture."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from trimtab.core.config_read import bad
from trimtab.core.errors import ConfigError
from trimtab.core.preset_arch import ARCHITECTURES
from trimtab.core.preset_data import DOCUMENTED
from trimtab.core.preset_record import Preset

PRESETS: tuple[Preset, ...] = (*DOCUMENTED, *ARCHITECTURES)

_MERGED = ("policy", "rules", "severity")
"""Tables of which one may change an entry and keep the rest of what the preset says."""


def get_preset(name: str) -> Preset:
    """The preset of that name or alias; an unknown one raises ConfigError with a suggestion.

    Example:
        >>> get_preset("001").name, get_preset("camoxpert").settings["clip"]
        ('camoxpert', 0.5)
    """
    if not isinstance(name, str):
        raise bad("preset", name, "the name of a preset: trimtab presets lists them")
    known = {alias: preset for preset in PRESETS for alias in (preset.name, *preset.aliases)}
    wanted = name.strip().lower().replace("_", "-")
    if wanted in known:
        return known[wanted]
    close = difflib.get_close_matches(wanted, known, n=1)
    names = ", ".join(preset.name for preset in PRESETS)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {names}."
    raise ConfigError(f"there is no preset {name!r}; {hint}")


def under(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same settings on top of those of the preset they name, if they name one."""
    if not isinstance(settings, Mapping) or settings.get("preset") is None:
        return settings
    preset = get_preset(settings["preset"])
    out = {**preset.settings, **settings, "preset": preset.name}
    for table in _MERGED:
        theirs, mine = preset.settings.get(table), settings.get(table)
        if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
            out[table] = {**theirs, **mine}
    return out


def warmup_lr(hints: Mapping[str, Any], step: int) -> float:
    """The learning rate at a step by a preset's linear warm-up: from `warmup_init_lr` to `base_lr`, then constant.

    Example:
        >>> hints = get_preset("mlp-cuda").hints
        >>> [f"{warmup_lr(hints, step):.2e}" for step in (0, 100, 200, 5000)]
        ['1.00e-06', '2.55e-05', '5.00e-05', '5.00e-05']
    """
    base, first, steps = (float(hints.get(key, 0.0)) for key in ("base_lr", "warmup_init_lr", "warmup_steps"))
    return base if step >= steps else first + step / steps * (base - first)
