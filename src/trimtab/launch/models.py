"""Which module an optimizer moves: found among everything alive, because nobody told us."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trimtab.sample.roots import Parts

Kept = tuple[dict[str, Tensor | None], str, Tensor]
MAX_COPIED = 1 << 20
HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


class LooseParameters(nn.Module):
    """Stands in for a model where tensors are optimized that belong to no module; it is never called."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            self._parameters[f"tensor_{i}"] = tensor  # type: ignore[assignment]  # a plain leaf may be optimized, too

    def forward(self) -> None:
        """There is nothing to compute."""


def owners_of(params: Sequence[Tensor], among: Sequence[nn.Module] | None = None) -> list[nn.Module]:
    """The modules that hold as many of these parameters as any does: the tightest first, those around it after it.

    They are looked for `among` these modules, else among everything alive.

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
    """Few modules that hold them together, in the order in which their parameters are optimized."""
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
    """Modules beside the model whose buffers training moves though no optimizer does: a frozen trunk, a lone norm."""
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
    """The buffers as they are now, by their place."""
    found = [(m._buffers, k, b) for m in model.modules() for k, b in m._buffers.items() if b is not None]
    return [(home, key, b.detach().clone()) for home, key, b in found if not is_lazy(b) and b.numel() <= MAX_COPIED]


def seen_from_outside(owners: Sequence[nn.Module]) -> nn.Module | None:
    """The compiled form of the tightest owner, if there is one: its calls are seen, those of the module inside not."""
    return next((m for m in owners if m._modules.get("_orig_mod") is owners[0]), None)


def uncalled(model: nn.Module) -> nn.Module:
    """The same parameters, buffers and parts under the same names, but nobody calls it: a hook on it changes nothing.

    For a model that is called inside compiled code, where every hook that comes or goes means compiling anew.
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
