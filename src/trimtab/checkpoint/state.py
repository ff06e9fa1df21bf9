"""All that training needs to go on exactly: taken from the objects as sections, and put back, all of it or nothing.

Nested states are walked here and not by `torch.utils._pytree`, which is private (torch 2.13 has no public one) and ten
times slower where tensors are named: 90 ms instead of 9 ms for 4,000 tensors, and as fast where they are copied.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, TypedDict, TypeGuard

import torch
from torch import Tensor, nn

from trimtab.checkpoint import rng
from trimtab.checkpoint.format.tensors import identity
from trimtab.checkpoint.loader import ResumableLoader
from trimtab.checkpoint.parts import (
    Model,
    Several,
    Stateful,
    capture_optimizers,
    capture_schedulers,
    copied,
    different,
    joined,
    keep_module,
    keep_optimizers,
    keep_schedulers,
    kind_of,
    listed,
    load_module,
    load_optimizers,
    load_schedulers,
    missing_and_extra,
    module_differences,
    optimizer_differences,
    plain_name,
    refuse,
    scheduler_differences,
    tensors_of,
    whole_model,
)
from trimtab.core.errors import CheckpointError

log = logging.getLogger("trimtab")

LOST = {
    "model": "its weights stay as they are here",
    "optimizer": "its moments and step counts stay as they are here",
    "scheduler": "the learning rate may jump",
    "scaler": "the loss scale stays as it is here",
    "ema": "the average stays as it is here",
    "loader": "the data does not go on where it stopped",
    "guard": "its baselines stay as they are here",
    "extra": "its values stay as they are here",
    "rng": "dropout, shuffling and augmentation draw other numbers than they would have",
}
"""What it means that a part is not loaded."""


class Objects(TypedDict, total=False):
    """What a checkpoint is taken of, and put into."""

    model: Model
    optimizer: Several
    scheduler: Several
    scaler: Stateful | None
    ema: Stateful | None
    loader: object
    guard: Stateful | None
    gradients: bool


class SavedObjects(Objects, total=False):
    """With your own values to save."""

    extra: Mapping[str, object] | None


class LoadedObjects(Objects, total=False):
    """With your own values to replace by the saved ones."""

    extra: MutableMapping[str, Any] | None


def capture(
    *,
    model: Model = None,
    optimizer: Several = None,
    scheduler: Several = None,
    scaler: Stateful | None = None,
    ema: Stateful | None = None,
    loader: object = None,
    guard: Stateful | None = None,
    extra: Mapping[str, object] | None = None,
    gradients: bool = False,
) -> dict[str, Any]:
    """The state of everything given, and of every generator of random numbers, as sections of plain data and tensors.

    The tensors are the live ones: copy them (`to_host`) where training goes on before they are written. `model` is a
    module or a dict of them, `optimizer` and `scheduler` may be lists or dicts; `extra` holds plain data or objects
    with `state_dict`. With `gradients`, a state taken between two micro-batches resumes exactly.

    Example:
        >>> import torch
        >>> from trimtab.checkpoint import state
        >>> model = torch.nn.Linear(2, 1)
        >>> sections = state.to_host(state.capture(model=model, extra={"epoch": 3}))
        >>> sorted(sections), sorted(sections["model"])
        (['extra', 'model', 'rng'], ['bias', 'weight'])
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> state.restore(sections, model=model)
        >>> bool((model.weight == sections["model"]["weight"]).all())
        True
    """
    sections: dict[str, Any] = {}
    model = whole_model(model)
    if guard is not None:
        sections["guard"] = guard.state_dict()  # first: it judges what is still under way
    if model is not None:
        sections["model"] = tensors_of(model)
    if optimizer is not None:
        sections["optimizer"] = capture_optimizers(optimizer, model)
    if scheduler is not None:
        sections["scheduler"] = capture_schedulers(scheduler)
    if scaler is not None:
        sections["scaler"] = scaler.state_dict()
    if ema is not None:
        sections["ema"] = tensors_of(ema) if isinstance(ema, nn.Module) else ema.state_dict()
    if hasattr(loader, "state_dict"):
        sections["loader"] = loader.state_dict()
    elif loader is not None:
        _warn_no_position(_kind(loader))
    if extra is not None:
        sections["extra"] = {name: _state_of(value) for name, value in extra.items()}
    if gradients and model is not None:
        sections["gradients"] = gradients_of(model)
    sections["rng"] = rng.capture()
    return sections


def restore(
    sections: Mapping[str, Any],
    *,
    model: Model = None,
    optimizer: Several = None,
    scheduler: Several = None,
    scaler: Stateful | None = None,
    ema: Stateful | None = None,
    loader: object = None,
    guard: Stateful | None = None,
    extra: MutableMapping[str, object] | None = None,
    gradients: bool = True,
    strict: bool = True,
) -> None:
    """Put a captured state into these objects, or raise a `CheckpointError` that says what differs and change nothing.

    Parameters and buffers stay the same objects; what is loaded shares no memory with `sections`. A part that was saved
    but is not given is logged (info). One that is given but was not saved is an error that names what was;
    with `strict=False` it is warned about and stays as it is. What a guard knows of the run may always be missing.
    Plain values of `extra` are replaced by the saved ones. Random numbers are put back last.
    """
    model = whole_model(model)
    given: dict[str, object] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "ema": ema,
    }
    given |= {"guard": guard, "extra": extra, "loader": loader if hasattr(loader, "load_state_dict") else None}
    optional = ("guard", "scaler") if is_switched_off(scaler) else ("guard",)
    _check_what_is_missing(sections, given, strict, optional)
    if loader is not None and given["loader"] is None and "loader" in sections:
        log.warning("a %s cannot take the place in the data that the checkpoint has: %s", _kind(loader), LOST["loader"])
    parts = list(parts_of(sections, given, model, extra, gradients))
    refuse([line for part in parts for line in _differences(part)])

    before = rng.capture()
    undo: list[tuple[str, Callable[[], object]]] = [("rng", lambda: rng.restore(before))]
    for part in parts:
        try:
            undo.append((part.name, part.keep()))
            part.load()
        except Exception as error:
            stuck = _put_back(undo)
            after = f"and {listed(stuck)} could not be put back as it was" if stuck else "nothing was changed"
            raise CheckpointError(
                f"{part.name} could not be loaded ({type(error).__name__}: {error}); {after}. "
                "Build it as it was when the checkpoint was saved, or leave it out"
            ) from error


def _differences(part: Part) -> list[str]:
    try:
        return part.differences()
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        return [f"{part.name}: what the checkpoint holds makes no sense here ({type(error).__name__}: {error})"]


def _put_back(undo: list[tuple[str, Callable[[], object]]]) -> list[str]:
    """Undo what was done, newest first; the names of the parts that would not go back."""
    stuck = []
    for name, back in reversed(undo):
        try:
            back()
        except Exception as error:  # foreign code that fails again must not keep the others from going back
            log.warning("%s could not be put back (%s: %s)", name, type(error).__name__, error)
            stuck.append(name)
    return stuck


@cache
def _warn_no_position(kind: str) -> None:
    """Once is enough: it is asked with every checkpoint."""
    log.warning(
        "a %s cannot say where it is: checkpoints hold no position in the data; wrap it in ResumableLoader", kind
    )


def _kind(value: object) -> str:
    return type(value).__name__


def _state_of(value: object) -> object:
    """An object's own state, or the plain value itself."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def _check_what_is_missing(
    sections: Mapping[str, object], given: Mapping[str, object], strict: bool, optional: Sequence[str]
) -> None:
    """Compare what was saved with what is asked for.

    A guard learns again what it knew of the run, and a scaler that is switched off has nothing to lose.
    """
    absent = [name for name, one in given.items() if one is not None and name not in sections]
    unused = [name for name, one in given.items() if one is None and name in sections]
    needed = [name for name in absent if name not in optional and (strict or name == "model")]
    if needed:
        held = listed(map(str, sections), 20) or "nothing"
        raise CheckpointError(
            f"the checkpoint has no {' and no '.join(needed)}; it holds {held}. Nothing was changed: leave "
            f"{'them' if len(needed) > 1 else 'it'} out, or resume with strict=False "
            f"({'; '.join(LOST[name] for name in needed)})"
        )
    for name in absent if "rng" in sections else [*absent, "rng"]:
        report = log.info if name in optional else log.warning
        report("%s is not in the checkpoint: %s", name, LOST[name])
    if unused:
        lost = "; ".join(LOST[name] for name in unused)
        log.info("%s: in the checkpoint, and not asked for: %s", listed(unused, len(unused)), lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One section of a checkpoint and the object it goes into."""

    name: str
    differences: Callable[[], list[str]]
    load: Callable[[], object]
    keep: Callable[[], Callable[[], object]]
    """Called before `load`; what it returns undoes it."""


def parts_of(
    sections: Mapping[str, Any],
    given: Mapping[str, Any],
    model: nn.Module | None,
    extra: MutableMapping[str, object] | None,
    with_gradients: bool,
) -> Iterator[Part]:
    """The parts that are both given and saved, in the order of loading.

    What runs foreign code comes first and can be undone; tensors whose shapes were checked are copied after it.
    """
    there = {name: one for name, one in given.items() if one is not None and name in sections}
    if extra is not None and "extra" in sections:
        yield extra_part(extra, sections["extra"])
    if "scaler" in there and _scaler_fits(there["scaler"], sections["scaler"]):
        yield plain_part("scaler", there["scaler"], sections["scaler"])
    if "scheduler" in there:
        scheduler, saved = there["scheduler"], sections["scheduler"]
        yield Part(
            name="scheduler",
            differences=partial(scheduler_differences, scheduler, saved),
            load=partial(load_schedulers, scheduler, saved),
            keep=partial(keep_schedulers, scheduler),
        )
    for name in ("guard", "loader"):
        if name in there:
            yield plain_part(name, there[name], sections[name])
    if "optimizer" in there:
        optimizer, saved = there["optimizer"], sections["optimizer"]
        yield Part(
            name="optimizer",
            differences=partial(optimizer_differences, optimizer, saved, model),
            load=partial(load_optimizers, optimizer, saved),
            keep=partial(keep_optimizers, optimizer),
        )
    if "ema" in there:
        averaged = isinstance(there["ema"], nn.Module)
        yield (module_part if averaged else plain_part)("ema", there["ema"], sections["ema"])
    if "model" in there:
        yield module_part("model", there["model"], sections["model"])
        if with_gradients and "gradients" in sections:
            yield gradient_part(there["model"], sections["gradients"])
    if "rng" in sections:
        yield rng_part(sections["rng"])


def plain_part(name: str, one: Stateful, saved: dict[str, Any]) -> Part:
    """Anything with `state_dict` and `load_state_dict`; one that has `differences` is asked for them first."""

    def keep() -> Callable[[], object]:
        if isinstance(one, ResumableLoader):
            return one.keep()
        before = copied(one.state_dict())
        return lambda: one.load_state_dict(before)

    def differences() -> list[str]:
        ask = getattr(one, "differences", None)
        if not hasattr(one, "load_state_dict"):
            return [f"{name}: it is a {type(one).__name__}, which has no load_state_dict"]
        return list(ask(saved)) if callable(ask) else []

    return Part(name=name, differences=differences, load=lambda: one.load_state_dict(copied(saved)), keep=keep)


def module_part(name: str, module: nn.Module, saved: Mapping[str, object]) -> Part:
    """A model, or the average of one."""
    return Part(
        name=name,
        differences=partial(module_differences, name, module, saved),
        load=partial(load_module, name, module, saved),
        keep=partial(keep_module, module),
    )


def gradient_part(model: nn.Module, saved: Mapping[str, Tensor]) -> Part:
    """Gradients accumulated so far."""

    def keep() -> Callable[[], None]:
        before = copied(gradients_of(model))
        return lambda: load(model, before)

    return Part(
        name="gradients",
        differences=lambda: differences(model, saved),
        load=lambda: load(model, saved),
        keep=keep,
    )


def rng_part(saved: rng.RngState) -> Part:
    """The generators of random numbers."""

    def differences() -> list[str]:
        try:
            rng.check(saved)
        except CheckpointError as error:
            return [f"rng: {error}"]
        return []

    return Part(name="rng", differences=differences, load=lambda: rng.restore(saved), keep=lambda: lambda: None)


def _is_stateful(value: object) -> TypeGuard[Stateful]:
    return hasattr(value, "load_state_dict")


def extra_part(extra: MutableMapping[str, object], saved: Mapping[str, object]) -> Part:
    """The user's own: objects are loaded, plain values replaced; names that were never saved stay as they are."""
    known = [name for name in extra if name in saved]
    objects = {name: one for name in known if _is_stateful(one := extra[name])}

    def load() -> None:
        for name in known:
            if name in objects:
                objects[name].load_state_dict(copied(saved[name]))
            else:
                extra[name] = copied(saved[name])

    def keep() -> Callable[[], None]:
        values, states = dict(extra), {name: copied(one.state_dict()) for name, one in objects.items()}

        def put_back() -> None:
            extra.update(values)
            for name, state in states.items():
                objects[name].load_state_dict(state)

        return put_back

    for line in missing_and_extra("extra", extra, known, "entries"):
        log.warning("%s; they stay as they are", line)
    return Part(name="extra", differences=list, load=load, keep=keep)


def is_switched_off(scaler: object) -> bool:
    """Whether it is a GradScaler that does nothing, and has no state."""
    return hasattr(scaler, "is_enabled") and not scaler.is_enabled()


def _scaler_fits(scaler: object, saved: Mapping[str, object]) -> bool:
    """A scaler that is switched off has no state, and one that is on refuses an empty one."""
    enabled = not is_switched_off(scaler)
    if enabled != bool(saved):
        now, then = ("on", "off") if enabled else ("off", "on")
        log.warning("scaler: it was %s when the checkpoint was saved and is %s now; its state is not loaded", then, now)
    return enabled and bool(saved)


_Key = tuple[object, ...]
_Tensors = dict[_Key, Tensor]
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


@torch.no_grad()
def to_host(sections: Mapping[str, object], into: Mapping[str, object] | None = None) -> dict[str, Any]:
    """A deep copy of `sections` on the CPU, in one pass; tensors that are one stay one.

    `into` is an earlier copy that is no longer needed: its memory is used again where it fits, because fresh memory
    costs more than the copying.
    """
    made = _Made(seen={}, spare={} if into is None else _by_path(into, ()), sources=[], targets=[])
    copied = {name: _copied(value, (name,), made) for name, value in sections.items()}
    if any(source.is_cuda for source in made.sources):
        for target, source in zip(made.targets, made.sources, strict=True):
            target.copy_(source, non_blocking=True)
    elif made.sources:
        torch._foreach_copy_(made.targets, made.sources)  # training waits: one call instead of hundreds
    for device in {source.device for source in made.sources if source.is_cuda}:
        torch.cuda.synchronize(device)  # copies to the host were only queued
    return copied


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What was found on the way: tensors met before, memory to be used again, and what is to be copied where."""

    seen: _Tensors
    spare: _Tensors
    sources: list[Tensor]
    targets: list[Tensor]


def _copied(value: Any, path: _Key, made: _Made) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _copied_tensor(value.detach(), path, made)
    if isinstance(value, dict):
        whole = copy.copy(value)  # an OrderedDict or defaultdict keeps its kind
        whole.update((key, _copied(one, (*path, key), made)) for key, one in value.items())
        return whole
    if kind in (list, tuple):
        return kind(_copied(one, (*path, index), made) for index, one in enumerate(value))
    return copy.deepcopy(value)


def _copied_tensor(tensor: Tensor, path: _Key, made: _Made) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.to("cpu", copy=True)
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if key in made.seen and tensor.numel():
        return made.seen[key]
    old = made.spare.get(path)
    pinned = tensor.is_cuda
    if old is not None and old.dtype is tensor.dtype and old.shape == tensor.shape and old.is_pinned() == pinned:
        target = old
    else:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    made.sources.append(tensor)
    made.targets.append(target)
    made.seen[key] = target
    return target


def _by_path(value: object, path: _Key) -> _Tensors:
    """Tensors by where they are; one that is found at two places counts once, or it would be overwritten."""
    found: _Tensors = {}
    taken: set[int] = set()
    waiting: list[tuple[_Key, object]] = [(path, value)]
    while waiting:
        at, one = waiting.pop()
        if isinstance(one, Tensor):
            if one.layout is torch.strided and one.device.type == "cpu" and id(one) not in taken:
                taken.add(id(one))
                found[at] = one
        elif isinstance(one, Mapping):
            waiting.extend(((*at, key), inner) for key, inner in one.items())
        elif type(one) is list or type(one) is tuple:
            waiting.extend(((*at, index), inner) for index, inner in enumerate(one))
    return found


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients there are, by the plain name of their parameter; a tied parameter counts once."""
    return {
        plain_name(model, name): parameter.grad.detach()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def differences(model: nn.Module, saved: Mapping[str, Tensor]) -> list[str]:
    """Why these gradients do not belong to this model."""
    here = {plain_name(model, name): parameter for name, parameter in model.named_parameters()}
    lines = missing_and_extra("gradients", (), (name for name in saved if name not in here), "gradients")
    for name, gradient in saved.items():
        if name in here and gradient.shape != here[name].shape:
            lines.append(different("gradients", name, kind_of(here[name]), kind_of(gradient)))
    return lines


@torch.no_grad()
def load(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give every parameter the gradient it had, and none where it had none."""
    for name, parameter in model.named_parameters():
        gradient = saved.get(plain_name(model, name))
        if gradient is None:
            parameter.grad = None
        elif parameter.grad is not None and _alike(parameter.grad, gradient):
            parameter.grad.copy_(gradient)  # the same object: a flat gradient buffer keeps its views
        else:
            parameter.grad = gradient.detach().to(parameter.device, copy=True)


def _alike(one: Tensor, other: Tensor) -> bool:
    return kind_of(one) == kind_of(other) and one.layout is other.layout is torch.strided


def as_plain(value: object) -> Any:
    """Turn dataclasses, namespaces, named tuples, enums and paths into dicts and plain values, however deep.

    Everything else stays as it is; what cannot be stored is refused when it is written, with its path.

    Example:
        >>> as_plain(SimpleNamespace(lr=0.1, out=PurePath("runs/a"), betas=(0.9, 0.99)))
        {'lr': 0.1, 'out': 'runs/a', 'betas': (0.9, 0.99)}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return {name: as_plain(one) for name, one in vars(value).items()}
    if isinstance(value, Mapping):
        return {as_plain(name): as_plain(one) for name, one in value.items()}
    if isinstance(value, Enum):
        return as_plain(value.value)
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_plain(value._asdict())
    if type(value) is list or type(value) is tuple:
        return type(value)(as_plain(one) for one in value)
    return value


WATCHED = ("model", "optimizer", "ema")
"""Sections that must be finite. Gradients need not be: a loss scaler makes them infinite now and then."""


@torch.no_grad()
def nonfinite(sections: Mapping[str, object], *, allowed: Collection[str] = ()) -> tuple[str, ...]:
    """The names of the tensors in model, optimizer and average that hold a NaN or an Inf, in their order.

    `allowed` are names that may, such as a mask of -inf that was one from the beginning. One pass over the tensors and
    one wait per device; what looks wrong (a norm may overflow) is then looked at value by value.

    Example:
        >>> sections = {"model": {"good": torch.ones(2), "bad": torch.tensor([1.0, float("nan")])}}
        >>> nonfinite(sections)
        ('model.bad',)
        >>> nonfinite(sections, allowed={"model.bad"})
        ()
    """
    names: dict[Hashable, list[str]] = {}  # weights that layers share are looked at once
    asked: dict[Hashable, Tensor] = {}
    for name, tensor in named(sections):
        if name not in allowed:
            for dense in _values(tensor):
                names.setdefault(identity(tensor), []).append(name)
                asked.setdefault(identity(tensor), dense)
    known, tensors = list(asked), list(asked.values())
    suspects: set[int] = set()
    for places in _by_device(tensors).values():
        norms = torch.stack(_norms([tensors[place] for place in places]))
        finite = torch.isfinite(norms).tolist()
        suspects.update(place for place, fine in zip(places, finite, strict=True) if not fine)
    bad = {known[place] for place in suspects if not bool(torch.isfinite(tensors[place]).all())}
    bad_names = {name for one in bad for name in names[one]}
    return tuple(dict.fromkeys(name for name, _ in named(sections) if name in bad_names)) if bad_names else ()


def named(sections: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the watched sections by a name that a reader knows: `optimizer.exp_avg.layer.weight`."""
    for section in WATCHED:
        state = sections.get(section)
        yield from (
            _named_moments(state) if section == "optimizer" and isinstance(state, Mapping) else _walk(section, state)
        )


def _named_moments(optimizers: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    for label, entry in optimizers.items():
        prefix = "optimizer" if len(optimizers) == 1 else joined("optimizer", label)
        state = entry.get("state") if isinstance(entry, Mapping) else entry
        if not isinstance(entry, Mapping) or not isinstance(state, Mapping) or "param_groups" not in state:
            yield from _walk(prefix, state)
            continue
        names = _parameter_names(entry, state)
        for index, moments in state.get("state", {}).items():
            for key, value in moments.items() if isinstance(moments, Mapping) else ():
                name = names.get(index) or index
                yield from ((joined(joined(prefix, path), name), one) for path, one in _walk(str(key), value))
        yield from _walk(f"{prefix}.param_groups", state["param_groups"])


def _parameter_names(entry: Mapping[str, Any], state: Mapping[str, Any]) -> dict[object, str]:
    names: dict[object, str] = {}
    for group, names_here in zip(state["param_groups"], entry.get("names", ()), strict=False):
        names.update(zip(group["params"], names_here, strict=False))
    return names


def _walk(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _walk(joined(path, key), one)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _walk(joined(path, index), one)


def _values(tensor: Tensor) -> Iterator[Tensor]:
    """The numbers of a tensor as one that norms can be taken of; none where there is nothing that can be bad."""
    tensor = tensor.detach()
    if tensor.is_meta or tensor.is_quantized or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:  # 8-bit floats know no arithmetic
        tensor = tensor.float()
    if tensor.numel():
        yield tensor


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Their L2 norms in at least float32, which any NaN or Inf makes non-finite."""
    norms: list[Tensor] = [tensors[0].new_empty(())] * len(tensors)
    kinds: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault(tensor.dtype, []).append(place)
    for dtype, places in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        found = torch._foreach_norm([tensors[place] for place in places], 2, dtype=wide)
        for place, norm in zip(places, found, strict=True):
            norms[place] = norm.double() if norm.device.type != "mps" else norm.float()
    return norms


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[int]]:
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    return places


def cleaned(sections: Mapping[str, object], masks: Collection[str] = ()) -> dict[str, Any]:
    """A copy of the sections without a non-finite value, but for masks: without its -inf one masks nothing.

    The live state is left alone.
    """
    fresh = to_host(sections)
    for name, value in fresh.items():
        for _, tensor in _walk(name, value):
            if tensor.is_floating_point() or tensor.is_complex():
                torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
    for name in masks:
        section, _, key = name.partition(".")
        saved = sections.get(section)
        if isinstance(saved, Mapping) and key in saved:
            fresh[section][key] = to_host({"mask": saved[key]})["mask"]
    return fresh
