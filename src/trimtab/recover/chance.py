"""The generators that samplers own, and the epoch they were told: with them the same order is drawn again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

_Generators = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def capture(loader: Any) -> dict[str, Any]:
    """The state of everything that decides the order of a loader's samples, but for the global generators."""
    return {path: _state(one, name) for path, one, name in _sources(loader)}


def restore(loader: Any, state: Mapping[str, Any]) -> None:
    """Put back what `capture` took; what is new here stays as it is."""
    for path, one, name in list(_sources(loader)):
        if path in state:
            _set(one, name, state[path])


def _sources(loader: Any) -> Iterator[tuple[str, Any, str]]:
    """Generators, epochs and samplers with a state of their own: where each is, its object, and an attribute or ''."""
    seen: set[int] = set()
    if isinstance(loader.generator, torch.Generator):
        seen.add(id(loader.generator))
        yield "generator", loader.generator, ""
    for root in ("batch_sampler", "sampler"):
        yield from _inside(getattr(loader, root, None), root, seen)


def _inside(owner: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any, str]]:
    if owner is None or id(owner) in seen or not hasattr(owner, "__dict__"):
        return
    seen.add(id(owner))
    if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
        yield path, owner, ""
        return
    if hasattr(owner, "set_epoch") and isinstance(getattr(owner, "epoch", None), int):
        yield f"{path}.epoch", owner, "epoch"
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, _Generators) and id(value) not in seen:
            seen.add(id(value))
            yield f"{path}.{name}", value, ""
        elif isinstance(value, Sampler):
            yield from _inside(value, f"{path}.{name}", seen)


def _state(one: Any, name: str) -> Any:
    if name:
        return getattr(one, name)
    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    if isinstance(one, np.random.RandomState):
        return one.get_state(legacy=False)
    return one.getstate() if isinstance(one, random.Random) else one.state_dict()


def _set(one: Any, name: str, state: Any) -> None:
    if name:
        setattr(one, name, state)
    elif isinstance(one, torch.Generator):
        one.set_state(state.cpu().clone())
    elif isinstance(one, np.random.Generator):
        one.bit_generator.state = state
    elif isinstance(one, np.random.RandomState):
        one.set_state(state)
    elif isinstance(one, random.Random):
        one.setstate(state)
    else:
        one.load_state_dict(state)
