"""How model and optimizer belong together: what the optimizer misses or holds in vain, which ties broke, and which
parameter is the temperature of a softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.sample.rows import Rows
from trimtab.sample.transfer import Later, Notes, is_here, number, sent
from trimtab.torchutil.module_tree import ModuleTree
from trimtab.torchutil.optimizers import params_of

EARLY = (2, 4, 8)
EVERY = 10
NUM_NAMED = 8
NEVER_STEPPED = 60
"""Steps of one optimizer after which another that has not made one has been forgotten."""
NEVER, MOVED = -1, -2


def is_due(step: int) -> bool:
    """Whether anything is looked at in this step."""
    return step % EVERY == 0 or step in EARLY


class Wiring:
    """Looks in the first steps, and now and then ever after."""

    def __init__(self, model: nn.Module, optimizers: list[Any]) -> None:
        self._model, self._optimizers = model, optimizers
        self._versions: dict[int, int] = {}
        self._rows: Rows | None = None
        self._tree = ModuleTree(model)
        self._there: list[int] = []
        self._still: dict[int, tuple[Tensor, int, int]] = {}  # by optimizer, one of its parameters as it was, and when
        self._free: dict[str, nn.Parameter] = {}
        self._ties = tied_pairs(model)
        self._split = split_twins(model)

    def look(self, step: int, rows: Rows) -> tuple[dict[str, float], dict[str, tuple[str, ...]]]:
        """The facts of this step; nothing on most steps."""
        if not is_due(step):
            return {}, {}
        facts: dict[str, float] = {}
        notes: dict[str, tuple[str, ...]] = {}
        self._held(facts, notes, rows)
        if len(self._optimizers) > 1:
            self._stepped(step, facts, notes)
        broken = [
            f"{a} and {b}" for a, b in self._ties if parameter_at(self._model, a) is not parameter_at(self._model, b)
        ]
        broken += self._split if step in EARLY else []
        if broken:
            facts["untied"] = float(len(broken))
            notes["untied"] = tuple(broken[:NUM_NAMED])
        return facts, notes

    def find(self, rows: Rows) -> None:
        """Find the parameters that no optimizer holds; where nothing has changed, the last answer still holds."""
        if self._tree.has_changed() or rows is not self._rows:  # names cost most
            self._there = [id(p) for p in self._model.parameters()]
            held = {id(p) for p in params_of(*self._optimizers)}
            self._free = {n: p for n, p in self._model.named_parameters() if id(p) not in held}
            self._rows = rows

    def _held(self, facts: dict[str, float], notes: dict[str, tuple[str, ...]], rows: Rows) -> None:
        self.find(rows)
        if not self._free:
            return
        # A parameter whose values somebody moves has an optimizer we were not told of.
        loose = {n: p for n, p in self._free.items() if p.requires_grad and p.grad is not None}
        unheld = {n: p for n, p in loose.items() if self._versions.get(id(p)) == p._version}
        self._versions = {id(p): p._version for p in loose.values()}
        if not unheld:
            return
        facts["unheld"] = float(len(unheld))
        whole = sum(p.numel() for p in self._model.parameters())
        facts["unheld_share"] = sum(p.numel() for p in unheld.values()) / whole
        notes["unheld"] = tuple(unheld)[:NUM_NAMED]
        known = set(self._there)
        idle = [p for p in rows.params if id(p) not in known and p.grad is None]
        if idle:
            facts["idle"] = float(len(idle))

    def _stepped(self, step: int, facts: dict[str, float], notes: dict[str, tuple[str, ...]]) -> None:
        """Name parameters that get gradients and that their optimizer, one of several, has never moved so far."""
        names: list[str] = []
        for optimizer in self._optimizers:
            params = params_of(optimizer)
            live = next((p for p in params if p.grad is not None and p.requires_grad), None)
            param, version, since = self._still.get(id(optimizer), (None, -1, NEVER))
            if since == MOVED or (param is not None and param._version != version):
                self._still[id(optimizer)] = params[0], -1, MOVED  # once is enough: others may step more rarely
            elif param is None and live is not None:
                self._still[id(optimizer)] = live, live._version, step
            elif param is not None and param.grad is not None and step - since >= NEVER_STEPPED:
                known = {id(p): n for n, p in self._model.named_parameters()}
                names += [known.get(id(p), "unnamed") for p in params if p.grad is not None]
        if names:
            facts["unstepped"] = float(len(names))
            notes["unstepped"] = tuple(names[:NUM_NAMED])


def tied_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Names of parameters that are one and the same tensor, in pairs."""
    first: dict[int, str] = {}
    pairs = []
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            pairs.append((first[id(p)], name))
        else:
            first[id(p)] = name
    return pairs


def parameter_at(model: nn.Module, name: str) -> Tensor | None:
    """The parameter of this name; None where there is none."""
    path, _, last = name.rpartition(".")
    try:
        return dict(model.get_submodule(path).named_parameters(recurse=False, remove_duplicate=False)).get(last)
    except AttributeError:
        return None


def split_twins(model: nn.Module) -> list[str]:
    """An embedding and a linear layer with equal values in different memory: a tie that was broken before we came."""
    # Never by attribute: reading the weight of a parametrised layer computes it, and moves its buffers.
    plain = {n: dict(m.named_parameters(recurse=False)).get("weight") for n, m in model.named_modules()}
    kinds = {n: type(m) for n, m in model.named_modules()}
    tables = [(n, w) for n, w in plain.items() if w is not None and issubclass(kinds[n], nn.Embedding)]
    heads = [(n, w) for n, w in plain.items() if w is not None and issubclass(kinds[n], nn.Linear)]
    return [
        f"{a}.weight and {b}.weight"
        for a, one in tables
        for b, other in heads
        if one is not other and one.shape == other.shape and one.requires_grad and other.requires_grad
        if one.device == other.device and torch.equal(one, other) and number_of_values(one) > 1
    ]


def number_of_values(tensor: Tensor) -> int:
    """How many different values there are, counted up to two: constant tensors are equal by initialisation."""
    flat = tensor.detach().reshape(-1)
    return 1 if torch.equal(flat, flat[:1].expand_as(flat)) else 2


SEARCH_EVERY = 5
_WORDS = ("logit_scale", "temperature", "temp", "tau", "inv_temp", "log_scale")


class TemperatureProbe:
    """Reads single-number parameters with telling names."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self.found = [
            (name, p, _is_log(name, number(p.detach().reshape(()))), _is_inverse(name))
            for name, p in zip(names, params, strict=True)
            if p.numel() == 1 and p.is_floating_point()
            if any(word in name.rpartition(".")[2].lower() for word in _WORDS)
        ]
        self._on_host = all(is_here(p) for _, p, *_ in self.found)

    def look(self, step: int) -> tuple[dict[str, float], Notes]:
        """The factor farthest from 1, now and then; nothing where one is on a device."""
        if not self.found or step % SEARCH_EVERY or not self._on_host:
            return {}, {}
        return self._farthest([p for _, p, *_ in self.found])

    def delayed(self, step: int) -> Later | None:
        """The same for those on a device, once they have arrived."""
        if not self.found or step % SEARCH_EVERY or self._on_host:
            return None
        copies = [sent(p) for _, p, *_ in self.found]

        def later(facts: dict[str, float], notes: Notes) -> None:
            found, named = self._farthest(copies)
            facts |= found
            notes |= named

        return later

    def _farthest(self, values: Sequence[Tensor]) -> tuple[dict[str, float], Notes]:
        factors = []
        for one, (name, _, is_log, is_inverse) in zip(values, self.found, strict=True):
            value = number(one.detach().reshape(()))
            if not math.isfinite(value):
                continue
            factor = math.exp(max(min(value, 60.0), -60.0)) if is_log else abs(value)
            factors.append((1.0 / max(factor, 1e-30) if is_inverse else factor, name))
        if not factors:
            return {}, {}
        factor, name = max(factors, key=lambda f: abs(math.log(max(f[0], 1e-30))))
        return {"temperature": factor}, {"temperature": (name,)}


def _is_log(name: str, value: float) -> bool:
    """CLIP keeps the logarithm, 2.66 at first, under the name logit_scale; others begin at 1, or far above 5."""
    last = name.rpartition(".")[2].lower()
    return last.startswith("log_") or ("logit_scale" in last and 2.0 <= value <= 5.0)


def _is_inverse(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return ("temp" in last or "tau" in last) and "inv" not in last
