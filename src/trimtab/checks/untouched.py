"""Lets something be tried on a training and leaves it as it was, to the bit: weights, buffers, moments, RNG, loader."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from trimtab.checks.keep import Memory
from trimtab.checks.target import Target
from trimtab.core.errors import InputError

Undo = Callable[[], None]


@contextmanager
def untouched(target: Target, *, deep: bool = False) -> Iterator[Undo]:
    """Put everything back at the end, even after an error; the function it gives puts weights and moments back now.

    `deep` also puts back what `step_fn` and `loss_fn` keep for themselves: counters, lists, other models.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> target = Target(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), loader=[], loss_fn=max)
        >>> before = model.weight.detach().clone()
        >>> with untouched(target):
        ...     _ = torch.nn.init.zeros_(model.weight)
        >>> bool((model.weight == before).all())
        True
    """
    memory = remembered(target, deep=deep)
    undo_rest = (rng(), _loader(target.loader), _loader(target.val_loader), _switches())
    try:
        yield memory.undo
    finally:
        try:
            memory.undo()
        finally:  # tensors on a GPU that answers no more cannot be put back; the rest can
            for undo in undo_rest:
                undo()


def remembered(target: Target, *, deep: bool = False) -> Memory:
    """All that a step of this training may change, as it is now."""
    if any(is_lazy(p) for p in [*target.model.parameters(), *target.model.buffers()]):
        raise InputError("the model has lazy layers without weights; run one batch through it before it is returned")
    roots = (target.model, target.optimizers, target.scaler, target.scheduler, target.ema)
    functions = (target.step_fn, target.loss_fn) if deep else ()
    return Memory(*roots, *functions, without=(target.loader, target.val_loader))


def rng() -> Undo:
    """The global random numbers, as they are now."""
    host, own, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    device = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def undo() -> None:
        torch.set_rng_state(host)
        random.setstate(own)
        np.random.set_state(numpys)
        if device is not None:
            torch.cuda.set_rng_state_all(device)

    return undo


def _switches() -> Undo:
    """What a program can switch for everybody."""
    grad, anomaly = torch.is_grad_enabled(), torch.is_anomaly_enabled()
    checks_nan = torch.is_anomaly_check_nan_enabled()
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    dtype, filters = torch.get_default_dtype(), list(warnings.filters)

    def undo() -> None:
        torch.set_grad_enabled(grad)
        torch.autograd.set_detect_anomaly(anomaly, checks_nan)
        if torch.are_deterministic_algorithms_enabled() is not deterministic:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_default_dtype(dtype)
        if warnings.filters != filters:
            warnings.filters[:] = filters  # type: ignore[index]

    return undo


def _loader(loader: Any) -> Undo:
    """The generators a loader draws its order from, and its own state where it keeps one."""
    if loader is None:
        return lambda: None
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = [getattr(one, "generator", None) for one in (loader, sampler, inner)]
    generators = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
    own = Memory(getattr(loader, "dataset", None)) if _draws(getattr(loader, "dataset", None)) else None
    keeps = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    state = copy.deepcopy(loader.state_dict()) if keeps else None

    def undo() -> None:
        for generator, before in generators:
            generator.set_state(before)
        if own is not None:
            own.undo()
        if keeps:
            loader.load_state_dict(state)

    return undo


def _draws(dataset: Any) -> bool:
    """Whether a data set has random numbers of its own."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return any(isinstance(v, kinds) for v in getattr(dataset, "__dict__", {}).values())
