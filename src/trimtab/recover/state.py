"""All that training needs to go on exactly: taken from the objects as sections, and put back, all of it or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from functools import cache
from typing import Any

from torch import nn

from trimtab.core.errors import CheckpointError
from trimtab.recover import gradients as grads
from trimtab.recover import modules, optimizers, rng, schedulers
from trimtab.recover.compare import listed, refuse
from trimtab.recover.host import to_host as to_host
from trimtab.recover.parts import Part, parts_of

log = logging.getLogger("trimtab")

LOST = {
    "model": "its weights stay as they are here",
    "optimizer": "its moments and step counts stay as they are here",
    "scheduler": "the learning rate may jump",
    "scaler": "the loss scale stays as it is here",
    "ema": "the average stays as it is here",
    "loader": "the data does not go on where it stopped",
    "guard": "its baselines stay as they are here",
    "rng": "dropout, shuffling and augmentation draw other numbers than they would have",
}
"""What it means that a part is not loaded."""


def capture(
    *,
    model: nn.Module | None = None,
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

    The tensors are the live ones: copy them (`to_host`) where training goes on before they are written. `optimizer`
    and `scheduler` may be lists or dicts; `extra` holds plain data or objects with `state_dict`. With `gradients`, a
    state taken between two micro-batches resumes exactly.

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
        _tell_no_position(type(loader).__name__)
    if extra is not None:
        sections["extra"] = {name: _state_of(value) for name, value in extra.items()}
    if gradients and model is not None:
        sections["gradients"] = grads.gradients_of(model)
    sections["rng"] = rng.capture()
    return sections


def restore(
    sections: Mapping[str, Any],
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    loader: Any = None,
    guard: Any = None,
    extra: MutableMapping[str, Any] | None = None,
    gradients: bool = True,
) -> None:
    """Put a captured state into these objects, or raise a `CheckpointError` that says what differs and change nothing.

    Parameters and buffers stay the same objects; what is loaded shares no memory with `sections`. A part that is in the
    checkpoint but not given, or given but not in it, is warned about by name. Plain values of `extra` are replaced by
    the saved ones. Random numbers are put back last.
    """
    given = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema, "guard": guard}
    given["loader"] = loader if hasattr(loader, "load_state_dict") else None
    parts = list(parts_of(sections, given, model, extra, gradients))
    refuse([line for part in parts for line in _differences(part)])
    _tell_what_is_missing(sections, given | {"model": model, "rng": rng})

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


def _state_of(value: Any) -> Any:
    """An object's own state, or the plain value itself."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def _tell_what_is_missing(sections: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    absent = [name for name, one in given.items() if one is not None and name not in sections]
    unused = [name for name, one in given.items() if one is None and name in sections]
    nobody = "is in the checkpoint, and nothing was given to take it"
    for names, what in ((absent, "is not in the checkpoint"), (unused, nobody)):
        if names:
            log.warning("%s %s: %s", listed(names, len(names)), what, "; ".join(LOST[name] for name in names))
