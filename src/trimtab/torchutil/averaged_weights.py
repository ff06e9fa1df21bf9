"""Where an average of weights (EMA, SWA) keeps them, and what to copy of it to put it back.

- `averaged_weights`: the weights by name, in the places where averages are known to keep them.
- `averaged_state`: all tensors by name that make up its state.
- `search_averaged_weights`: every weight that can be reached from it, whatever its class calls the place.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from trimtab.torchutil.undo import Memory

AVERAGES = ("ema_model", "shadow", "shadow_params")
"""Attributes that hold averages in every known class, whatever is kept beside them (often the live model)."""
AVERAGED_MODELS = ("module", "model", "ema")
"""Attributes that hold an averaged model in classes that have none of the above."""


def averaged_weights(average: object) -> list[tuple[str, Tensor]]:
    """The weights of an averaged model, a module, a mapping, or an object that keeps shadow parameters.

    Example:
        >>> import torch
        >>> averaged_weights({"weight": torch.zeros(1)})
        [('weight', tensor([0.]))]
    """
    named = _held_under_known_names(average)
    if named is not None:
        return named
    if isinstance(average, nn.Module):
        inner = getattr(average, "module", None)
        return list((inner if isinstance(inner, nn.Module) else average).named_parameters())
    for held in (getattr(average, name, None) for name in AVERAGED_MODELS):
        if isinstance(held, nn.Module):
            return averaged_weights(held)
    params = getattr(average, "params", None)
    return _named_tensors(average if params is None else params)


def averaged_state(average: object) -> list[tuple[str, Tensor]]:
    """What to copy of an average: a module's parameters and buffers, else its weights; nothing for None."""
    if isinstance(average, nn.Module):
        return [*average.named_parameters(), *average.named_buffers()]
    return [] if average is None else averaged_weights(average)


def search_averaged_weights(average: object) -> list[Tensor]:
    """Every weight that can be reached from an average of any class.

    The model's own may be among them, except where the averages have a name of `AVERAGES`.
    """
    if average is None:
        return []
    named = _held_under_known_names(average)
    if named is not None:
        return [t for _, t in named if t.is_floating_point() and not t.is_meta]
    if isinstance(average, nn.Module):
        return [p for p in average.parameters() if not p.is_meta]
    found: list[Tensor] = [t for m in Memory(average).modules for t in m.parameters(recurse=False)]
    for held in vars(average).values() if hasattr(average, "__dict__") else ():
        found += [t for _, t in _named_tensors(held)] if isinstance(held, dict | list | tuple) else []
    return [t for t in found if t.is_floating_point()]


def average_mark(average: object) -> float | None:
    """One number that changes when an average does; None where there is none."""
    tensors = search_averaged_weights(average)
    if not tensors:
        return None
    return sum(float(t.detach().double().abs().sum()) + float(t.detach().double().sum()) for t in tensors)


def _held_under_known_names(average: object) -> list[tuple[str, Tensor]] | None:
    for held in (getattr(average, name, None) for name in AVERAGES):
        if isinstance(held, nn.Module):
            return averaged_weights(held)
        if isinstance(held, Mapping | list | tuple):
            return _named_tensors(held)
    return None


def _named_tensors(held: object) -> list[tuple[str, Tensor]]:
    if isinstance(held, Mapping):
        return [(str(name), t) for name, t in held.items() if isinstance(t, Tensor)]
    if isinstance(held, list | tuple):
        return [(str(i), t) for i, t in enumerate(held) if isinstance(t, Tensor)]
    return []
