"""What can be put back, part by part: how each is compared, loaded, and put back as it was if a later one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from trimtab.core.errors import CheckpointError
from trimtab.recover import gradients, modules, optimizers, rng, schedulers
from trimtab.recover.compare import copied, missing_and_extra
from trimtab.recover.loader import ResumableLoader

log = logging.getLogger("trimtab")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One section of a checkpoint and the object it goes into."""

    name: str
    differences: Callable[[], list[str]]
    load: Callable[[], None]
    keep: Callable[[], Callable[[], None]]
    """Called before `load`; what it returns undoes it."""


def parts_of(
    sections: Mapping[str, Any],
    given: Mapping[str, Any],
    model: nn.Module | None,
    extra: MutableMapping[str, Any] | None,
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
        yield scheduler_part(there["scheduler"], sections["scheduler"])
    for name in ("guard", "loader"):
        if name in there:
            yield plain_part(name, there[name], sections[name])
    if "optimizer" in there:
        yield optimizer_part(there["optimizer"], sections["optimizer"], model)
    if "ema" in there:
        averaged = isinstance(there["ema"], nn.Module)
        yield (module_part if averaged else plain_part)("ema", there["ema"], sections["ema"])
    if "model" in there:
        yield module_part("model", there["model"], sections["model"])
        if with_gradients and "gradients" in sections:
            yield gradient_part(there["model"], sections["gradients"])
    if "rng" in sections:
        yield rng_part(sections["rng"])


def plain_part(name: str, one: Any, saved: Any) -> Part:
    """Anything with `state_dict` and `load_state_dict`; one that has `differences` is asked for them first."""

    def keep() -> Callable[[], None]:
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


def module_part(name: str, module: nn.Module, saved: Mapping[str, Any]) -> Part:
    """A model, or the average of one."""
    return Part(
        name=name,
        differences=lambda: modules.differences(name, module, saved),
        load=lambda: modules.load(name, module, saved),
        keep=lambda: modules.keep(module),
    )


def optimizer_part(optimizer: Any, saved: Mapping[str, Any], model: nn.Module | None) -> Part:
    """One optimizer or several."""
    return Part(
        name="optimizer",
        differences=lambda: optimizers.differences(optimizer, saved, model),
        load=lambda: optimizers.load(optimizer, saved),
        keep=lambda: optimizers.keep(optimizer),
    )


def scheduler_part(scheduler: Any, saved: Mapping[str, Any]) -> Part:
    """One scheduler or several."""
    return Part(
        name="scheduler",
        differences=lambda: schedulers.differences(scheduler, saved),
        load=lambda: schedulers.load(scheduler, saved),
        keep=lambda: schedulers.keep(scheduler),
    )


def gradient_part(model: nn.Module, saved: Mapping[str, Any]) -> Part:
    """Gradients accumulated so far."""

    def keep() -> Callable[[], None]:
        before = copied(gradients.gradients_of(model))
        return lambda: gradients.load(model, before)

    return Part(
        name="gradients",
        differences=lambda: gradients.differences(model, saved),
        load=lambda: gradients.load(model, saved),
        keep=keep,
    )


def rng_part(saved: Mapping[str, Any]) -> Part:
    """The generators of random numbers."""

    def differences() -> list[str]:
        try:
            rng.check(saved)
        except CheckpointError as error:
            return [f"rng: {error}"]
        return []

    return Part(name="rng", differences=differences, load=lambda: rng.restore(saved), keep=lambda: lambda: None)


def extra_part(extra: MutableMapping[str, Any], saved: Mapping[str, Any]) -> Part:
    """The user's own: objects are loaded, plain values replaced; names that were never saved stay as they are."""
    known = [name for name in extra if name in saved]
    objects = {name: extra[name] for name in known if hasattr(extra[name], "load_state_dict")}

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


def is_switched_off(scaler: Any) -> bool:
    """Whether it is a GradScaler that does nothing, and has no state."""
    return hasattr(scaler, "is_enabled") and not scaler.is_enabled()


def _scaler_fits(scaler: Any, saved: Mapping[str, Any]) -> bool:
    """A scaler that is switched off has no state, and one that is on refuses an empty one."""
    enabled = not is_switched_off(scaler)
    if enabled != bool(saved):
        now, then = ("on", "off") if enabled else ("off", "on")
        log.warning("scaler: it was %s when the checkpoint was saved and is %s now; its state is not loaded", then, now)
    return enabled and bool(saved)
