"""A user's own training: found as `module:function`, checked before anything runs, and the loop of its steps."""

from __future__ import annotations

import inspect
import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, SupportsFloat

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import did_you_mean, nearest_name
from trimtab.doctor.batch_tensors import TARGET_KEYS, mapped, num_samples
from trimtab.sample.rows import check_model
from trimtab.sample.transfer import to_device
from trimtab.torchutil.optimizers import check_optimizer, labelled

log = logging.getLogger("trimtab")


class Scheduler(Protocol):
    """What is asked of a learning rate schedule."""

    def step(self) -> object:
        """Go on to the next learning rate."""
        ...


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
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
    loader: Iterable[object]
    loss_fn: Callable[[Any, Any], object] | None = None
    step_fn: Callable[[nn.Module, Any], object] | None = None
    scaler: GradScaler | None = None
    scheduler: Scheduler | None = None
    val_loader: Iterable[object] | None = None
    ema: object = None

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Every optimizer, without what may be wrapped around it."""
        return tuple(labelled(self.optimizer).values())


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
    return check_target(_call(find_function(spec), spec), spec, lenient=lenient)


def find_function(spec: str, what: str = "the target") -> Callable[..., object]:
    """The function that `module:function` or `path/to/file.py:function` names; InputError if there is none."""
    where, colon, name = spec.rpartition(":")
    if not (colon and where and name.isidentifier()):
        raise InputError(
            f"{what} {spec!r} names no function; expected module:function or path/to/file.py:function, "
            "for example train:build"
        )
    return _function(_module(where, name), name, where)


def check_target(given: object, spec: str = "the target", *, lenient: bool = False) -> Target:
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
        raise InputError(f"importing {where} failed: {_error_line(error)}; install it or fix the import") from error
    except Exception as error:
        raise InputError(f"importing {where} failed: {_error_line(error)}") from error


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


def _function(module: ModuleType, name: str, where: str) -> Callable[..., object]:
    function: Callable[..., object] | None = getattr(module, name, None)
    if function is None:
        mine = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        has = did_you_mean(name, mine, otherwise=f"it has {', '.join(sorted(mine)[:8]) or 'no function'}")
        raise InputError(f"{where} has no function {name!r}; {has}")
    if not callable(function):
        raise InputError(f"{where}:{name} is {_kind(function)}; expected a function")
    return function


def _call(function: Callable[..., object], spec: str) -> object:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"{spec} cannot be called without arguments ({error}); give them defaults, or wrap it in a function"
        ) from None
    except ValueError:
        log.debug("%s has no signature to look at", spec)
    try:
        return function()
    except Exception as error:
        raise InputError(f"{spec} raised {_error_line(error)}") from error


def _check_keys(given: Mapping[object, object], spec: str) -> None:
    there = {str(key) for key, value in given.items() if value is not None}
    unknown = sorted(there - set(KEYS))
    missing = [key for key in REQUIRED if key not in there]
    if not there & {"loss_fn", "step_fn"}:
        missing.append("loss_fn or step_fn")
    if missing:
        raise InputError(f"{spec} returned a dict without {', '.join(missing)} (it has {_listed(there)}); {CONTRACT}")
    for key in unknown:
        if near := nearest_name(key, KEYS, cutoff=0.75):
            raise InputError(f"{spec} returned the key {key!r}; did you mean {near!r}? Known: {', '.join(KEYS)}")
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
        check_model(found["model"])
        for label, one in labelled(found["optimizer"]).items():
            if not hasattr(one, "param_groups") or not hasattr(one, "step"):
                raise InputError(f"optimizer is {_kind(one)}; expected a torch.optim.Optimizer")
            if not lenient:
                check_optimizer(one, found["model"], label)
    except InputError as error:
        raise InputError(f"{spec}: {error}") from None


def _error_line(error: BaseException) -> str:
    """An error of the user's own code in one line, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next((f for f in reversed(frames) if "importlib" not in f.filename), None)
    place = f" ({Path(at.filename).name}, line {at.lineno})" if at is not None else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def run_steps(target: Target, num: int, *, on_step: Callable[[int, float], bool | None] | None = None) -> list[float]:
    """Train `num` steps and return their losses; the run ends early where `on_step(step, loss)` returns False.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> target = Target(
        ...     model=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     loader=[(torch.ones(4, 2), torch.ones(4, 1))],
        ...     loss_fn=torch.nn.functional.mse_loss,
        ... )
        >>> first, *_, last = run_steps(target, 5)
        >>> last < first
        True
    """
    losses: list[float] = []
    batches = endless(target)
    for step in range(num):
        loss = compute_loss(target, next(batches))
        take_step(target, loss)
        if target.scheduler is not None and hasattr(target.scheduler, "step"):
            target.scheduler.step()
        losses.append(float(loss.detach()))
        if on_step is not None and on_step(step, losses[-1]) is False:
            break
    return losses


def endless(target: Target) -> Iterator[object]:
    """Batches of the loader, from the beginning again whenever it ends."""
    while True:
        num = 0
        for batch in target.loader:
            num += 1
            yield batch
        if num == 0:
            raise InputError(
                "the loader gave no batch; expected at least one. A generator can be read only once: "
                "return a list, a DataLoader, or another thing that can be iterated over again"
            )


def raw_loss(target: Target, batch: object) -> object:
    """Whatever `step_fn`, or model and `loss_fn`, make of a batch, in the mode the model is in."""
    if target.step_fn is not None:
        return target.step_fn(target.model, batch)
    assert target.loss_fn is not None
    inputs, named, wanted = split(_beside_model(batch, target.model), target.model)
    return target.loss_fn(target.model(*inputs, **named), wanted)


def compute_loss(target: Target, batch: object) -> Tensor:
    """The loss of one batch, in training mode, as `step_fn` or model and `loss_fn` give it."""
    target.model.train()
    loss = raw_loss(target, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        who = "step_fn" if target.step_fn is not None else "loss_fn"
        raise InputError(f"{who} returned {shape}; expected a tensor of one number, for example loss.mean()")
    return loss


def backward(loss: Any) -> None:
    """Run the backward pass of whatever a step gave as its loss."""
    loss.backward()


def take_step(target: Target, loss: Tensor) -> None:
    """Backward pass and one step of every optimizer, through the scaler where there is one."""
    for one in target.optimizers:
        one.zero_grad()
    if target.scaler is None:
        backward(loss)
        for one in target.optimizers:
            one.step()
        return
    backward(target.scaler.scale(loss))
    for one in target.optimizers:
        target.scaler.step(one)
    target.scaler.update()


def validation_loss(target: Target) -> float:
    """The mean loss over `val_loader` in evaluation mode; NaN where there is none."""
    if target.val_loader is None:
        return math.nan
    losses = []
    target.model.eval()
    with torch.no_grad():
        for batch in target.val_loader:
            loss = raw_loss(target, batch)
            if not isinstance(loss, SupportsFloat):
                raise InputError(f"the loss of a validation batch is {_kind(loss)}; expected one number")
            losses.append(float(loss))
    target.model.train()
    return sum(losses) / len(losses) if losses else math.nan


def split(batch: object, model: nn.Module) -> tuple[tuple[object, ...], dict[str, object], object]:
    """What goes into the model, by place and by name, and what the loss compares its output with."""
    if isinstance(batch, Mapping):
        key = next((k for k in TARGET_KEYS if k in batch), None)
        if key is None:
            raise InputError(
                f"a batch is a dict of {', '.join(map(str, batch)) or 'nothing'} and none of {', '.join(TARGET_KEYS)} "
                "is in it; name the target so, or give step_fn(model, batch) instead of loss_fn"
            )
        rest = {str(k): v for k, v in batch.items() if k != key}
        known = inspect.signature(model.forward).parameters
        if len(rest) == 1 and next(iter(rest)) not in known:
            return tuple(rest.values()), {}, batch[key]
        return (), rest, batch[key]
    if isinstance(batch, list | tuple):
        if len(batch) < 2:
            raise InputError(
                f"a batch is a {type(batch).__name__} of {len(batch)}; expected (input, target), or give "
                "step_fn(model, batch) instead of loss_fn"
            )
        return tuple(batch[:-1]), {}, batch[-1]
    return (batch,), {}, batch  # it is its own target: an autoencoder


def _beside_model(batch: object, model: nn.Module) -> object:
    """The batch where the model is; what is there already is not touched."""
    device = next(model.parameters()).device
    return to_device(batch, device)


def _head(size: int, num: int | None, path: str, tensor: Tensor) -> Tensor:
    return tensor[:size] if tensor.dim() and tensor.shape[0] == num else tensor


def smaller(target: Target, size: int) -> Target:
    """The same training with smaller batches: from a loader with that batch size, else the first samples of each."""
    loader = target.loader
    if isinstance(loader, DataLoader) and loader.batch_size is not None:
        shuffled = isinstance(loader.sampler, RandomSampler)
        made = DataLoader(loader.dataset, size, shuffle=shuffled, collate_fn=loader.collate_fn)
        return replace(target, loader=made)

    class Sliced:
        def __iter__(self) -> Iterator[object]:
            for batch in loader:
                yield mapped(batch, partial(_head, size, num_samples(batch)))

    return replace(target, loader=Sliced())
