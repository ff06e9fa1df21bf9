"""Finds the modules that a program builds, which of them an optimizer moves, and optimizers not from PyTorch."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from trimtab.sample.measure.native import native
from trimtab.sample.probes.forward import inert, only_traced
from trimtab.sample.rows import Parts
from trimtab.torchutil.optimizers import params_of
from trimtab.torchutil.patch import OwnHook, own_hook, plain_python, wrap_attribute

P = ParamSpec("P")
R = TypeVar("R")

Kept = tuple[dict[str, Tensor | None], str, Tensor]
MAX_COPIED = 1 << 20
HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


class LooseParameters(nn.Module):
    """Represents a model whose optimized tensors belong to no module; it is never called."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            self._parameters[f"tensor_{i}"] = tensor  # type: ignore[assignment]  # a plain leaf may be optimized, too

    def forward(self) -> None:
        """Compute nothing."""


def owners_of(params: Sequence[Tensor], among: Sequence[nn.Module] | None = None) -> list[nn.Module]:
    """The modules that hold the most of these parameters: the smallest first, those around it after it.

    Args:
        params: The parameters of an optimizer.
        among: Where to look; None for all modules alive.

    Example:
        >>> body, head = nn.Linear(2, 2), nn.Linear(2, 1)
        >>> model = nn.Sequential(body, head)
        >>> owners_of(list(head.parameters())) == [head, model]
        True
        >>> owners_of(list(model.parameters())) == [model]
        True
    """
    wanted = dict.fromkeys(id(p) for p in params)  # in their order
    modules = alive() if among is None else among
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    direct = [m for m in modules if any(id(p) in wanted for p in m._parameters.values())]
    candidates = _with_ancestors(direct, parents)
    if not candidates:
        return [LooseParameters(params)]
    sizes = {id(m): _size(m, wanted) for m in candidates}
    best = max(covered for covered, _, _ in sizes.values())
    tight = sorted(candidates, key=lambda m: (sizes[id(m)][1], -sizes[id(m)][2], _num_modules(m)))
    if best == len({id(p) for m in candidates for p in m.parameters()} & set(wanted)):
        return [m for m in tight if sizes[id(m)][0] == best]
    return [Parts({f"{type(part).__name__}{i}": part for i, part in enumerate(_cover(tight, sizes, wanted))})]


def _cover(
    tight: Sequence[nn.Module], sizes: dict[int, tuple[int, int, int]], wanted: Mapping[int, None]
) -> list[nn.Module]:
    """Few modules that together hold all wanted parameters, in the order in which these are optimized."""
    chosen: list[nn.Module] = []
    missing = set(wanted)
    for module in sorted(tight, key=lambda m: -sizes[id(m)][0]):  # stable: of equals the tightest
        held = {id(p) for p in module.parameters()} & missing
        if held and len(held) == sizes[id(module)][0]:
            chosen.append(module)
            missing -= held
    place = {key: i for i, key in enumerate(wanted)}
    return sorted(chosen, key=lambda m: min(place[id(p)] for p in m.parameters() if id(p) in place))


def bystanders(model: nn.Module, owned: Collection[int], modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules outside the model whose buffers training changes though no optimizer moves them: a frozen backbone."""
    children = {id(child) for module in modules for child in module._modules.values()}
    mine = {id(part) for part in model.modules()}
    return [
        module
        for module in modules
        if id(module) not in children and not isinstance(module, LooseParameters | Parts)
        if any(part.training and _moves(part) for part in module.modules())
        if not any(id(part) in mine for part in module.modules())
        if not any(id(p) in owned for p in module.parameters())
    ]


def _moves(module: nn.Module) -> bool:
    return any(b is not None and b.is_floating_point() for b in module._buffers.values())


def copies_of(model: nn.Module) -> list[Kept]:
    """Copies of the buffers as they are now, each with the dict that holds it."""
    found = [(m._buffers, k, b) for m in model.modules() for k, b in m._buffers.items() if b is not None]
    return [(home, key, b.detach().clone()) for home, key, b in found if not is_lazy(b) and b.numel() <= MAX_COPIED]


def seen_from_outside(owners: Sequence[nn.Module]) -> nn.Module | None:
    """The compiled form of the smallest owner, if there is one. Calls of the module inside it run no hooks."""
    return next((m for m in owners if m._modules.get("_orig_mod") is owners[0]), None)


def uncalled(model: nn.Module) -> nn.Module:
    """A module with the same parameters, buffers and parts that nobody calls, so that hooks on it change nothing.

    For a model that is called inside compiled code, which is compiled again whenever a hook is added or removed.
    """
    twin: nn.Module = object.__new__(type(model))
    twin.__dict__ = dict(model.__dict__)
    for name in HOOKS:
        twin.__dict__[name] = OrderedDict()
    return twin


def alive() -> list[nn.Module]:
    """All modules there are."""
    return [o for o in gc.get_objects() if _is_module(o)]


def _is_module(obj: object) -> bool:
    # By type: isinstance() asks an object for its __class__, and a proxy (a lazy import, a mock) may do anything then.
    return issubclass(type(obj), nn.Module) and "_parameters" in getattr(obj, "__dict__", {})


def _with_ancestors(modules: Iterable[nn.Module], parents: dict[int, list[nn.Module]]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    todo = list(modules)
    while todo:
        module = todo.pop()
        if id(module) not in found and not isinstance(module, LooseParameters | Parts):
            found[id(module)] = module
            todo += parents.get(id(module), [])
    return list(found.values())


def _size(module: nn.Module, wanted: Mapping[int, None]) -> tuple[int, int, int]:
    """How many of the wanted parameters it holds, how many parameters in all, and how many buffers."""
    mine = [id(p) for p in module.parameters()]
    return sum(p in wanted for p in mine), len(mine), sum(1 for _ in module.buffers())


def _num_modules(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())


NUM_MARKED = 16
METHODS = ("step", "apply_gradients", "apply", "update")
"""Methods with which optimizers not from PyTorch change the weights."""


def marked_params(optimizer: Optimizer) -> list[Tensor]:
    """The parameters by whose gradients a backward pass is told to have reached this optimizer."""
    params = params_of(optimizer)
    return params[:: len(params) // NUM_MARKED + 1]


def mark_of(params: list[Tensor]) -> object:
    """A value that changes when a backward pass adds to one of their gradients."""
    if native is not None:
        return native.marks(params)
    return [None if p.grad is None else (id(p.grad), p.grad._version) for p in params]


def lookalikes() -> list[object]:
    """All objects that look like optimizers by name or attributes and are not from PyTorch.

    Types are checked first: reading an attribute of an object may trigger anything, such as a lazy import.
    """
    known: dict[type, bool] = {}
    found = []
    for obj in gc.get_objects():
        kind = type(obj)
        if kind not in known:
            known[kind] = _looks_like_one(kind)
        if known[kind] and ("optim" in _names(kind) or can_be_guarded(obj)):
            found.append(obj)
    return found


def can_be_guarded(obj: object) -> TypeGuard[Optimizer]:
    """Whether it has what a guard needs of an optimizer: parameter groups, and a step."""
    try:
        params = params_of(obj)
    except Exception:  # not an optimizer then
        return False
    return callable(getattr(obj, "step", None)) and bool(params) and all(isinstance(p, Tensor) for p in params)


def _looks_like_one(kind: type) -> bool:
    if issubclass(kind, type | nn.Module | Optimizer | LRScheduler) or kind.__module__.split(".")[0] in _NOT_THEIRS:
        return False
    can = any(callable(getattr(base, name, None)) for base in kind.__mro__ for name in METHODS if name in vars(base))
    groups = any("param_groups" in vars(base) for base in kind.__mro__) or "step" in dir(kind)
    return can and (groups or "optim" in _names(kind))


_NOT_THEIRS = frozenset({"torch", "trimtab", "builtins", "numpy", "sympy"})


def _names(kind: type) -> str:
    return " ".join(base.__name__.lower() for base in kind.__mro__)


class Census:
    """Lists modules as they are built, copied or loaded. A walk over all objects would cost 50 ms each time."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[nn.Module]] = {}

    def take(self) -> Callable[[], None]:
        """Start with the modules that exist; returns the undo function."""
        for module in alive():
            self._note(module)
        born = ("__init__", "__setstate__")  # copies and pickles come through the second
        undo = [wrap_attribute(nn.Module, name, self._noted) for name in born]

        def stop() -> None:
            for back in undo:
                back()

        return stop

    def modules(self) -> list[nn.Module]:
        """The modules that exist. One that is still being built has no parts yet and is left out."""
        alive = (module for ref in list(self._known.values()) if (module := ref()) is not None)
        return [module for module in alive if "_parameters" in module.__dict__]

    def _note(self, module: nn.Module) -> None:
        key = id(module)
        self._known[key] = weakref.ref(module, functools.partial(_forget, self._known, key))

    def _noted(
        self, inner: Callable[Concatenate[nn.Module, P], R], module: nn.Module, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self._note(module)
        return inner(module, *args, **kwargs)


def _forget(known: dict[int, weakref.ref[nn.Module]], key: int, ref: weakref.ref[nn.Module]) -> None:
    if known.get(key) is ref:  # else another module has this id already
        del known[key]


class FirstCall:
    """Reports the first call of a model with gradients on. Hooks that are added in response see that call, too."""

    def __init__(self, model: nn.Module, called: Callable[[nn.Module], None]) -> None:
        self.model = weakref.ref(model)
        self._called = called
        self._handle: OwnHook | None = own_hook(model.register_forward_pre_hook(self, with_kwargs=True), listed=False)

    @property
    def waiting(self) -> bool:
        """Whether the model was not called yet."""
        return self._handle is not None

    @plain_python
    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Run before the model's forward."""
        if only_traced() or not torch.is_grad_enabled() or self._handle is None:
            return
        self.close()
        before = set(module._forward_pre_hooks)
        self._called(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if key not in before:  # came too late to be called by PyTorch this time
                if key in module._forward_pre_hooks_with_kwargs:
                    hook(module, args, kwargs)
                else:
                    hook(module, args)

    def close(self) -> None:
        """Stop waiting."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __reduce__(self) -> str | tuple[object, ...]:
        return inert()
