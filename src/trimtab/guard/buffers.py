"""A rejected step leaves no trace in the buffers either: copied before it, checked in it, put back on rejection."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy

from trimtab.sample.measure import reference as measure
from trimtab.sample.transfer import number
from trimtab.torchutil.module_tree import ModuleTree

LARGE = 1 << 18
"""Elements. A larger buffer (a mask, a cache, a queue) is copied again only when its version counter moved.

Smaller ones are copied in every step: BatchNorm's kernels change running statistics without moving the counter.
"""


class _Pack:
    """Buffers of one type and device, copied side by side into one flat tensor: one norm checks them all."""

    def __init__(self, live: Sequence[Tensor], watched: bool) -> None:
        self.live = list(live)
        self.watched = watched
        self._kept, self._kept_views = self._flat()
        self._fresh, self._fresh_views = self._flat()
        self._versions = [-1] * len(self.live)
        self.capture()
        self.commit()

    def _flat(self) -> tuple[Tensor, list[Tensor]]:
        flat = torch.empty(sum(b.numel() for b in self.live), dtype=self.live[0].dtype, device=self.live[0].device)
        parts = torch.split(flat, [b.numel() for b in self.live])
        return flat, [part.view(b.shape) for part, b in zip(parts, self.live, strict=True)]

    def capture(self) -> None:
        torch._foreach_copy_(self._fresh_views, self.live)

    def before(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.live, self._kept_views, strict=True))

    def norm(self) -> Tensor:
        return measure.total(measure.plain(self._fresh))

    def commit(self) -> None:
        """What was captured last is now the state to go back to."""
        self._kept, self._fresh = self._fresh, self._kept
        self._kept_views, self._fresh_views = self._fresh_views, self._kept_views
        self._versions = [b._version for b in self.live]

    def keep(self, i: int, copy: Tensor) -> None:
        self._kept_views[i].copy_(copy)

    def keep_fresh(self) -> None:
        self._kept.copy_(self._fresh)

    def renew(self) -> None:
        """Copy again if anything outside the step (a load, an EMA swap) touched the buffers since."""
        if [b._version for b in self.live] != self._versions:
            self.capture()
            self.commit()

    def bad(self) -> list[int]:
        wide = [number(measure.wide_norms([measure.plain(v)])[0]) for v in self._fresh_views]
        return [i for i, norm in enumerate(wide) if not math.isfinite(norm)]

    def put_back(self, which: Sequence[int]) -> None:
        live = [self.live[i] for i in which]
        # A step inside a backward pass (an optimizer per parameter): what is still to come of it must not see a change.
        under_way = torch._C._current_graph_task_id() != -1
        with ExitStack() as unseen:
            for tensor in live if under_way else ():  # one by one: PyTorch 2.6 takes no tuple of them
                unseen.enter_context(_unsafe_preserve_version_counter(tensor))
            torch._foreach_copy_(live, [self._kept_views[i] for i in which])
        torch._foreach_copy_([self._fresh_views[i] for i in which], [self._kept_views[i] for i in which])

    def put_back_on_device(self, reject: Tensor) -> None:
        """Go back where the device flag says so, and value by value where a watched buffer went bad."""
        undo = reject.to(self._fresh.device) > 0
        if self.watched:
            undo = undo | ~torch.isfinite(self._fresh)
        self._fresh.copy_(torch.where(undo, self._kept, self._fresh))
        torch._foreach_copy_(self.live, self._fresh_views)


class BufferShadow:
    """The buffers of a model as they were before the step, integer counters included."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._beside: list[weakref.ref[nn.Module]] = []
        self._names: dict[int, str] = {}
        self.is_empty = True  # whether there is nothing to copy: asked several times in every step
        self._places: list[tuple[dict[str, Tensor | None], str, _Pack, int]] = []
        self._packs: list[_Pack] = []
        self._large: list[_Pack] = []
        self._tree, self._all_kept = ModuleTree(model), False
        self.refresh()

    def __len__(self) -> int:
        return len(self._names)

    @torch.no_grad()
    def refresh(self) -> None:
        """Look for buffers that were added, replaced or moved, and copy all of them again if there are any."""
        self._follow()
        if not self._tree.has_changed() and self._all_kept and not self._beside:
            return
        every = {id(b): (n, b) for m in self._modules() for n, b in m.named_buffers()}
        named = [(n, b) for n, b in every.values() if _can_be_kept(b)]
        self._all_kept = len(named) == len(every)  # else one may become such that it can be, and stay the same object
        if [id(b) for _, b in named] == list(self._names):
            return
        self._names = {id(b): n for n, b in named}
        self.is_empty = not named
        packs: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
        self._large = []
        for _, b in named:
            floating = b.is_floating_point() or b.is_complex()
            # One that is non-finite by design, such as a mask filled with -inf, must never count as gone bad.
            watched = floating and math.isfinite(number(measure.wide_norms([measure.plain(b)])[0]))
            if b.numel() >= LARGE:
                self._large.append(_Pack([b], watched))
            else:
                packs.setdefault((b.dtype, b.device, watched), []).append(b)
        self._packs = [_Pack(live, key[2]) for key, live in packs.items()]
        parts = [part for module in self._modules() for part in module.modules()]
        homes = {id(b): (m._buffers, k) for m in parts for k, b in m._buffers.items() if b is not None}
        self._places = [(*homes[id(b)], pack, i) for pack in self._all() for i, b in enumerate(pack.live)]

    def include(self, beside: Sequence[nn.Module]) -> None:
        """Look after the buffers of modules beside the model, too: a frozen trunk, a norm of its own."""
        self._beside += map(weakref.ref, beside)
        self.refresh()

    def _modules(self) -> list[nn.Module]:
        return [self._model, *(module for ref in self._beside if (module := ref()) is not None)]

    @torch.no_grad()
    def go_back_to(self, earlier: Sequence[tuple[dict[str, Tensor | None], str, Tensor]]) -> None:
        """Take copies that were made earlier, by their place, for the state to go back to."""
        known = {(id(home), key): copy for home, key, copy in earlier}
        for home, key, pack, i in self._places:
            copy = known.get((id(home), key))
            if copy is not None and copy.shape == pack.live[i].shape and copy.dtype == pack.live[i].dtype:
                pack.keep(i, copy)

    @torch.no_grad()
    def renew(self) -> None:
        """At the first training forward after a step: what was changed between steps must survive a rejection."""
        for pack in (*self._packs, *self._large):
            pack.renew()

    def capture(self) -> None:
        """After the backward pass: copy what the forward passes of this step made of the buffers."""
        if not self._names:  # switching autograd off costs more than looking
            return
        self._follow()
        with torch.no_grad():
            for pack in self._packs:
                pack.capture()
            for pack in self._large:
                if pack.live[0]._version != pack._versions[0]:
                    pack.capture()

    def _follow(self) -> None:
        for home, key, pack, i in self._places:
            if home.get(key) is not pack.live[i]:
                self._replaced(home.get(key), pack, i)

    def _replaced(self, new: Tensor | None, pack: _Pack, i: int) -> None:
        """A forward pass replaced a buffer by another tensor (an average kept by hand): it is the live one."""
        old = pack.live[i]
        if new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            return  # another thing altogether: found at the next look for new buffers
        self._names = {id(new) if key == id(old) else key: name for key, name in self._names.items()}
        pack.live[i] = new

    def before_step(self) -> list[tuple[Tensor, Tensor]]:
        """Each buffer with what it held before the forward passes of this step; not to be written to."""
        return [pair for pack in self._all() for pair in pack.before()]

    def norms(self) -> list[Tensor]:
        """The norms of the watched buffers, each of many together: non-finite where one may have gone bad."""
        return [pack.norm() for pack in self._all() if pack.watched]

    def suspicious(self) -> bool:
        """Whether one of those norms is not finite; asks the host."""
        return any(not math.isfinite(number(norm)) for norm in self.norms())

    def bad(self) -> list[tuple[int, int]]:
        """Which watched buffers hold NaN or Inf, by pack and place."""
        return [(k, i) for k, pack in enumerate(self._all()) if pack.watched for i in pack.bad()]

    def described(self, which: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[str, int], ...], Tensor]:
        """Names, sizes and full columns of some buffers."""
        chosen = [self._all()[k].live[i] for k, i in which]
        rows = tuple((self._names.get(id(b), "unnamed"), b.numel()) for b in chosen)
        return rows, measure.full([measure.plain(b) for b in chosen], fractions=False)

    @torch.no_grad()
    def put_back(self, which: Sequence[tuple[int, int]] | None = None) -> None:
        """Restore some buffers, or all of them."""
        for k, pack in enumerate(self._all()):
            places = range(len(pack.live)) if which is None else [i for j, i in which if j == k]
            if len(places):
                pack.put_back(places)
        for home, key, pack, i in self._places if which is None else ():
            if home.get(key) is not pack.live[i]:  # replaced by something of another shape: the old one it is again
                home[key] = pack.live[i]

    @torch.no_grad()
    def put_back_on_device(self, reject: Tensor) -> None:
        """Restore everything where the device flag says so, and what went bad, without asking the host."""
        for pack in self._all():
            pack.put_back_on_device(reject)

    @torch.no_grad()
    def commit_in_graph(self) -> None:
        """`commit` for a step that is being captured: a replay runs no Python, so the copies must be copied."""
        for pack in self._all():
            pack.keep_fresh()

    def commit(self) -> None:
        """The step is over: its buffers are the ones to go back to from now on."""
        for pack in self._packs:
            pack.commit()
        for pack in self._large:
            if pack.live[0]._version != pack._versions[0]:
                pack.commit()

    def _all(self) -> list[_Pack]:
        return [*self._packs, *self._large]


def _can_be_kept(buffer: Tensor) -> bool:
    return not is_lazy(buffer) and buffer.layout is torch.strided and buffer.numel() > 0
