"""Remembers whatever a training can change, wherever it is kept, and puts it back in place, bit-identical."""

from __future__ import annotations

import copy
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trimtab.core.errors import InputError


class Training(Protocol):
    """What a training consists of: all that a step may change hangs on it."""

    @property
    def model(self) -> nn.Module:
        """The model."""
        ...

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Every optimizer."""
        ...

    @property
    def scaler(self) -> Any:
        """The GradScaler, or None."""
        ...

    @property
    def scheduler(self) -> Any:
        """The schedule, or None."""
        ...

    @property
    def ema(self) -> Any:
        """The averaged weights, or None."""
        ...

    @property
    def loader(self) -> Any:
        """What batches come from."""
        ...

    @property
    def val_loader(self) -> Any:
        """What batches of a validation come from, or None."""
        ...

    @property
    def loss_fn(self) -> Any:
        """The loss function, or None."""
        ...

    @property
    def step_fn(self) -> Any:
        """The function that makes a step, or None."""
        ...


@contextmanager
def untouched(target: Training, *, deep: bool = False) -> Iterator[Undo]:
    """Put everything back at the end, even after an error; the function it gives puts weights and moments back now.

    `deep` also puts back what `step_fn` and `loss_fn` keep for themselves: counters, lists, other models.

    Example:
        >>> from trimtab.doctor.target import Target
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


def remembered(target: Training, *, deep: bool = False) -> Memory:
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


def tensor_values(tensors: Iterable[Tensor]) -> Undo:
    """The values of these tensors as they are now; all are written back in place, changed or not."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def undo() -> None:
        for tensor, value in kept:
            tensor.copy_(value)

    return undo


def forward_state(model: nn.Module) -> Undo:
    """What forward passes change in a model: its mode, its buffers and their values.

    A buffer that has its value still is not written to: a graph of the user's may have saved it.
    """
    modules = list(model.modules())
    undo: list[Undo] = [partial(setattr, module, "training", module.training) for module in modules]
    undo += [_container(module._buffers) for module in modules]
    undo += [_tensor(buffer) for buffer in model.buffers()]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


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


def _draws(dataset: object) -> bool:
    """Whether a data set has random numbers of its own."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return any(isinstance(v, kinds) for v in getattr(dataset, "__dict__", {}).values())


Undo = Callable[[], None]
PLAIN = (int, float, complex, str, bytes, bool, type(None))
MAX_DEPTH = 6
MODULE_OWN = ("_parameters", "_buffers", "_modules")


class Memory:
    """Everything reachable from some roots, as it was; `undo` puts it back, as often as it is called.

    Found are counters, lists, dicts, tensors and random generators in closures, attributes and used globals, and the
    modules and optimizers among them. Nothing is replaced: what others hold on to is the same object afterwards.

    Example:
        >>> counter = {"calls": 0}
        >>> memory = Memory(counter)
        >>> counter["calls"] = 5
        >>> memory.undo()
        >>> counter
        {'calls': 0}
    """

    def __init__(self, *roots: object, without: tuple[object, ...] = ()) -> None:
        self._seen: dict[int, Any] = {id(one): one for one in without}
        self._undo: list[Undo] = []
        self.modules: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.scalers: list[Any] = []
        for root in roots:
            self._visit(root, 0)

    def undo(self) -> None:
        """As it was."""
        for one in self._undo:
            one()

    def _visit(self, value: object, depth: int) -> None:
        if isinstance(value, PLAIN) or depth > MAX_DEPTH or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._undo.append(_tensor(value))
        elif isinstance(value, nn.Module):
            self.modules.append(value)
            self._module(value, depth)
        elif isinstance(value, Optimizer):
            self.optimizers.append(value)
            self._optimizer(value)
        elif isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            self._undo.append(_generator(value))
        elif isinstance(value, FunctionType | MethodType | partial):
            self._function(value, depth)
        elif isinstance(value, dict | list | set | deque):
            self._undo.append(_container(value))
            for part in list(value.values() if isinstance(value, dict) else value):
                self._visit(part, depth + 1)
        elif isinstance(value, tuple):
            for part in value:
                self._visit(part, depth + 1)
        elif _is_plain_object(value):
            if isinstance(value, LRScheduler) or type(value).__name__ == "ReduceLROnPlateau":
                self.schedulers.append(value)
            if isinstance(value, torch.amp.GradScaler):
                self.scalers.append(value)
            self._undo.append(_container(vars(value)))
            for part in list(vars(value).values()):
                self._visit(part, depth + 1)

    def _module(self, module: nn.Module, depth: int) -> None:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._undo.append(_tensor(tensor))
        for name in MODULE_OWN:
            self._undo.append(_container(getattr(module, name)))
        own = {k: v for k, v in vars(module).items() if k not in MODULE_OWN and not k.endswith("_hooks")}
        self._undo.append(_entries(vars(module), own))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state = copy.deepcopy(module.get_extra_state())
            self._undo.append(lambda: module.set_extra_state(copy.deepcopy(state)))
        for child in module._modules.values():
            if child is not None:
                self._visit(child, 0)
        for part in own.values():
            if not callable(part) or isinstance(part, nn.Module):
                self._visit(part, depth + 1)

    def _optimizer(self, optimizer: Any) -> None:
        kept = {k: v for k, v in vars(optimizer).items() if not k.endswith("_hooks")}
        self._undo.append(_entries(vars(optimizer), kept))
        state, home = dict(optimizer.state), optimizer.state

        def undo() -> None:
            home.clear()
            home.update(state)

        self._undo.append(undo)
        for own in state.values():
            self._visit(own, 1)
        for group in optimizer.param_groups:
            self._undo.append(_container(group))
            self._undo.append(_container(group["params"]))
            for p in group["params"]:
                self._visit(p, 0)
            for key, part in group.items():
                if key != "params":
                    self._visit(part, 1)
        for name, part in kept.items():  # moments may be kept anywhere
            if name not in ("state", "param_groups", "defaults") and not callable(part):
                self._visit(part, 1)

    def _function(self, function: Any, depth: int) -> None:
        if isinstance(function, partial):
            for part in (function.func, *function.args, *function.keywords.values()):
                self._visit(part, depth + 1)
            return
        if isinstance(function, MethodType):
            self._visit(function.__self__, depth + 1)
            function = function.__func__
            if not isinstance(function, FunctionType):
                return
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            if isinstance(held, PLAIN):
                self._undo.append(partial(setattr, cell, "cell_contents", held))
            self._visit(held, depth + 1)
        if _is_library(function.__module__):
            return
        for name in _names(function.__code__):
            held = function.__globals__.get(name)
            if name in function.__globals__ and not isinstance(held, ModuleType | type):
                if isinstance(held, PLAIN):
                    self._undo.append(partial(function.__globals__.__setitem__, name, held))
                self._visit(held, depth + 1)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("torch", "numpy", "trimtab", "typing", "functools", "builtins")


def _is_plain_object(value: object) -> bool:
    """An object of somebody's own class, or one of the few of PyTorch's that a training changes."""
    if isinstance(value, type | ModuleType) or (callable(value) and not hasattr(value, "__dict__")):
        return False
    known = isinstance(value, LRScheduler | torch.amp.GradScaler)
    return known or (hasattr(value, "__dict__") and not _is_library(type(value).__module__))


def _tensor(tensor: Tensor) -> Undo:
    grad = tensor.grad if tensor.is_leaf else None
    value = None if tensor.is_meta else tensor.detach().clone()
    inner = None if grad is None else grad.detach().clone()
    wanted = tensor.requires_grad

    @torch.no_grad()
    def undo() -> None:
        if value is not None and not _same(tensor.detach(), value):
            tensor.detach().copy_(value)
        if not tensor.is_leaf:
            return
        if tensor.requires_grad is not wanted:
            tensor.requires_grad_(wanted)
        tensor.grad = grad
        if grad is not None and inner is not None:
            grad.detach().copy_(inner)

    return undo


def _same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or a.shape != b.shape:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() or torch.equal(a, b)


def _generator(value: Any) -> Undo:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return partial(_set_generator, value, state)
    if isinstance(value, random.Random):
        before = value.getstate()
        return lambda: value.setstate(before)
    if isinstance(value, np.random.RandomState):
        told = value.get_state()
        return lambda: value.set_state(told)
    inner = copy.deepcopy(value.bit_generator.state)
    return lambda: setattr(value.bit_generator, "state", copy.deepcopy(inner))


def _set_generator(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _container(value: Any) -> Undo:
    """Its own entries, shallow: what is in them is remembered by itself."""
    if isinstance(value, MutableMapping):
        return _entries(value, dict(value), whole=True)
    kept = list(value)

    def undo() -> None:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(kept)

    return undo


def _entries(home: MutableMapping[Any, Any], kept: dict[Any, Any], *, whole: bool = False) -> Undo:
    before = set(home)

    def undo() -> None:
        for key in [k for k in home if (k not in before if not whole else k not in kept)]:
            del home[key]
        if list(home) == list(kept) and all(home[k] is v for k, v in kept.items()):
            return
        home.update(kept)

    return undo
