"""All that training needs to go on exactly: taken from the objects as sections, and put back, all of it or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any

from torch import nn

from trimtab.core.errors import CheckpointError
from trimtab.recover import gradients as grads
from trimtab.recover import modules, optimizers, rng, schedulers
from trimtab.recover.compare import listed, refuse
from trimtab.recover.host import to_host as to_host
from trimtab.recover.parts import Part, is_switched_off, parts_of

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


def capture(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    loader: Any = None,
    guard: Any = None,
    extra: Mapping[str, Any] | None = None,
    gradients: bool = False,
) -> dict[str, Any]:
    """The state of everything given, and of every generator of random numbers, as sections of plain data and tensors.

    The tensors are the live ones: copy them (`to_host`) where training goes on before they are written. `model` is a
    module or a dict of them, `optimizer` and `scheduler` may be lists or dicts; `extra` holds plain data or objects
    with `state_dict`. With `gradients`, a state taken between two micro-batches resumes exactly.

    Example:
        >>> import torch
        >>> from trimtab.recover import state
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
    model = modules.whole(model)
    if guard is not None:
        sections["guard"] = guard.state_dict()  # first: it judges what is still under way
    if model is not None:
        sections["model"] = modules.tensors_of(model)
    if optimizer is not None:
        sections["optimizer"] = optimizers.capture(optimizer, model)
    if scheduler is not None:
        sections["scheduler"] = schedulers.capture(scheduler)
    if scaler is not None:
        sections["scaler"] = scaler.state_dict()
    if ema is not None:
        sections["ema"] = modules.tensors_of(ema) if isinstance(ema, nn.Module) else ema.state_dict()
    if hasattr(loader, "state_dict"):
        sections["loader"] = loader.state_dict()
    elif loader is not None:
        _tell_no_position(_kind(loader))
    if extra is not None:
        sections["extra"] = {name: _state_of(value) for name, value in extra.items()}
    if gradients and model is not None:
        sections["gradients"] = grads.gradients_of(model)
    sections["rng"] = rng.capture()
    return sections


def restore(
    sections: Mapping[str, Any],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    loader: Any = None,
    guard: Any = None,
    extra: MutableMapping[str, Any] | None = None,
    gradients: bool = True,
    strict: bool = True,
) -> None:
    """Put a captured state into these objects, or raise a `CheckpointError` that says what differs and change nothing.

    Parameters and buffers stay the same objects; what is loaded shares no memory with `sections`. A part that was saved
    but is not given is told in the log (info). One that is given but was not saved is an error that names what was;
    with `strict=False` it is warned about and stays as it is. What a guard knows of the run may always be missing.
    Plain values of `extra` are replaced by the saved ones. Random numbers are put back last.
    """
    model = modules.whole(model)
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema}
    given |= {"guard": guard, "extra": extra, "loader": loader if hasattr(loader, "load_state_dict") else None}
    optional = ("guard", "scaler") if is_switched_off(scaler) else ("guard",)
    _check_what_is_missing(sections, given, strict, optional)
    if loader is not None and given["loader"] is None and "loader" in sections:
        log.warning("a %s cannot take the place in the data that the checkpoint has: %s", _kind(loader), LOST["loader"])
    parts = list(parts_of(sections, given, model, extra, gradients))
    refuse([line for part in parts for line in _differences(part)])

    before = rng.capture()
    undo: list[tuple[str, Callable[[], None]]] = [("rng", lambda: rng.restore(before))]
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


def _put_back(undo: list[tuple[str, Callable[[], None]]]) -> list[str]:
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
def _tell_no_position(kind: str) -> None:
    """Once is enough: it is asked with every checkpoint."""
    log.warning(
        "a %s cannot say where it is: checkpoints hold no position in the data; wrap it in ResumableLoader", kind
    )


def _kind(value: Any) -> str:
    return type(value).__name__


def _state_of(value: Any) -> Any:
    """An object's own state, or the plain value itself."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def _check_what_is_missing(
    sections: Mapping[str, Any], given: Mapping[str, Any], strict: bool, optional: Sequence[str]
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
        told = log.info if name in optional else log.warning
        told("%s is not in the checkpoint: %s", name, LOST[name])
    if unused:
        told_lost = "; ".join(LOST[name] for name in unused)
        log.info("%s: in the checkpoint, and not asked for: %s", listed(unused, len(unused)), told_lost)
