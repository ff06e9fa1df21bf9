"""Which tensors an optimizer moves, what they are called, how their rows are laid out in a table, and which modules a
loop calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core.errors import InputError
from trimtab.core.types import FULL_COLUMNS, NORM_COLUMNS, Column, Kind, Layout
from trimtab.sample.measure import reference as measure
from trimtab.sample.reduce import Shards, Stages
from trimtab.sample.transfer import is_here, upload
from trimtab.torchutil.optimizers import params_of


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The name of every parameter by identity, as in the model before it was compiled or replicated; a tied one keeps
    its first."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return {id(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters()}


class Rows:
    """The parameters of one optimizer, in its own order, each once.

    Rebuilt when the optimizer's groups change (parameters added by unfreezing, replaced modules).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        *,
        label: str,
        others: Iterable[Tensor],
        stages: Stages | None = None,
    ) -> None:
        self.label = label
        self.groups: list[list[int]] = []  # per parameter group, the rows of its parameters
        self.params: list[Tensor] = []
        self.names: tuple[str, ...] = ()
        self.others = [p for p in others if p.numel()]
        found: dict[int, int] = {}
        called: list[str] = []
        for g, group in enumerate(optimizer.param_groups):
            rows = []
            for i, p in enumerate(group["params"]):
                if id(p) not in found:
                    found[id(p)] = len(self.params)
                    self.params.append(p)
                    called.append(names.get(id(p), f"optimizer group {g} parameter {i}"))
                rows.append(found[id(p)])
            self.groups.append(rows)
        self.names = tuple(called)
        self.other_names = tuple(names.get(id(p), "unnamed") for p in self.others)
        self.num_listed = sum(map(len, self.groups))
        self.on_host = all(map(is_here, self.params))
        # Where each process holds a part of every parameter, or of the model: how what is measured of them adds up.
        shards = Shards.of([*self.params, *self.others])
        self.shards: Shards | Stages | None = shards if stages is None else stages.holding(shards)
        self._odd = [i for i, p in enumerate(self.params) if p.is_complex()]
        self._num_checked, self._special = -1, True
        self._indices: dict[torch.device, list[Tensor]] = {}
        self._layouts: dict[tuple[Kind, ...], Layout] = {}
        self.norm_layout = self._layout((Kind.GRAD,), NORM_COLUMNS)
        self.full_layout = self.layout((Kind.GRAD,))

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still has as many parameters as when this was built (the cheap test of every step)."""
        groups = optimizer.param_groups
        num = len(groups[0]["params"]) if len(groups) == 1 else sum(len(g["params"]) for g in groups)
        return num == self.num_listed

    def same(self, optimizer: Optimizer) -> bool:
        """Whether they are the very same parameters (the thorough test of every full measurement)."""
        listed = params_of(optimizer)
        mine = [self.params[i] for rows in self.groups for i in rows]
        return len(listed) == len(mine) and all(a is b for a, b in zip(listed, mine, strict=True))

    def gradients(self) -> list[Tensor | None]:
        """Each parameter's gradient as it is."""
        return [p.grad for p in self.params]

    def plain(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients that can be measured together: sparse and complex ones turned into dense real values."""
        if len(gradients) != self._num_checked:
            # Sparse and sharded gradients come from layers, not from steps: look again only when their number changes.
            self._num_checked = len(gradients)
            self._special = len(self._odd) > 0 or any(_is_special(g) for g in gradients)
        return [measure.plain(g) for g in gradients] if self._special else gradients

    def members(self, present: list[int] | None) -> list[list[int]]:
        """Per parameter group, where its gradients stand in the list of the gradients there are."""
        if present is None:
            return self.groups
        place = {row: i for i, row in enumerate(present)}
        return [[place[r] for r in rows if r in place] for rows in self.groups]

    def group_indices(self, device: torch.device) -> list[Tensor]:
        """Per parameter group, the rows of its parameters as an index on `device`, sent there once."""
        if device not in self._indices:
            self._indices[device] = [upload(np.array(rows, np.int64), device) for rows in self.groups]
        return self._indices[device]

    def layout(self, kinds: tuple[Kind, ...], buffers: tuple[tuple[str, int], ...] = ()) -> Layout:
        """The full-column layout with rows of these kinds, in this order."""
        if Kind.BUFFER in kinds:
            return self._layout(kinds, FULL_COLUMNS, buffers)
        if kinds not in self._layouts:
            self._layouts[kinds] = self._layout(kinds, FULL_COLUMNS)
        return self._layouts[kinds]

    def _layout(
        self, kinds: Sequence[Kind], columns: tuple[Column, ...], buffers: tuple[tuple[str, int], ...] = ()
    ) -> Layout:
        mine = list(zip(self.names, (p.numel() for p in self.params), strict=True))
        rest = list(zip(self.other_names, (p.numel() for p in self.others), strict=True))
        rows = {Kind.GRAD: mine, Kind.WEIGHT: mine + rest, Kind.UPDATE: mine, Kind.BUFFER: list(buffers)}
        flat = [(name, kind, size) for kind in kinds for name, size in rows[kind]]
        return Layout(
            names=tuple(n for n, _, _ in flat),
            kinds=tuple(k for _, k, _ in flat),
            numel=tuple(s for _, _, s in flat),
            columns=columns,
            optimizer=self.label,
        )


def _is_special(gradient: Tensor) -> bool:
    return gradient.layout is not torch.strided or type(gradient) is not Tensor


class Parts(nn.Module):
    """Stands in for a model that exists only as modules side by side, under their names; it is never called.

    Example:
        >>> model = Parts({"maker": nn.Linear(2, 1), "critic": nn.Linear(1, 1)})
        >>> [name for name, _ in model.named_parameters()]
        ['maker.weight', 'maker.bias', 'critic.weight', 'critic.bias']
        >>> model.title
        'maker (Linear), critic (Linear)'
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(parts)
        # The stand-in is not one of the modules whose mode the loop sets: it says what its parts do.
        self.training = any(part.training for part in parts.values())

    @property
    def title(self) -> str:
        """The parts and what they are."""
        return ", ".join(f"{name} ({type(part).__name__})" for name, part in self._modules.items())

    def forward(self) -> None:
        """There is nothing to compute."""


def roots_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that can be called: of a mere holder (`ModuleDict`, `ModuleList`, `Parts`) what it holds.

    Example:
        >>> a, b = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> roots_of(nn.ModuleDict({"a": a, "more": nn.ModuleList([b])})) == [a, b]
        True
        >>> roots_of(a) == [a]
        True
    """
    return list(dict.fromkeys(_roots(model)))


def _roots(model: nn.Module) -> Iterator[nn.Module]:
    uncallable = type(model).forward is nn.Module.forward and "forward" not in vars(model)
    if isinstance(model, Parts) or uncallable:
        for child in model.children():
            yield from _roots(child)
    else:
        yield model


def check_model(model: object) -> nn.Module:
    """The model, if it can be guarded; several in a dict are guarded together, under their names."""
    if isinstance(model, Mapping) and not isinstance(model, nn.Module):
        wrong = {key: one for key, one in model.items() if not isinstance(one, nn.Module)}
        if wrong or not model:
            told = ", ".join(f"{key!r} is a {type(one).__name__}" for key, one in wrong.items()) or "it is empty"
            raise InputError(f"model is a dict, and {told}; expected names with a torch.nn.Module each")
        model = Parts({str(key): one for key, one in model.items()})
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise InputError(
            f"the model ({type(model).__name__}) has no parameters; expected at least one. "
            "Build its layers (and run one forward pass if they are lazy) before the guard."
        )
    return model
