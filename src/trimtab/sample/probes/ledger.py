"""A copy of part of the weights and moments, kept between steps: who else wrote to them, and how far a step went.

Only the leading elements of each tensor are kept, up to a budget for the whole model, so that comparing costs a few
microseconds. What lies on an accelerator is sent to the host before and after each step, and compared there by the same
code when the step is due.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.core.contain import Contained
from trimtab.core.types import F32
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.graphs import recorded
from trimtab.sample.measure.native import native
from trimtab.sample.transfer import Copies, Later, Notes, is_here, sent, to_host
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
SPAN = 20
"""Steps over which it is seen whether others take back what the steps add."""
Named = Sequence[tuple[str, Tensor]]


_WHOLE = (Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether all of a tensor is here: of a sharded one only a part is."""
    return tensor.__class__ in _WHOLE or not hasattr(tensor, "to_local")


class _OfOneType:
    """Those of some tensors on a device that have one type: read at once, and widened at once.

    A `torch.cat` that has to convert launches a kernel for every tensor.
    """

    def __init__(self, leads: Sequence[Tensor], bounds: Sequence[int], dtype: torch.dtype) -> None:
        mine = [i for i, lead in enumerate(leads) if lead.dtype is dtype]
        self._leads = [leads[i] for i in mine]
        device = self._leads[0].device
        self._begin, self._end = bounds[mine[0]], bounds[mine[-1] + 1]
        size = sum(lead.numel() for lead in self._leads)
        self._narrow = torch.empty(size, dtype=dtype, device=device)
        self._wide: Tensor | None = None
        if size != self._end - self._begin:  # others lie between them
            places = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in mine])
            index = torch.from_numpy(places)
            if device.type == "cuda":
                index = index.pin_memory()  # or the host would wait until it is there
            self._index = index.to(device, non_blocking=True)
            self._wide = torch.empty(size, dtype=torch.float32, device=device)

    def gather(self, out: Tensor) -> None:
        """Put them where they belong."""
        torch.cat(self._leads, out=self._narrow)
        if self._wide is None:
            out[self._begin : self._end].copy_(self._narrow)
            return
        self._wide.copy_(self._narrow)
        out.index_copy_(0, self._index, self._wide)


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
        self.on_host = all(map(is_here, tensors))
        self._views: list[NDArray[Any]] = []
        self._at: list[int] = []
        # The same on a device, and whether it can be read there again and again.
        self.leads: list[Tensor] = []
        self._leads_at: list[int] = []
        self._by_type: list[_OfOneType] = []
        self.stays = True
        # The same for the compiled readings; empty where the tensors are not what these can read.
        self.plain: tuple[list[Tensor], NDArray[np.int64], NDArray[np.int64]] | None = None

    def __add__(self, other: Part) -> Part:
        """Both in one, which is read at once."""
        both = Part([])
        both._hold(self.names + other.names, self.tensors + other.tensors, self._counts + other._counts)
        return both

    def look_up(self) -> bool:
        """Find what the tensors hold on their device; whether it lies elsewhere than before."""
        at = list(map(Tensor.data_ptr, self.tensors))
        if at == self._leads_at and self.stays:
            return False
        self._leads_at = at
        plain = [measure.plain(t) for t in self.tensors]
        self.leads = [t.reshape(-1)[:n] for t, n in zip(plain, self._counts, strict=True)]
        # reshape copies what is not contiguous: a copy would not change any more.
        self.stays = all(v.data_ptr() == a for v, a in zip(self.leads, at, strict=True))
        types = list(dict.fromkeys(lead.dtype for lead in self.leads))
        self._by_type = [] if types == [torch.float32] else [_OfOneType(self.leads, self.bounds, t) for t in types]
        return True

    def gather(self, out: Tensor) -> None:
        """Copy what the tensors hold on their device, side by side, as float32. `look_up` has found them."""
        if not self._by_type:
            torch.cat(self.leads, out=out)
        for one in self._by_type:
            one.gather(out)

    def sent(self) -> Tensor:
        """What the tensors hold now, in one float32 copy that is on its way to the host."""
        self.look_up()
        return sent(torch.cat(self.leads).float())

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
        self.plain = (self.tensors, *arrays) if fast and native is not None else None

    def same(self, kept: NDArray[np.float32], room: NDArray[np.float32]) -> bool:
        """Whether the tensors still hold what is kept of them; if not, what they hold now is in `room`."""
        if self.plain is not None and native.same(*self.plain, kept):
            return True
        self.read(room)
        return np.array_equal(room, kept)

    def keep(self, kept: NDArray[np.float32], room: NDArray[np.float32], *, moved: bool) -> tuple[float, float]:
        """Copy what the tensors hold now: the sum of its squares, and of those of what was added to what was kept.

        `moved`: new storage may be under one since. Neither products nor PyTorch warn of what is looked for.
        """
        if self.plain is not None and (sums := native.keep(*self.plain, kept)) is not None:
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
        self.values, self.state = values, values[num_weights:]
        self.flat_moments = torch.from_numpy(values)[ends[0] : ends[1]]


class PutBack:
    """Whether what others write to the weights, step after step, takes back what the steps add.

    Constraints write after each step as well, and the weights still get somewhere. Noise that goes in and out again
    leaves a difference of its own size. Where all of it together is smaller than half of one write, nothing is left.
    """

    def __init__(self) -> None:
        self._step = -2
        self._anchor: NDArray[np.float32] | None = None
        self._writes: list[float] = []
        self._num = 0

    def see(self, step: int, kept: NDArray[np.float32], now: NDArray[np.float32], facts: dict[str, float]) -> None:
        """Others wrote between the last step, which left what is kept, and this one."""
        follows, self._step = step == self._step + 1, step
        if not follows or self._anchor is None or self._anchor.size != now.size:
            self._anchor, self._writes, self._num = now.copy(), [], 0
            return
        with np.errstate(all="ignore"):
            self._writes.append(_distance(kept, now))
            if len(self._writes) < SPAN:
                return
            is_back = _distance(self._anchor, now) < 0.5 * float(np.median(self._writes))
        self._anchor, self._writes = now.copy(), []
        self._num = self._num + 1 if is_back else 0
        if self._num:
            facts["put_back"] = float(self._num * SPAN)


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
        self._put_back = PutBack()
        self._valid = False
        self._declared = False
        self._known: Held | None = None
        # PyTorch's own classes write into what is there. Others may put new tensors in its place in every step.
        self.writes_in_place = type(optimizer).__module__.startswith("torch.optim")
        self._undo = [
            own_hook(hook(contained.hook("noting loaded optimizer state", self._on_load))).remove
            for hook in (getattr(optimizer, "register_load_state_dict_post_hook", None),)
            if hook is not None
        ]

    def prepare(self) -> None:
        """Find the weights before the first step, which would have to otherwise."""
        if self._weights.on_host:
            self._weights.read(self._kept.weights)

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
        notes: Notes = {}
        if native is not None and self._is_untouched():
            return facts, notes
        compares, state = self.begin(facts)
        now, kept = self._now, self._kept
        if compares:
            state = state and now.state.size > 0 and not self._state.same(kept.state, now.state)
            weights = not self._weights.same(kept.weights, now.weights)
            if (state or weights) and self.held.compare(kept, now, facts, notes, state=state, weights=weights):
                self._num_state = -1
            if weights:
                self._put_back.see(self._step, kept.weights, now.weights, facts)
                kept.weights[:] = now.weights
        else:
            self._weights.read(kept.weights)
        return facts, notes

    def _is_untouched(self) -> bool:
        """The usual step, by the compiled readings alone: nobody else wrote to anything. Else nothing is noted."""
        plain, versions = self._weights.plain, self._versions
        if plain is None or not self._valid or self._declared or not self.writes_in_place or self._counter is not None:
            return False
        if (self._step + 1) % EVERY == 0 or (self._num_state > 0 and not self._optimizer.state):
            return False
        if not native.same(*plain, self._kept.weights) or not native.held(self._slots, self._held):
            return False
        if not isinstance(versions, np.ndarray) or len(versions) != len(self._held):
            return False
        if not native.versions(self._held, versions):
            self._versions = []  # those known were replaced: moments must be compared by value
            return False
        self._step += 1
        return True

    def begin(self, facts: dict[str, float]) -> tuple[bool, bool]:
        """A step begins: whether there is something to compare the weights with, and whether moments are compared."""
        self._step += 1
        replaced = self._repoint()
        compares, self._declared = self._valid and not self._declared, False
        if not compares:
            return False, False
        self._lost(facts)
        state = replaced or not self.writes_in_place or self._step % EVERY == 0 or not self._is_same_version()
        return True, state

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
        notes: Notes = {}
        self.end()
        kept, now, elsewhere = self._kept, self._now, not self.writes_in_place
        size, moved = self._weights.keep(kept.weights, now.weights, moved=elsewhere)
        if not self._weights.size:
            pass  # every weight is in parts that others have, too: only all processes together know how far it went
        elif size < math.inf and moved < math.inf:
            facts["update_ratio"] = math.sqrt(moved / max(size, 1e-30))
        else:
            count_bad(facts, notes, "weights_bad", kept.weights, self._weights)
        if kept.state.size and not self._state.keep(kept.state, now.state, moved=elsewhere)[0] < math.inf:
            count_bad(facts, notes, "state_bad", kept.moments, self._moments)
        return facts, notes

    def end(self) -> None:
        """A step is over: find the moments that it made or replaced, and note that it wrote to them."""
        if not self.writes_in_place:
            self._repoint()
        if len(getattr(self._optimizer, "state", ())) != self._num_state:
            self._refresh()
        elif self._counter is not None:
            self._counter = self._count()
        self._valid = True
        if native is None:
            self._versions = [t._version for t in self._held]
        elif len(self._versions) == len(self._held) and isinstance(self._versions, np.ndarray):
            native.versions(self._held, self._versions)
        else:
            self._versions = np.array([t._version for t in self._held], np.int64)

    @property
    def held(self) -> Held:
        """The tensors that are looked at now; the same object as long as they are."""
        known = self._known
        if known is None or known.moments is not self._moments or known.squares is not self._squares:
            self._known = known = Held(self._weights, self._moments, self._counters, self._state, self._squares)
        return known

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
                if isinstance(value, Tensor) and value.numel() > 1 and value.is_floating_point() and is_plain(value):
                    found.append((p, value))
                    slots.append((entries, key))
        every = max(len(found) // NUM_MOMENTS, 1)  # each costs a view a look: of many, some stand for all
        slots = slots[::every]
        called = [self._names.get(id(p), "unnamed") for p, _ in found[::every]]
        first = next(iter(state.values()), None)
        steps = first.get("step") if isinstance(first, Mapping) else None
        known = isinstance(first, Mapping) and isinstance(steps, Tensor) and steps.numel() == 1
        # A count on the host, of moments that are on a device, is read like a plain number.
        beside = [*(t for _, t in found), *self._weights.tensors]
        known = known and isinstance(steps, Tensor) and all(t.device == steps.device for t in beside)
        named = [(f"{n}: {key}", t) for n, (_, key), (_, t) in zip(called, slots, found[::every], strict=True)]
        self._moments, self._slots = Part(named, BUDGET // 2), slots
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
        return self.held.second_moment(self._kept, *self.start) if self.due else None

    @property
    def start(self) -> tuple[float | None, object]:
        """What the sum of second moments is corrected by: the count of steps, where it is a number, and the decay."""
        return self._counter, self._optimizer.param_groups[0].get("betas", (0.9, 0.999))[1]

    def _count(self) -> float | None:
        """How many steps the optimizer believes to have made, where it keeps a number that the host can read."""
        for entries in getattr(self._optimizer, "state", {}).values():
            steps = entries.get("step") if isinstance(entries, Mapping) else None
            there = isinstance(steps, Tensor) and (steps.numel() > 1 or not is_here(steps))
            return float(steps) if isinstance(steps, int | float | Tensor) and not there else None
        return None

    def _lost(self, facts: dict[str, float]) -> None:
        """Note a state that is gone, or that began again."""
        if self._num_state > 0 and not getattr(self._optimizer, "state", {}):
            facts["state_lost"] = float(self._num_state)
            self._num_state = -1
        elif self._counter is not None and (count := self._count()) is not None and count < self._counter:
            facts["state_lost"] = self._counter - count
            self._num_state = -1


class Held(NamedTuple):
    """The tensors that a ledger looks at, at one time."""

    weights: Part
    moments: Part
    counters: Part
    state: Part  # moments and counters
    squares: Tensor | None  # for each kept second moment how many elements it stands for

    def compare(
        self, kept: Kept, now: Kept, facts: dict[str, float], notes: Notes, *, state: bool, weights: bool
    ) -> bool:
        """Say what differs between two steps; True where the optimizer counts fewer of them than before."""
        none = np.zeros(0)
        with np.errstate(all="ignore"):
            changes = _changes(kept.weights, now.weights, self.weights.bounds) if weights else none
            moments = _changes(kept.moments, now.moments, self.moments.bounds) if state else none
        if changes.size and changes.max() > 0:
            facts["outside"] = float(changes.max())
            notes["outside"] = _top(changes, self.weights.names)
        if moments.size and moments.max() > 0:
            facts["state_outside"] = float(moments.max())
            notes["state_outside"] = _top(moments, self.moments.names)
            if not now.moments.any() and kept.moments.any():
                facts["state_lost"] = float(len(self.moments.names))
            count_bad(facts, notes, "state_bad", now.moments, self.moments)
        if state and kept.counters.size and now.counters[0] < kept.counters[0]:
            facts["state_lost"] = float(kept.counters[0] - now.counters[0])
            return True
        return False

    def second_moment(self, kept: Kept, counter: float | None, beta: object) -> float | None:
        """The sum of Adam's second moments, corrected for its start; None for other optimizers."""
        if self.squares is None:
            return None
        steps = float(kept.counters[0]) if self.counters.size else counter
        return self.corrected(float(torch.dot(kept.flat_moments, self.squares)), steps, beta)

    def corrected(self, total: float, steps: float | None, beta: object) -> float | None:
        """The sum of second moments, corrected for their start; None where it cannot be."""
        if self.squares is None or not steps or not isinstance(beta, float):
            return None
        return total / max(1.0 - float(beta**steps), 1e-12)

    def same(self, other: Held) -> bool:
        """Whether these are the very same tensors."""
        if self is other:
            return True
        return self.names == other.names and all(map(operator.is_, self.tensors, other.tensors))

    @property
    def names(self) -> list[str]:
        """Of all of them."""
        return self.weights.names + self.state.names

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return self.weights.tensors + self.state.tensors


NUM_PLACES = 4
Place = tuple[Any, Tensor, F32 | None]
"""Memory of the host that a copy is sent to: what replays the sending, if anything does, the memory, and its values."""
GRAPH_AFTER = 8
"""Steps with the same tensors after which what is launched for a look at them is recorded as a CUDA graph."""
NUMBERS = ("weights changed", "state changed", "size", "moved", "state size", "second moment")
"""What a device finds out about what it sends, in this order: on most steps nothing else has to be looked at."""
HUGE = 1.8e19
"""A norm whose square is not a float32 any more."""


class Readings:
    """Reads some tensors on a device before and after a step, and sends what they held to the host, with `NUMBERS`."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self._part = held.weights + held.state if held.state.size else held.weights
        size, num = self._part.size, len(NUMBERS)
        device = self._part.tensors[0].device
        self._flat = torch.zeros(num + 2 * size, dtype=torch.float32, device=device)
        self._numbers = self._flat[:num]
        self._before, self._after = self._flat[num : num + size], self._flat[num + size :]
        self._kept = torch.zeros(size, dtype=torch.float32, device=device)  # what was there after the last step
        self._differs = torch.zeros(size, dtype=torch.bool, device=device)
        squares = held.squares
        if squares is not None and device.type == "cuda":
            squares = squares.pin_memory()  # or the host would wait until it is there
        self._squares = None if squares is None else squares.to(device, non_blocking=True)
        self._copies = Copies()
        self._runs = 0
        self._steady: Callable[[], None] | None = None
        # Of each of a few places in the host's memory what replays the look after a step, which ends there.
        self._replays_after: list[Place] = []
        self._places: set[int] = set()  # the addresses of all of these
        self._works = device.type == "cuda"

    def take_over(self, other: Readings | None) -> None:
        """Other readings of the same weights were made before this step; of moments there were none, or others."""
        num = self.held.weights.size
        if other is not None and other.held.weights.size == num:
            self._before[:num] = other._before[:num]
            self._numbers[:1] = other._numbers[:1]
        self._part.look_up()

    def before(self) -> Callable[[], None] | None:
        """Before a step. What is returned is still to be launched; it is the same as long as the tensors are."""
        if self._part.look_up():
            self._forget()
        if self._steady is None:
            self._read_before()
        return self._steady

    def after(self, *, moved: bool) -> Place:
        """After it: where a copy of all is on its way to. `moved`: other storage may be under a tensor by now."""
        if moved and self._part.look_up():
            self._forget()
        if self._replays_after:
            place = self._replays_after.pop()
            place[0]()
            return place
        self._read_after()
        self._runs += 1
        if self._works and self._runs == GRAPH_AFTER and self._part.stays:
            self._record()
        copy = self._copies.send(self._flat)
        return None, copy, None

    def _forget(self) -> None:
        self._runs, self._steady, self._replays_after, self._places = 0, None, [], set()

    def _record(self) -> None:
        device = self._flat.device
        for _ in range(NUM_PLACES):
            memory = torch.empty(self._flat.shape, dtype=torch.float32, device="cpu", pin_memory=True)

            def launch(memory: Tensor = memory) -> None:
                self._read_after()
                memory.copy_(self._flat, non_blocking=True)

            replay = recorded(device, launch)
            if replay is None:
                self._works = False
                return
            self._replays_after.append((replay, memory, memory.numpy()))
            self._places.add(memory.data_ptr())
        self._steady = partial(self._read_before)  # one object as long as the tensors lie where they do

    def _read_before(self) -> None:
        num, differs = self.held.weights.size, self._differs
        self._part.gather(self._before)
        torch.ne(self._before, self._kept, out=differs)
        torch.sum(differs[:num], 0, dtype=torch.float32, out=self._numbers[0])
        torch.sum(differs[num:], 0, dtype=torch.float32, out=self._numbers[1])

    def _read_after(self) -> None:
        num, numbers = self.held.weights.size, self._numbers
        self._part.gather(self._after)
        weights, state = self._after[:num], self._after[num:]
        change = weights - self._before[:num]
        parts = [weights, change, state] if state.numel() else [weights, change]
        torch.stack(torch._foreach_norm(parts), out=numbers[2 : 2 + len(parts)])
        if self._squares is not None:
            torch.dot(state[: self._squares.numel()], self._squares, out=numbers[5])
        self._kept.copy_(self._after)

    def numbers(self, place: Place) -> list[float]:
        """The `NUMBERS` of a copy that has arrived."""
        values = to_host(place[1]) if place[2] is None else place[2]
        numbers: list[float] = values[: len(NUMBERS)].tolist()
        return numbers

    def split(self, place: Place) -> tuple[F32, F32]:
        """What was there before and after, of a copy that has arrived."""
        values = to_host(place[1]) if place[2] is None else place[2]
        num, size = len(NUMBERS), self._part.size
        return values[num : num + size], values[num + size :]

    def as_kept(self, values: NDArray[np.float32]) -> Kept:
        """The same, as weights, moments and counters."""
        kept = Kept(self.held.weights.size, self.held.moments.size, self.held.counters.size)
        kept.values[:] = values
        return kept

    def hand_back(self, place: Place) -> None:
        """It was read."""
        if place[0] is None:
            self._copies.hand_back(place[1])
        elif place[1].data_ptr() in self._places:  # else it is of tensors that are not read any more
            self._replays_after.append(place)


class Moved(NamedTuple):
    """What a ledger sent of one step, and what is known of it: `arrived` reads it."""

    readings: Readings
    place: Place
    compares: bool
    state: bool
    held: Held
    start: tuple[float | None, object] | None  # where second moments are summed


class DelayedLedger:
    """A ledger of tensors on a device: what it looks at is sent to the host, and compared once it has arrived."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._readings: Readings | None = None
        self._compares = self._state = False
        self._last: tuple[Readings, Place] | None = None  # of the last step that is due, what was sent
        self._put_back, self._num_arrived = PutBack(), 0

    def before(self, facts: dict[str, float | Tensor]) -> Callable[[], None] | None:
        """Before a step: read what was changed since the last one by anybody else.

        What is returned does that; it is to be launched before the step (see `Plan.run`).
        """
        known: dict[str, float] = {}
        self._compares, self._state = self._ledger.begin(known)
        if known:
            facts |= known
        return self._read(self._ledger.held).before()

    def _read(self, held: Held) -> Readings:
        if self._readings is None or not self._readings.held.same(held):
            self._readings = Readings(held)
        return self._readings

    def after(self) -> Moved:
        """After it: read again, and send both to the host."""
        ledger, readings = self._ledger, self._readings
        ledger.end()
        held = ledger.held
        if readings is None or not readings.held.same(held):
            # The step made the moments, or replaced them: of these only what they are now can be known.
            weights = readings
            readings = self._read(held)
            readings.take_over(weights)
        place = readings.after(moved=not ledger.writes_in_place)
        return Moved(readings, place, self._compares, self._state, held, ledger.start if ledger.due else None)

    def arrived(self, moved: Moved, facts: dict[str, float], notes: Notes) -> None:
        """Add what both readings say, now that they are here."""
        readings, place, compares, state, held, start = moved
        last, self._last = self._last, (readings, place)
        self._num_arrived += 1
        changed, state_changed, size, change, state_size, squares = readings.numbers(place)
        if compares and last is not None and (changed or (state and state_changed)):
            self._compare(last, readings, readings.split(place)[0], facts, notes, state=state)
        if last is not None:
            last[0].hand_back(last[1])
        if not (size < HUGE and change < HUGE):
            count_bad(facts, notes, "weights_bad", readings.split(place)[1][: held.weights.size], held.weights)
        elif "update_ratio" not in facts:  # else all of the weights were looked at
            facts["update_ratio"] = change / max(size, 1e-15)
        if not state_size < HUGE:
            count_bad(facts, notes, "state_bad", readings.as_kept(readings.split(place)[1]).moments, held.moments)
        if start is not None and (norm := facts.get("grad_norm")) is not None:
            steps = float(readings.split(place)[1][-1]) if held.counters.size else start[0]
            expected = held.corrected(squares, steps, start[1])
            if expected is not None and expected > 0:
                facts["moment_lag"] = norm / math.sqrt(expected)

    def _compare(
        self,
        last: tuple[Readings, Place],
        readings: Readings,
        before: NDArray[np.float32],
        facts: dict[str, float],
        notes: Notes,
        *,
        state: bool,
    ) -> None:
        was, old = last[0], last[0].split(last[1])[1]
        kept, now = was.as_kept(old), readings.as_kept(before)
        state = state and kept.state.size == now.state.size
        changed = not np.array_equal(kept.weights, now.weights)
        state = state and not np.array_equal(kept.state, now.state)
        if changed and kept.weights.size == now.weights.size:
            self._put_back.see(self._num_arrived, kept.weights, now.weights, facts)
        if changed or state:
            readings.held.compare(kept, now, facts, notes, state=state, weights=changed)

    def declare(self) -> None:
        """Weights or moments were loaded: what they are now is what they should be."""
        self._ledger.declare()

    def remove(self) -> None:
        """Take the hook off the optimizer."""
        self._ledger.remove()


def count_bad(facts: dict[str, float], notes: Notes, name: str, values: NDArray[np.float32], part: Part) -> None:
    """Note how many values are not finite, and of which tensors: sums overflow on finite ones, too."""
    bad = ~np.isfinite(values)
    if bad.any():
        facts[name] = float(bad.sum())
        spans = enumerate(pairwise(part.bounds))
        notes[name] = tuple(part.names[i] for i, (a, b) in spans if bad[a:b].any())[:NUM_NAMED]


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


def _distance(old: NDArray[np.float32], new: NDArray[np.float32]) -> float:
    apart = new - old
    return math.sqrt(float(np.vdot(apart, apart)))


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
        if self._part.size:
            self._part.read(self._last)

    def look(self) -> tuple[dict[str, float], Notes]:
        """Once a step; nothing where the average is on a device."""
        if not self._part.size or not self._part.on_host:
            return {}, {}
        self._part.read(self._now)
        return self._compared(self._is_waiting())

    def delayed(self) -> Later | None:
        """The same for one on a device, once it has arrived."""
        if not self._part.size or self._part.on_host:
            return None
        values, started = self._part.sent(), getattr(self._ema, "n_averaged", None)
        count = sent(started) if isinstance(started, Tensor) else None

        def later(facts: dict[str, float], notes: Notes) -> None:
            self._now[:] = to_host(values)
            found, named = self._compared(count is not None and not float(count) > 0)
            facts |= found
            notes |= named

        return later

    def _compared(self, waiting: bool) -> tuple[dict[str, float], Notes]:
        moved = not np.array_equal(self._now.view(np.uint32), self._last.view(np.uint32))
        self._still = 0 if moved else self._still + 1
        self._moves += moved
        self._last, self._now = self._now, self._last
        facts = {"ema_still": float(self._still)}
        if self._moves == 0 and waiting:
            facts = {}  # an average that is told to begin later (SWA) has not begun
        bad = ~np.isfinite(self._last)
        if not bad.any():
            return facts, {}
        spans = zip(self._part.names, self._part.bounds[:-1], self._part.bounds[1:], strict=True)
        return facts | {"ema_bad": float(bad.sum())}, {"ema_bad": tuple(n for n, a, b in spans if bad[a:b].any())[:4]}

    def _is_waiting(self) -> bool:
        started = getattr(self._ema, "n_averaged", None)
        return isinstance(started, Tensor) and is_here(started) and not float(started) > 0
