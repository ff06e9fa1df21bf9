"""Lets something be tried on a training and leaves it as it was, to the bit: weights, buffers, moments, RNG, loader."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trimtab.checks.target import Target
from trimtab.core.errors import InputError

Undo = Callable[[], None]


@contextmanager
def untouched(target: Target) -> Iterator[Undo]:
    """Put everything back at the end, even after an error; the function it gives puts weights and moments back now.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> target = Target(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), loader=[], loss_fn=max)
        >>> before = model.weight.detach().clone()
        >>> with untouched(target):
        ...     _ = torch.nn.init.zeros_(model.weight)
        >>> bool((model.weight == before).all())
        True
    """
    undo_model, undo_scaler = _model(target.model), _attributes(target.scaler)
    borrowed = [_Borrowed(one) for one in target.optimizers]
    undo_rest = (_rng(), _loader(target.loader))

    def rewind() -> None:
        undo_model()
        undo_scaler()
        for one in borrowed:
            one.begin()

    try:
        rewind()
        yield rewind
    finally:
        rewind()
        for one in borrowed:
            one.give_back()
        for undo in undo_rest:
            undo()


def _nothing() -> None:
    """There is nothing to put back."""


def _model(model: nn.Module) -> Undo:
    if any(is_lazy(p) for p in [*model.parameters(), *model.buffers()]):
        raise InputError("the model has lazy layers without weights; run one batch through it before it is returned")
    params = [(p, p.detach().clone(), p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    modes = [(m, m.training) for m in model.modules()]
    own = [m for m in model.modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
    extra = [(m, copy.deepcopy(m.get_extra_state())) for m in own]

    @torch.no_grad()
    def undo() -> None:
        for p, value, grad, grad_value in params:
            p.copy_(value)
            p.grad = grad
            if grad is not None and grad_value is not None:
                grad.copy_(grad_value)
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer  # a layer may have put another tensor in its place
            buffer.copy_(value)
        for module, mode in modes:
            module.training = mode
        for module, state in extra:
            module.set_extra_state(copy.deepcopy(state))

    return undo


class _Borrowed:
    """An optimizer that works on a copy of its state; what it had is given back as the very same objects."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._vars = dict(vars(optimizer))
        self._groups = [dict(group) for group in optimizer.param_groups]

    def begin(self) -> None:
        """From where it was, with a fresh copy."""
        self.give_back()
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update({param: _copied(own) for param, own in self._vars["state"].items()})
        self._optimizer.state = state

    def give_back(self) -> None:
        """As it was."""
        vars(self._optimizer).clear()
        vars(self._optimizer).update(self._vars)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(v) for v in value)
    return copy.copy(value)


def _attributes(scaler: Any) -> Undo:
    if scaler is None:
        return _nothing
    before = {name: copy.deepcopy(value) for name, value in vars(scaler).items()}

    def undo() -> None:
        vars(scaler).clear()
        vars(scaler).update({name: copy.deepcopy(value) for name, value in before.items()})

    return undo


def _rng() -> Undo:
    host, own, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    device = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def undo() -> None:
        torch.set_rng_state(host)
        random.setstate(own)
        np.random.set_state(numpys)
        if device is not None:
            torch.cuda.set_rng_state_all(device)

    return undo


def _loader(loader: Any) -> Undo:
    """The generators a loader draws its order from, and its own state where it keeps one."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = [getattr(one, "generator", None) for one in (loader, sampler, inner)]
    generators = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
    keeps = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    state = copy.deepcopy(loader.state_dict()) if keeps else None

    def undo() -> None:
        for generator, before in generators:
            generator.set_state(before)
        if keeps:
            loader.load_state_dict(state)

    return undo
