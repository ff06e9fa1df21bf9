"""What a preset is: settings for a guard, hints for a trainer, documented lines, and notes on their source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Band(NamedTuple):
    """What a value from `low` to `high` of one measured quantity means."""

    low: float
    high: float
    meaning: str
    of: str = "global norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named set of settings, and what else its source says that a trainer may use.

    `settings` are what `Config.from_dict` takes. `hints` are plain data for whoever builds optimizer, schedule and
    scaler: a guard does not touch those. `lines` names the documented output lines and every how many steps they come
    (0: once per epoch); `limits` are the fixed thresholds of the warnings among them. `bands` say what a norm means,
    `notes` where the source contradicts itself and what is done about it.
    """

    name: str
    title: str
    source: str
    settings: Mapping[str, Any]
    aliases: tuple[str, ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    bands: tuple[Band, ...] = ()
    notes: tuple[str, ...] = ()
