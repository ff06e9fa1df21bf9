"""A copy of part of the weights and moments, kept between steps: who else wrote to them, and how far a step went.

Only the leading elements of each tensor are kept, up to a budget for the whole model, so that comparing costs a few
microseconds. On accelerators the copy is taken around the steps that are looked at thoroughly.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.core.contain import Contained
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.native import native
from trimtab.sample.transfer import to_host
from trimtab.torchutil.averaged_weights import averaged_weights
from trimtab.torchutil.patch import own_hook

BUDGET = 1 << 12
MIN_KEPT = 64
NUM_NAMED = 4
NUM_MOMENTS = 24
EVERY = 4
"""Steps between two looks at the sum of second moments, and between two comparisons of the moments by value.

In between their version counters are compared, which every operation of PyTorch moves: only what is written past it
(raw memory, `.data`) into a moment is seen between one pair of steps in four. Weights are compared by value each time.
"""
Named = Sequence[tuple[str, Tensor]]


def is_plain(tensor: Tensor) -> bool:
    """Whether all of a tensor is here: of a sharded one only a part is."""
    return not hasattr(tensor, "to_local")


class Part:
    """The leading elements of some tensors, side by side in one flat array."""

    def __init__(self, named: Named, budget: int = BUDGET) -> None:
        named = [(n, t) for n, t in named if t.numel() and is_plain(t)]
        tensors = [t for _, t in named]
        share = min(1.0, budget / max(sum(t.numel() for t in tensors), 1))
        self._hold(
            [n for n, _ in named], tensors, [min(t.numel(), max(MIN_KEPT, int(t.numel() * share))) for t in tensors]
        )

    def _hold(self, names: list[str], tensors: list[Tensor], counts: list[int]) -> None:
        self.names, self.tensors, self._counts = names, tensors, counts
        self.bounds = [0, *accumulate(counts)]
        self.size = self.bounds[-1]
        self.on_host = all(t.is_cpu for t in tensors)
        self._views: list[NDArray[Any]] = []
        self._at: list[int] = []
        # The same for the compiled readings; empty where the tensors are not what these can read.
        self._plain: tuple[list[Tensor], NDArray[np.int64], NDArray[np.int64]] | None = None

    def __add__(self, other: Part) -> Part:
        """Both in one, which is read at once."""
        both = Part([])
        both._hold(self.names + other.names, self.tensors + other.tensors, self._counts + other._counts)
        return both

    def sum(self) -> Tensor:
        """One number on the device that changes when anything here does."""
        return torch.stack(
            [t.detach().reshape(-1)[:n].sum() for t, n in zip(self.tensors, self._counts, strict=True)]
        ).sum()

    def read(self, out: NDArray[np.float32], *, moved: bool = True) -> None:
        """Copy what the tensors hold now. `moved`: others may have put new storage under one since."""
        if moved or not self._at:
            at = [t.data_ptr() for t in self.tensors]
            if at != self._at:
                self._point(at)
        if self._views:
            np.concatenate(self._views, out=out)
        else:
            self._read_one_by_one(out)

    def _point(self, at: list[int]) -> None:
        self._at = at
        pairs = list(zip(self.tensors, self._counts, strict=True))
        fast = all(t.is_cpu and t.dtype is torch.float32 and t.is_contiguous() and t.numel() >= n for t, n in pairs)
        self._views = [to_host(t).reshape(-1)[:n] for t, n in pairs] if fast else []
        arrays = np.array(at, np.int64), np.array(self._counts, np.int64)
        self._plain = (self.tensors, *arrays) if fast and native is not None else None

    def same(self, kept: NDArray[np.float32], room: NDArray[np.float32]) -> bool:
        """Whether the tensors still hold what is kept of them; if not, what they hold now is in `room`."""
        if self._plain is not None and native.same(*self._plain, kept):
            return True
        self.read(room)
        return np.array_equal(room, kept)

    def keep(self, kept: NDArray[np.float32], room: NDArray[np.float32], *, moved: bool) -> tuple[float, float]:
        """Copy what the tensors hold now: the sum of its squares, and of those of what was added to what was kept.

        `moved`: new storage may be under one since. Neither products nor PyTorch warn of what is looked for.
        """
        if self._plain is not None and (sums := native.keep(*self._plain, kept)) is not None:
            return sums  # type: ignore[no-any-return]
        self.read(room, moved=moved)
        size = float(np.vdot(room, room))
        change = torch.from_numpy(room).sub(torch.from_numpy(kept)).numpy()
        kept[:] = room
        return size, float(np.vdot(change, change))

    def _read_one_by_one(self, out: NDArray[np.float32]) -> None:
        for tensor, count, start in zip(self.tensors, self._counts, self.bounds, strict=False):
            flat = to_host(measure.plain(tensor).reshape(-1)[:count].float())
            out[start : start + count] = flat if flat.size == count else 0.0


class Kept:
    """Copied weights and moments in one array."""

    def __init__(self, num_weights: int, num_moments: int = 0, num_counters: int = 0) -> None:
        ends = num_weights, num_weights + num_moments
        values = np.zeros(ends[1] + num_counters, np.float32)
        self.weights, self.moments, self.counters = np.split(values, ends)
        self.state = values[num_weights:]
        self.flat_moments = torch.from_numpy(values)[ends[0] : ends[1]]


class Ledger:
    """What the weights and moments of one optimizer were after its last step."""

    def __init__(self, optimizer: Any, names: Sequence[str], params: Sequence[Tensor], contained: Contained) -> None:
        self._optimizer = optimizer
        self._names = dict(zip(map(id, params), names, strict=True))
        self._weights, self._moments = Part(list(zip(names, params, strict=True))), Part([])
        self._counters = Part([])  # the first of the optimizer's own counts of its steps, where it is a tensor
        self._state = self._moments  # and the counters: what is read at once
        self._slots: list[tuple[Mapping[str, Any], str]] = []
        self._held: list[Tensor] = []
        self._versions: list[int] | NDArray[np.int64] = []  # of what is held, after the last step
        self._num_state = -1
        self._squares: Tensor | None = None
        self._counter: float | None = None  # where it is a plain number
        # What was there after the last step, and after `before` what this one begins with; and room to read into.
        self._kept, self._now = Kept(self._weights.size), Kept(self._weights.size)
        self._step = 0
        self._valid = False
        self._declared = False
        # PyTorch's own classes write into what is there. Others may put new tensors in its place in every step.
        self._writes_in_place = type(optimizer).__module__.startswith("torch.optim")
        self._undo = [
            own_hook(hook(contained.hook("noting loaded optimizer state", self._on_load))).remove
            for hook in (getattr(optimizer, "register_load_state_dict_post_hook", None),)
            if hook is not None
        ]

    def _on_load(self, *args: object) -> None:
        self.declare()

    def declare(self) -> None:
        """Weights or moments were loaded: what they are now is what they should be."""
        self._declared = True
        self._num_state = -1

    def remove(self) -> None:
        """Take the hook off the optimizer."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def before(self) -> tuple[dict[str, float], dict[str, tuple[str, ...]]]:
        """Before a step: what was changed since the last one by anybody else."""
        facts: dict[str, float] = {}
        notes: dict[str, tuple[str, ...]] = {}
        self._step += 1
        replaced = self._repoint()
        now, kept = self._now, self._kept
        if self._valid and not self._declared:
            self._lost(facts)
            state = replaced or not self._writes_in_place or self._step % EVERY == 0 or not self._is_same_version()
            state = state and now.state.size > 0 and not self._state.same(kept.state, now.state)
            weights = not self._weights.same(kept.weights, now.weights)
            if state or weights:
                self._compare(facts, notes, state=state, weights=weights)
            if weights:
                kept.weights[:] = now.weights
        else:
            self._weights.read(kept.weights)
        self._declared = False
        return facts, notes

    def _is_same_version(self) -> bool:
        """Whether no operation of PyTorch wrote to the moments since the last step."""
        if isinstance(self._versions, np.ndarray):
            if len(self._versions) != len(self._held):
                return False
            same: bool = native.versions(self._held, self._versions)
            return same
        return [t._version for t in self._held] == self._versions

    def after(self) -> tuple[dict[str, float], dict[str, tuple[str, ...]]]:
        """After it: how far it moved the weights, relative to their size."""
        facts: dict[str, float] = {}
        notes: dict[str, tuple[str, ...]] = {}
        if not self._writes_in_place:
            self._repoint()
        if len(getattr(self._optimizer, "state", ())) != self._num_state:
            self._refresh()
        elif self._counter is not None:
            self._counter = self._count()
        kept, now, elsewhere = self._kept, self._now, not self._writes_in_place
        size, moved = self._weights.keep(kept.weights, now.weights, moved=elsewhere)
        self._valid = True
        if size < math.inf and moved < math.inf:
            facts["update_ratio"] = math.sqrt(moved / max(size, 1e-30))
        else:
            self._count_bad(facts, notes, "weights_bad", kept.weights, self._weights)
        if native is None:
            self._versions = [t._version for t in self._held]
        elif len(self._versions) == len(self._held) and isinstance(self._versions, np.ndarray):
            native.versions(self._held, self._versions)
        else:
            self._versions = np.array([t._version for t in self._held], np.int64)
        if kept.state.size and not self._state.keep(kept.state, now.state, moved=elsewhere)[0] < math.inf:
            self._count_bad(facts, notes, "state_bad", kept.moments, self._moments)
        return facts, notes

    def _count_bad(
        self,
        facts: dict[str, float],
        notes: dict[str, tuple[str, ...]],
        name: str,
        values: NDArray[np.float32],
        part: Part,
    ) -> None:
        """Note how many values are not finite, and of which tensors: sums overflow on finite ones, too."""
        bad = ~np.isfinite(values)
        if bad.any():
            facts[name] = float(bad.sum())
            notes[name] = self._named(bad, part)

    def _repoint(self) -> bool:
        """Look at the moments that are there now, where somebody replaced the old ones; whether that is so."""
        if native is not None and native.held(self._slots, self._held):
            return False
        now = [entries.get(key) for entries, key in self._slots]
        if not any(map(operator.is_not, now, self._held)):
            return False
        known = self._moments, self._counters
        self._look_up()
        new = self._moments, self._counters
        if any(a.bounds != b.bounds or a.names != b.names for a, b in zip(known, new, strict=True)):
            self._moments, self._counters, self._slots, self._held = Part([]), Part([]), [], []
            self._num_state, self._squares = -1, None
            self._resize()
        self._state = self._moments + self._counters
        return True

    def _resize(self) -> None:
        """Make room for the moments there are; what is known of the weights stays."""
        for name in ("_kept", "_now"):
            new = Kept(self._weights.size, self._moments.size, self._counters.size)
            new.weights[:] = getattr(self, name).weights
            setattr(self, name, new)

    def _look_up(self) -> None:
        """Find every moment, and the place where the optimizer keeps it."""
        state: Mapping[Any, Any] = getattr(self._optimizer, "state", {})
        found, slots = [], []
        for p, entries in state.items():
            for key, value in entries.items() if isinstance(entries, Mapping) else ():
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1 and is_plain(value):
                    found.append((f"{self._names.get(id(p), 'unnamed')}: {key}", value))
                    slots.append((entries, key))
        every = max(len(found) // NUM_MOMENTS, 1)  # each costs a view a look: of many, some stand for all
        first = next(iter(state.values()), None)
        steps = first.get("step") if isinstance(first, Mapping) else None
        known = isinstance(first, Mapping) and isinstance(steps, Tensor) and steps.is_cpu and steps.numel() == 1
        self._moments, self._slots = Part(found[::every], BUDGET // 2), slots[::every]
        self._counters = Part([("step", steps)] if known and isinstance(steps, Tensor) else [])
        if known and isinstance(first, Mapping):
            self._slots.append((first, "step"))
        self._held = self._moments.tensors + self._counters.tensors

    def _refresh(self) -> None:
        """Moments appear with the first step, and with every parameter that gets its first gradient."""
        self._num_state = len(getattr(self._optimizer, "state", ()))
        self._look_up()
        self._squares = self._weigh()
        self._resize()
        self._state = self._moments + self._counters
        self._counter = None if self._counters.size else self._count()

    def _weigh(self) -> Tensor | None:
        """For each kept second moment how many elements it stands for: their sum is what Adam expects of a gradient."""
        moments = self._moments
        if not any(name.endswith(": exp_avg_sq") for name in moments.names):
            return None
        out = torch.zeros(moments.size, dtype=torch.float32, device="cpu")
        for name, tensor, (a, b) in zip(moments.names, moments.tensors, pairwise(moments.bounds), strict=True):
            if name.endswith(": exp_avg_sq"):
                out[a:b] = tensor.numel() / (b - a)
        return out

    @property
    def due(self) -> bool:
        """Whether this step is one after which second moments are summed."""
        return self._squares is not None and self._step % EVERY == 0

    def second_moment(self) -> float | None:
        """The sum of Adam's second moments, corrected for its start; None for other optimizers, and between looks."""
        if self._squares is None or not self.due:
            return None
        steps = float(self._kept.counters[0]) if self._counters.size else self._counter
        beta = self._optimizer.param_groups[0].get("betas", (0.9, 0.999))[1]
        if not steps or not isinstance(beta, float):
            return None
        total = float(torch.dot(self._kept.flat_moments, self._squares))
        return total / max(1.0 - float(beta**steps), 1e-12)

    def _count(self) -> float | None:
        """How many steps the optimizer believes to have made, where it keeps a plain number."""
        for entries in getattr(self._optimizer, "state", {}).values():
            steps = entries.get("step") if isinstance(entries, Mapping) else None
            return float(steps) if isinstance(steps, int | float) else None
        return None

    def _lost(self, facts: dict[str, float]) -> None:
        """Note a state that is gone, or that began again."""
        if self._num_state > 0 and not getattr(self._optimizer, "state", {}):
            facts["state_lost"] = float(self._num_state)
            self._num_state = -1
        elif self._counter is not None and (count := self._count()) is not None and count < self._counter:
            facts["state_lost"] = self._counter - count
            self._num_state = -1

    def _compare(
        self, facts: dict[str, float], notes: dict[str, tuple[str, ...]], *, state: bool, weights: bool
    ) -> None:
        kept, now, none = self._kept, self._now, np.zeros(0)
        with np.errstate(all="ignore"):
            changes = _changes(kept.weights, now.weights, self._weights.bounds) if weights else none
            moments = _changes(kept.moments, now.moments, self._moments.bounds) if state else none
        if changes.size and changes.max() > 0:
            facts["outside"] = float(changes.max())
            notes["outside"] = _top(changes, self._weights.names)
        if moments.size and moments.max() > 0:
            facts["state_outside"] = float(moments.max())
            notes["state_outside"] = _top(moments, self._moments.names)
            if not now.moments.any() and kept.moments.any():
                facts["state_lost"] = float(len(self._moments.names))
            self._count_bad(facts, notes, "state_bad", now.moments, self._moments)
        if state and kept.counters.size and now.counters[0] < kept.counters[0]:
            facts["state_lost"] = float(kept.counters[0] - now.counters[0])
            self._num_state = -1

    def _named(self, bad: NDArray[np.bool_], part: Part) -> tuple[str, ...]:
        spans = enumerate(pairwise(part.bounds))
        return tuple(part.names[i] for i, (a, b) in spans if bad[a:b].any())[:NUM_NAMED]


def _changes(old: NDArray[np.float32], new: NDArray[np.float32], bounds: Sequence[int]) -> NDArray[np.float64]:
    """Per tensor, the size of the change relative to what was there; inf where it is not finite now."""
    if not old.size:
        return np.zeros(0)
    starts = list(bounds[:-1])
    wide, other = old.astype(np.float64), new.astype(np.float64)
    moved = np.sqrt(np.add.reduceat((other - wide) ** 2, starts))
    counts = np.diff(bounds)
    size = np.sqrt(np.add.reduceat(wide**2, starts))
    # A bias that is still near zero moves by many times its size: it is measured by the size of its neighbours.
    each = size / np.sqrt(counts)
    usual = float(np.median(each[np.isfinite(each)])) if np.isfinite(each).any() else 0.0
    ratio = moved / np.maximum(np.maximum(size, 0.3 * usual * np.sqrt(counts)), 1e-12)
    return np.where(np.isnan(ratio), np.where(np.isnan(size), 0.0, np.inf), ratio)


def _top(values: NDArray[np.float64], names: Sequence[str]) -> tuple[str, ...]:
    order = np.argsort(-values, kind="stable")[:NUM_NAMED]
    return tuple(names[i] for i in order if values[i] > 0)


NUM_TENSORS = 16


class AveragedProbe:
    """Counts the steps since the averaged weights last moved, and looks for NaN and Inf in them."""

    def __init__(self, ema: object) -> None:
        self._ema = ema
        found = [(n, t) for n, t in averaged_weights(ema) if t.is_floating_point()]
        # All of it moves or none: a few tensors tell, and on a device each costs a launch.
        self._part = Part(found[:: max(len(found) // NUM_TENSORS, 1)], BUDGET)
        self._last = np.zeros(self._part.size, np.float32)
        self._now = np.zeros(self._part.size, np.float32)
        self._still = self._moves = 0
        if self._part.size and self._part.on_host:
            self._part.read(self._last)

    def look(self) -> tuple[dict[str, float | Tensor], dict[str, tuple[str, ...]]]:
        """Once a step."""
        if not self._part.size:
            return {}, {}
        if not self._part.on_host:
            waiting = self._is_waiting()
            return ({} if waiting else {"ema_sum": self._part.sum()}), {}
        self._part.read(self._now)
        moved = not np.array_equal(self._now.view(np.uint32), self._last.view(np.uint32))
        self._still = 0 if moved else self._still + 1
        self._moves += moved
        self._last, self._now = self._now, self._last
        facts: dict[str, float | Tensor] = {"ema_still": float(self._still)}
        if self._moves == 0 and self._is_waiting():
            facts = {}  # an average that is told to begin later (SWA) has not begun
        bad = ~np.isfinite(self._last)
        if not bad.any():
            return facts, {}
        spans = zip(self._part.names, self._part.bounds[:-1], self._part.bounds[1:], strict=True)
        return facts | {"ema_bad": float(bad.sum())}, {"ema_bad": tuple(n for n, a, b in spans if bad[a:b].any())[:4]}

    def _is_waiting(self) -> bool:
        started = getattr(self._ema, "n_averaged", None)
        return isinstance(started, Tensor) and started.is_cpu and not float(started) > 0
