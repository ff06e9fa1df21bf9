"""All settings in one frozen object, read from keywords, a dict or TOML; a typo is an error with a suggestion."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from trimtab.core.clipping import Clip as Clip
from trimtab.core.clipping import read_clip
from trimtab.core.config_read import (
    Reader,
    boolean,
    choice,
    integer,
    maybe,
    positive,
    read_table,
    severities,
    tables,
    text,
    words,
)
from trimtab.core.errors import ConfigError
from trimtab.core.presets import get_preset, under

MODES = ("observe", "advise", "act", "raise")
KERNELS = ("auto", "triton", "torch")
DEFAULT_DIR = "trimtab_runs"
"""Where records go. It was `runs`, which is TensorBoard's name for its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """How often and how strongly mode `act` acts.

    Args:
        cooldown: Steps between two actions of one kind.
        budget: The most actions in a run.
        quiet: After this many steps without it, trouble counts as new.
        floor: The learning-rate multiplier does not fall below this.
        recover: Steps in which the multiplier grows tenfold.
        effect_after: Steps after which the effect of an action is recorded.
        ring_every: Good steps between two copies of the state in memory, to roll back to; 0: none.
        ring_bytes: The most bytes that all copies take. If three copies do not fit, there are none.
        trial_steps: Steps of each treatment trial after a rollback; 0: no trials. They need `step_fn` and the batches.
        trial_batches: The most batches that are held, by reference, for trials.
    """

    cooldown: int = 20
    budget: int = 20
    quiet: int = 100
    floor: float = 1e-3
    recover: int = 100
    effect_after: int = 20
    ring_every: int = 10
    ring_bytes: int = 256_000_000
    trial_steps: int = 0
    trial_batches: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of a guard. `preset` names defaults that explicit settings override.

    Example:
        >>> from trimtab import Config
        >>> Config.from_dict({"clip": 1.0, "ignore": ["loss-spike"]}).clip.norm
        1.0
        >>> Config.from_dict({"preset": "camoxpert", "mode": "raise"}).clip.norm
        0.5
    """

    preset: str | None = None
    mode: str = "advise"
    clip: Clip = field(default_factory=Clip)
    lag: int | None = None
    reject_nonfinite: bool = True
    reject_above: float | None = None
    select: tuple[str, ...] = ("ALL",)
    ignore: tuple[str, ...] = ()
    severity: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    full_every: int = 50
    stages: bool = False
    activations: bool = False
    trace: bool = True
    kernels: str = "auto"
    record: bool = True
    dir: str = DEFAULT_DIR
    max_record_bytes: int = 1_000_000_000
    checkpoint_every: int = 500
    checkpoint_on_signal: bool = True
    doctor: str | None = None
    policy: PolicyConfig = field(default_factory=PolicyConfig)

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Config:
        """Settings from plain data; an unknown key, an unknown rule or a bad value raises ConfigError."""
        return _checked(cls(**read_table(under(settings), _CONFIG, where="")))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Config:
        """Settings from a TOML file: its `[tool.trimtab]` table, or the whole file if it has none."""
        return cls.from_dict(_toml_table(Path(path), whole=True) or {})

    def with_changes(self, changes: Mapping[str, object]) -> Config:
        """The same settings with some replaced and checked. A new preset gives the defaults of the rest."""
        if changes.get("preset") is None:
            return _checked(replace(self, **read_table(changes, _CONFIG, where="")))
        usual = Config.from_dict({"preset": self.preset}).to_dict()
        mine = {name: value for name, value in self.to_dict().items() if value != usual[name]}
        return Config.from_dict({**mine, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back to an equal Config."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _checked(config: Config) -> Config:
    """The same settings, after a check that the rules they name exist and have such options."""
    if config.rules or config.severity or config.ignore or config.select != ("ALL",):
        # Only then: most settings are read without the rules, and without numpy.
        import_module("trimtab.core.registry").check_options(config)
    return config


def resolve(
    config: Config | Mapping[str, object] | str | os.PathLike[str] | None,
    *,
    preset: str | None = None,
    **keywords: object,
) -> Config:
    """The settings in force: keywords, over `config` (else the environment, over a found file), over the preset.

    The preset is the one given here, else the one that `config` names. Of a Config object the settings that differ from
    the defaults count as given.
    """
    changes = {k: v for k, v in keywords.items() if v is not None}
    named = {} if preset is None else {"preset": preset}
    if isinstance(config, Config):
        return config.with_changes({**named, **changes})
    if isinstance(config, Mapping):
        settings = config
    elif isinstance(config, str | os.PathLike):
        settings = _toml_table(Path(config), whole=True) or {}
    elif config is None:
        settings = {**discover(Path.cwd()), **_environment()}
    else:
        raise ConfigError(
            f"config is a {type(config).__name__}; expected a trimtab.Config, a dict, or the path of a TOML file"
        )
    return Config.from_dict({**settings, **named}).with_changes(changes)


def discover(start: Path) -> Mapping[str, object]:
    """The settings of the nearest `trimtab.toml` or `[tool.trimtab]` at or above `start`, within its repository."""
    for folder in (start, *start.parents):
        for name in ("trimtab.toml", "pyproject.toml"):
            path = folder / name
            if path.is_file():
                table = _toml_table(path, whole=name == "trimtab.toml")
                if table is not None:
                    return table
        if (folder / ".git").exists():
            break
    return {}


def _environment() -> dict[str, str]:
    names = {"TRIMTAB_MODE": "mode", "TRIMTAB_DIR": "dir", "TRIMTAB_PRESET": "preset"}
    return {key: os.environ[name] for name, key in names.items() if os.environ.get(name)}


def _toml_table(path: Path, *, whole: bool) -> Mapping[str, object] | None:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error}; give the path of a TOML file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    table = data.get("tool", {}).get("trimtab") if isinstance(data.get("tool"), dict) else None
    if table is None:
        table = data if whole else None
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"[tool.trimtab] in {path} is {table!r}; expected a table of settings")
    return table


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _policy(value: object, name: str) -> PolicyConfig:
    if isinstance(value, PolicyConfig):
        return value
    read = {
        "cooldown": integer(0),
        "budget": integer(0),
        "quiet": integer(0),
        "floor": positive,
        "recover": integer(1),
        "effect_after": integer(1),
        "ring_every": integer(0),
        "ring_bytes": integer(0),
        "trial_steps": integer(0),
        "trial_batches": integer(2),
    }
    return PolicyConfig(**read_table(value, read, where=name))


def _preset(value: object, name: str) -> str:
    return get_preset(value).name


_CONFIG: Mapping[str, Reader] = {
    "preset": maybe(_preset),
    "mode": choice(MODES),
    "clip": read_clip,
    "lag": maybe(integer(0)),
    "reject_nonfinite": boolean,
    "reject_above": maybe(positive),
    "select": words,
    "ignore": words,
    "severity": severities,
    "rules": tables,
    "full_every": integer(0),
    "stages": boolean,
    "activations": boolean,
    "trace": boolean,
    "kernels": choice(KERNELS),
    "record": boolean,
    "dir": text,
    "max_record_bytes": integer(1),
    "checkpoint_every": integer(0),
    "checkpoint_on_signal": boolean,
    "doctor": maybe(text),
    "policy": _policy,
}
