"""A copy of everything a step changes: weights, buffers, optimizer state, averaged weights; and putting it back."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.sample.averaged import averaged_tensors

Key = tuple[Hashable, ...]
_NO_STATE = frozenset({"params", "lr", "initial_lr"})


class Copied:
    """Where a guarded run keeps its state, and how to copy it fast: into the memory of a copy no longer needed."""

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Any], ema: Any) -> None:
        self._model, self._optimizers, self._ema = model, optimizers, ema

    def live(self) -> tuple[dict[Key, Tensor], dict[Key, Any]]:
        """Every tensor there is now, and every number beside them."""
        tensors: dict[Key, Tensor] = {("model", n): p.detach() for n, p in self._model.named_parameters()}
        tensors |= {("model", n): b.detach() for n, b in self._model.named_buffers()}
        tensors |= {("ema", n): t.detach() for n, t in _averaged(self._ema)}
        others: dict[Key, Any] = {}
        for label, optimizer in self._optimizers.items():
            places = _places(optimizer)
            for owner, entries in getattr(optimizer, "state", {}).items():
                where = places.get(id(owner), owner if isinstance(owner, str) else None)
                if where is None:
                    continue
                if not isinstance(entries, Mapping):
                    others[("state", label, where)] = entries
                    continue
                for name, value in entries.items():
                    (tensors if isinstance(value, Tensor) else others)[("state", label, where, name)] = value
            for i, group in enumerate(optimizer.param_groups):
                for name in group.keys() - optimizer.defaults.keys() - _NO_STATE:
                    if isinstance(group[name], bool | int | float):
                        others[("group", label, i, name)] = group[name]
        return tensors, others

    def num_bytes(self) -> int:
        """How much one copy takes."""
        return sum(t.numel() * t.element_size() for t in self.live()[0].values())

    @torch.no_grad()
    def take(self, spare: dict[Key, Tensor] | None = None) -> tuple[dict[Key, Tensor], dict[Key, Any]]:
        """A copy of all of it; `spare` is memory that may be written over."""
        live, others = self.live()
        kept = copy.deepcopy(others)
        if spare is not None and spare.keys() == live.keys() and all(_alike(live[k], spare[k]) for k in live):
            torch._foreach_copy_([spare[k] for k in live], list(live.values()))
            return spare, kept
        return {key: tensor.clone() for key, tensor in live.items()}, kept

    @torch.no_grad()
    def put_back(self, tensors: Mapping[Key, Tensor], others: Mapping[Key, Any]) -> int:
        """Write a copy over what is there now, in place; returns how many tensors are no longer there to be written.

        It may lie on another device.
        """
        live, _ = self.live()
        fit = [k for k in tensors if k in live and _same_kind(live[k], tensors[k])]
        if fit:
            torch._foreach_copy_([live[k] for k in fit], [tensors[k] for k in fit])
        missing = [k for k in tensors if k[0] != "state" and (k not in live or not _same_kind(live[k], tensors[k]))]
        for label, optimizer in self._optimizers.items():
            self._put_state_back(label, optimizer, tensors, others, set(fit))
        return len(missing)

    @torch.no_grad()
    def put_buffers_back(self, tensors: Mapping[Key, Tensor]) -> bool:
        """Write back what forward passes left behind (running averages), nothing else; whether there is any."""
        live = {k: b for n, b in self._model.named_buffers() if (k := ("model", n)) in tensors}
        fit = [(b.detach(), tensors[k]) for k, b in live.items() if _same_kind(b, tensors[k])]
        return [buffer.copy_(kept) for buffer, kept in fit] != []

    def _put_state_back(
        self, label: str, optimizer: Any, tensors: Mapping[Key, Tensor], others: Mapping[Key, Any], done: set[Key]
    ) -> None:
        """State that was lost is made again, state that was not there yet goes, the rest was written in place."""
        state = getattr(optimizer, "state", None)
        if state is None:
            return
        owners: dict[Hashable, Tensor] = dict(enumerate(_params(optimizer)))
        kept = {**tensors, **others}
        mine = [k for k in kept if k[:2] == ("state", label)]
        wanted = {k[2] for k in mine}
        for i, p in owners.items():
            if i not in wanted:
                state.pop(p, None)
        for key in mine:
            where = key[2]
            owner = owners.get(where) if isinstance(where, int) else where
            if owner is None or key in done:
                continue
            value = kept[key].clone() if isinstance(kept[key], Tensor) else copy.deepcopy(kept[key])
            if len(key) == 3:
                state[owner] = value
            else:
                state.setdefault(owner, {})[key[3]] = value
        for i in wanted & owners.keys():
            entries = state.get(owners[i])
            names = {k[3] for k in mine if k[2] == i and len(k) == 4}
            for name in [n for n in entries if n not in names] if isinstance(entries, dict) and names else ():
                del entries[name]
        for key, value in others.items():
            if key[:2] == ("group", label) and key[2] < len(optimizer.param_groups):  # type: ignore[operator]
                optimizer.param_groups[key[2]][key[3]] = value


def _params(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _places(optimizer: Any) -> dict[int, int]:
    """Where each parameter stands: groups are only ever added behind the others."""
    return {id(p): i for i, p in enumerate(_params(optimizer))}


def _averaged(ema: Any) -> list[tuple[str, Tensor]]:
    if isinstance(ema, nn.Module):
        return [*ema.named_parameters(), *ema.named_buffers()]
    return [] if ema is None else averaged_tensors(ema)


def _alike(one: Tensor, other: Tensor) -> bool:
    return _same_kind(one, other) and one.device == other.device


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
