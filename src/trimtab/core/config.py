"""All settings in one frozen object, read from keywords, a dict or TOML; a typo is an error with a suggestion."""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.core.errors import ConfigError
from trimtab.core.types import Severity

MODES = ("observe", "advise", "act", "raise")
KERNELS = ("auto", "triton", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What to clip: the global norm, each value, or the norm of each parameter group on its own.

    `norm` is the largest allowed L2 norm of all gradients together; with `per_group=True` of each parameter group.
    A group that carries its own `max_norm` entry uses that. `value` bounds every single element.
    """

    norm: float | None = None
    value: float | None = None
    per_group: bool = False

    def __bool__(self) -> bool:
        return self.norm is not None or self.value is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """How eagerly mode `act` acts: steps between two LR cuts, cuts per run, floor and recovery of the multiplier."""

    cooldown: int = 20
    budget: int = 20
    quiet: int = 100
    floor: float = 1e-3
    recover: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of a guard.

    Example:
        >>> from trimtab import Config
        >>> Config.from_dict({"clip": 1.0, "ignore": ["loss-spike"]}).clip
        Clip(norm=1.0, value=None, per_group=False)
    """

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
    kernels: str = "auto"
    record: bool = True
    dir: str = "runs"
    max_record_bytes: int = 1_000_000_000
    policy: PolicyConfig = field(default_factory=PolicyConfig)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """Settings from plain data; an unknown key or a bad value raises ConfigError."""
        return cls(**_read(settings, _CONFIG, where=""))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Config:
        """Settings from a TOML file: its `[tool.trimtab]` table, or the whole file where there is none."""
        return cls.from_dict(_toml_table(Path(path), whole=True) or {})

    def with_changes(self, changes: Mapping[str, Any]) -> Config:
        """The same settings with some replaced, checked like any others."""
        return replace(self, **_read(changes, _CONFIG, where=""))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back to an equal Config."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def resolve(config: Config | Mapping[str, Any] | str | os.PathLike[str] | None, **keywords: Any) -> Config:
    """The settings in force: keywords, over `config` (else the environment, over a found file), over defaults."""
    if isinstance(config, Config):
        base = config
    elif isinstance(config, Mapping):
        base = Config.from_dict(config)
    elif isinstance(config, str | os.PathLike):
        base = Config.from_toml(config)
    elif config is None:
        base = Config.from_dict({**discover(Path.cwd()), **_environment()})
    else:
        raise ConfigError(
            f"config is a {type(config).__name__}; expected a trimtab.Config, a dict, or the path of a TOML file"
        )
    return base.with_changes({k: v for k, v in keywords.items() if v is not None})


def discover(start: Path) -> Mapping[str, Any]:
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


def _environment() -> dict[str, Any]:
    names = {"TRIMTAB_MODE": "mode", "TRIMTAB_DIR": "dir"}
    return {key: os.environ[name] for name, key in names.items() if os.environ.get(name)}


def _toml_table(path: Path, *, whole: bool) -> Mapping[str, Any] | None:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    table = data.get("tool", {}).get("trimtab") if isinstance(data.get("tool"), dict) else None
    if table is None:
        table = data if whole else None
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"[tool.trimtab] in {path} is {table!r}; expected a table of settings")
    return table


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


# How each setting is read. A reader takes (value, name) and returns the checked value or raises ConfigError.
Reader = Callable[[Any, str], Any]


def _read(settings: Mapping[str, Any], readers: Mapping[str, Reader], *, where: str) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where or 'the settings'} is {settings!r}; expected a table of settings")
    out = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        label = f"{where}.{key}" if where else str(key)
        if name not in readers:
            close = difflib.get_close_matches(name, readers, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(readers))}."
            raise ConfigError(f"unknown setting {label!r}; {hint}")
        out[name] = readers[name](value, label)
    return out


def _bad(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{name} = {value!r}; expected {expected}")


def _bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, value, "true or false")
    return value


def _int(low: int) -> Reader:
    def read(value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise _bad(name, value, f"a whole number of at least {low}")
        return value

    return read


def _positive(value: Any, name: str) -> float:
    # `not value > 0` also catches NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isinf(value):
        raise _bad(name, value, "a finite number above 0")
    return float(value)


def _maybe(read: Reader) -> Reader:
    return lambda value, name: None if value is None else read(value, name)


def _choice(choices: tuple[str, ...]) -> Reader:
    def read(value: Any, name: str) -> str:
        if value not in choices:
            close = difflib.get_close_matches(str(value), choices, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise _bad(name, value, f"one of {', '.join(choices)}{hint}")
        return str(value)

    return read


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str | os.PathLike):
        raise _bad(name, value, "a text")
    return str(value)


def _words(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [w for w in value.replace(",", " ").split() if w]
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(w, str) for w in value):
        raise _bad(name, value, "a list of rule codes or names")
    return tuple(value)


def _severities(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise _bad(name, value, 'a table such as {"GRAD002" = "warn"}')
    try:
        return {str(k): Severity.parse(v).name.lower() for k, v in value.items()}
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _tables(value: Any, name: str) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
        raise _bad(name, value, 'a table of tables such as {"exploding-gradient" = {ratio = 20}}')
    return {str(k): dict(v) for k, v in value.items()}


def _clip(value: Any, name: str) -> Clip:
    if value is None or isinstance(value, Clip):
        return value or Clip()
    if isinstance(value, Mapping):
        read = {"norm": _maybe(_positive), "value": _maybe(_positive), "per_group": _bool}
        return Clip(**_read(value, read, where=name))
    return Clip(norm=_positive(value, name))


def _policy(value: Any, name: str) -> PolicyConfig:
    if isinstance(value, PolicyConfig):
        return value
    read = {"cooldown": _int(0), "budget": _int(0), "quiet": _int(0), "floor": _positive, "recover": _int(1)}
    return PolicyConfig(**_read(value, read, where=name))


_CONFIG: Mapping[str, Reader] = {
    "mode": _choice(MODES),
    "clip": _clip,
    "lag": _maybe(_int(0)),
    "reject_nonfinite": _bool,
    "reject_above": _maybe(_positive),
    "select": _words,
    "ignore": _words,
    "severity": _severities,
    "rules": _tables,
    "full_every": _int(0),
    "kernels": _choice(KERNELS),
    "record": _bool,
    "dir": _text,
    "max_record_bytes": _int(1),
    "policy": _policy,
}
