"""A user's own training as `module:function`: found, imported, called once, and checked before anything is done."""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from trimtab.core.errors import InputError
from trimtab.guard import attach

log = logging.getLogger("trimtab")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Everything one training consists of.

    There is `loss_fn(output, target)` or `step_fn(model, batch) -> loss`; where there are both, `step_fn` is used.
    `optimizer` may be a list or dict, as for a guard.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> target = check_target({
        ...     "model": model,
        ...     "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        ...     "loader": [(torch.ones(4, 2), torch.ones(4, 1))],
        ...     "loss_fn": torch.nn.functional.mse_loss,
        ... })
        >>> target.model is model
        True
    """

    model: nn.Module
    optimizer: Any
    loader: Iterable[Any]
    loss_fn: Callable[[Any, Any], Any] | None = None
    step_fn: Callable[[nn.Module, Any], Any] | None = None
    scaler: Any = None
    scheduler: Any = None
    val_loader: Iterable[Any] | None = None
    ema: Any = None

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Every optimizer, without what may be wrapped around it."""
        return tuple(attach.labelled(self.optimizer).values())


KEYS = tuple(f.name for f in fields(Target))
REQUIRED = ("model", "optimizer", "loader")
CONTRACT = (
    'expected {"model": …, "optimizer": …, "loader": …} and either "loss_fn": (output, target) -> loss '
    'or "step_fn": (model, batch) -> loss'
)


def load_target(spec: str, *, lenient: bool = False) -> Target:
    """Find, import and call `module:function` or `path/to/file.py:function`, and check what it returns.

    The current directory can be imported from. Every mistake is an InputError that says what to do about it. `lenient`
    lets an optimizer pass that has nothing to do with the model: to find that out is the caller's business.
    """
    where, colon, name = spec.rpartition(":")
    if not (colon and where and name.isidentifier()):
        raise InputError(
            f"the target {spec!r} names no function; expected module:function or path/to/file.py:function, "
            "for example train:build"
        )
    return check_target(_call(_function(_module(where, name), name, where), spec), spec, lenient=lenient)


def check_target(given: Any, spec: str = "the target", *, lenient: bool = False) -> Target:
    """A Target from the dict that a target function returned; InputError where something is missing or of no use."""
    if isinstance(given, Target):
        return given
    if not isinstance(given, Mapping):
        raise InputError(f"{spec} returned {_kind(given)}; {CONTRACT}")
    _check_keys(given, spec)
    found = {key: given[key] for key in KEYS if given.get(key) is not None}
    _check_types(found, spec, lenient=lenient)
    return Target(**found)


def _module(where: str, name: str) -> ModuleType:
    looks_like_path = where.endswith(".py") or "/" in where or "\\" in where
    # It stays importable: a target may import its own parts only when it is called.
    folder = str(Path(where).resolve().parent if looks_like_path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _from_file(Path(where)) if looks_like_path else import_module(where)
    except InputError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise InputError(
                f"there is no module {error.name!r} (looked for {where}:{name} from {Path.cwd()}); run from the "
                f"directory that holds it, or name the file: path/to/file.py:{name}"
            ) from None
        raise InputError(f"importing {where} failed: {_told(error)}; install it or mend the import") from error
    except Exception as error:
        raise InputError(f"importing {where} failed: {_told(error)}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path} (looked in {Path.cwd()}); expected a Python file")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; expected one that ends in .py")
    module = module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # workers of a loader find its classes by this name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem)
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module


def _function(module: ModuleType, name: str, where: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if function is None:
        mine = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        near = get_close_matches(name, mine, 1)
        has = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(mine)[:8]) or 'no function'}"
        raise InputError(f"{where} has no function {name!r}; {has}")
    if not callable(function):
        raise InputError(f"{where}:{name} is {_kind(function)}; expected a function that returns a dict")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"{where}:{name} cannot be called without arguments ({error}); give them defaults, or wrap it in a function"
        ) from None
    except ValueError:
        log.debug("%s:%s has no signature to look at", where, name)
    return function  # type: ignore[no-any-return]


def _call(function: Callable[[], Any], spec: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise InputError(f"{spec} raised {_told(error)}") from error


def _check_keys(given: Mapping[str, Any], spec: str) -> None:
    there = {str(key) for key, value in given.items() if value is not None}
    unknown = sorted(there - set(KEYS))
    missing = [key for key in REQUIRED if key not in there]
    if not there & {"loss_fn", "step_fn"}:
        missing.append("loss_fn or step_fn")
    if missing:
        raise InputError(f"{spec} returned a dict without {', '.join(missing)} (it has {_listed(there)}); {CONTRACT}")
    for key in unknown:
        if near := get_close_matches(key, KEYS, 1, cutoff=0.75):
            raise InputError(f"{spec} returned the key {key!r}; did you mean {near[0]!r}? Known: {', '.join(KEYS)}")
    if unknown:
        log.info("%s: not used: %s", spec, ", ".join(unknown))


def _check_types(found: Mapping[str, Any], spec: str, *, lenient: bool) -> None:
    for key in ("loss_fn", "step_fn"):
        if key in found and not callable(found[key]):
            raise InputError(f"{spec}: {key} is {_kind(found[key])}; expected something that can be called")
    for key in ("loader", "val_loader"):
        if key in found and not hasattr(found[key], "__iter__"):
            raise InputError(f"{spec}: {key} is {_kind(found[key])}; expected something to iterate over in batches")
    try:
        attach.check_model(found["model"])
        for label, one in attach.labelled(found["optimizer"]).items():
            if not hasattr(one, "param_groups") or not hasattr(one, "step"):
                raise InputError(f"optimizer is {_kind(one)}; expected a torch.optim.Optimizer")
            if not lenient:
                attach.check_optimizer(one, found["model"], label)
    except InputError as error:
        raise InputError(f"{spec}: {error}") from None


def _told(error: BaseException) -> str:
    """An error of the user's own code in one line, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next((f for f in reversed(frames) if "importlib" not in f.filename), None)
    place = f" ({Path(at.filename).name}, line {at.lineno})" if at is not None else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
