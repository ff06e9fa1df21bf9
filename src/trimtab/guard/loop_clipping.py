"""A loop that clips by itself: the norm before it is told, and what is not finite stays so, where it arose.

PyTorch's `clip_grad_norm_` multiplies every gradient by the same factor: one NaN makes all of them NaN, and afterwards
nobody can say where it came from. `clip_grad_value_` makes an Inf a usual number: a bad update looks like a good one.
Loops and frameworks alike call these two functions.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from trimtab.core.contain import Contained, when_collected
from trimtab.sample.measure import reference as measure
from trimtab.sample.transfer import is_here, number

log = logging.getLogger("trimtab")
NORM, VALUE = "clip_grad_norm_", "clip_grad_value_"
_HOMES = (torch.nn.utils, torch.nn.utils.clip_grad)

Clipped = Callable[[list[Tensor], Tensor | float], bool]
"""Called with the parameters and their norm before clipping; returns whether a guard rejects bad updates."""


class Clips(Protocol):
    """Something that wants to know."""

    def clipping(self, params: Iterable[Tensor], norm: Tensor | float) -> bool:
        """Called as `Clipped`."""
        ...


class _Listeners:
    """Everybody who wants to be told. The wrapper is there while there is one: they come and go in any order."""

    def __init__(self) -> None:
        self._told: list[tuple[Clipped, Contained, tuple[str, ...]]] = []
        self._asked: set[str] = set()  # the functions that somebody wants to know of
        self._inner: dict[str, Callable[..., Any]] = {}
        self._mine: dict[str, Callable[..., Any]] = {}

    def add(self, clipped: Clipped, contained: Contained, names: tuple[str, ...]) -> Callable[[], None]:
        entry = (clipped, contained, names)
        if not self._told:
            self._inner = {name: getattr(torch.nn.utils, name) for name in (NORM, VALUE)}
            self._mine = {NORM: self._by_norm(), VALUE: self._by_value()}
            for home in _HOMES:
                for name, mine in self._mine.items():
                    setattr(home, name, mine)
        self._told.append(entry)
        self._asked.update(names)

        def undo() -> None:
            if any(one is entry for one in self._told):
                self._told = [one for one in self._told if one is not entry]
                self._asked = {name for _, _, names in self._told for name in names}
                if not self._told:
                    self._put_back()

        return undo

    def _put_back(self) -> None:
        for home in _HOMES:
            for name, mine in self._mine.items():
                if getattr(home, name) is mine:  # else somebody wrapped it since: ours only passes calls on
                    setattr(home, name, self._inner[name])

    def tell(self, params: list[Tensor], norm: Tensor | float, *, name: str = NORM) -> bool:
        answers = [
            bool(contained.call("noting a norm", told, params, norm))
            for told, contained, names in self._told
            if name in names
        ]
        return any(answers)

    def _by_value(self) -> Callable[..., None]:
        inner = self._inner[VALUE]

        @functools.wraps(inner)
        def clip_grad_value_(
            parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
        ) -> None:
            params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            clip = functools.partial(inner, params, clip_value, foreach)
            if VALUE not in self._asked or torch.compiler.is_compiling():
                clip()
                return
            grads = [p.grad for p in params if p.grad is not None]
            # Of other kinds of tensors (sharded ones) the parts are read that are here.
            plain = [measure.plain(g) for g in grads if g.layout is torch.strided]
            clip_unless_nonfinite(params, plain, clip, functools.partial(self.tell, name=VALUE))

        return clip_grad_value_

    def _by_norm(self) -> Callable[..., Tensor]:
        inner: Callable[..., Tensor] = self._inner[NORM]

        @functools.wraps(inner)
        def clip_grad_norm_(
            parameters: Tensor | Iterable[Tensor],
            max_norm: float,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Tensor:
            if isinstance(parameters, Tensor):
                parameters = [parameters]
            params = list(parameters)
            if not params:
                return inner((p for p in params), max_norm, norm_type, error_if_nonfinite, foreach)  # it warns of these
            grads = [p.grad for p in params if p.grad is not None]
            if not grads or NORM not in self._asked or float(norm_type) != 2.0 or torch.compiler.is_compiling():
                return inner(params, max_norm, norm_type, error_if_nonfinite, foreach)
            plain = all(type(g) is Tensor and g.layout is torch.strided for g in grads)
            if not plain or error_if_nonfinite:  # an error is PyTorch's own to raise
                norm = inner(params, max_norm, norm_type, error_if_nonfinite, foreach)
                self.tell(params, norm)
                return norm
            try:
                return clip_in_place(params, grads, max_norm, foreach, self.tell)
            except Exception as error:  # ours must not end a training; PyTorch's own failures come again
                log.warning("clipping so that a NaN stays where it arose failed (%s); PyTorch clips instead", error)
                return inner(params, max_norm, norm_type, error_if_nonfinite, foreach)

        return clip_grad_norm_


_LISTENERS = _Listeners()


def wrap_clipping(clipped: Clipped, contained: Contained, names: tuple[str, ...] = (NORM, VALUE)) -> Callable[[], None]:
    """Be told whenever `clip_grad_norm_` or `clip_grad_value_` of PyTorch is called; returns the undo function.

    On finite gradients the result is bit-identical to that of PyTorch. Where a guard rejects the update anyway, a
    non-finite gradient stays where it arose and as it is, so that the guard can name and reject it, and finite
    gradients whose norm overflows are clipped, not zeroed.
    """
    return _LISTENERS.add(clipped, contained, names)


def wrap_value_clipping(guard: Clips, contained: Contained) -> Callable[[], None]:
    """The same for `clip_grad_value_` alone, which hides an Inf from a guard. It does not keep the guard alive."""
    ref = weakref.ref(guard)

    def clipped(params: list[Tensor], norm: Tensor | float) -> bool:
        here = ref()
        return here is not None and here.clipping(params, norm)

    undo = wrap_clipping(clipped, contained, (VALUE,))
    when_collected(guard, undo)
    return undo


def clip_in_place(
    params: list[Tensor], grads: list[Tensor], max_norm: float, foreach: bool | None, tell: Clipped
) -> Tensor:
    """What `clip_grad_norm_` does to finite gradients, and less harm to others."""
    scale: Any = torch.nn.utils.clip_grads_with_norm_
    norm = torch.nn.utils.get_total_norm(grads, 2.0, False, foreach)
    if not all(is_here(g) for g in grads):
        # Without waiting for the device: a NaN counts as nothing to clip, so the factor is one and spreads nothing.
        kept_out = tell(params, norm)
        scale(params, max_norm, torch.where(norm.isnan(), torch.zeros_like(norm), norm) if kept_out else norm, foreach)
        return norm
    true = number(norm)
    finite = math.isfinite(true)
    if not finite:
        true = number(measure.total(measure.wide_norms([measure.plain(g) for g in grads])))
    kept_out = tell(params, true)
    if finite or not kept_out:
        scale(params, max_norm, norm, foreach)
    elif math.isfinite(true):
        with torch.no_grad():
            torch._foreach_mul_(grads, float(max_norm) / true)
    return norm


def clip_unless_nonfinite(params: list[Tensor], grads: list[Tensor], clip: Callable[[], object], tell: Clipped) -> None:
    """Clip by value, but leave an Inf for the guard that will reject it."""
    try:
        before = _before_value_clipping(params, grads, tell)
    except Exception as error:  # ours must not end a training
        log.warning("looking at gradients before they are clipped by value failed (%s)", error)
        before = False
    if before is True:
        return
    clip()
    if isinstance(before, list):
        with torch.no_grad():
            torch._foreach_mul_(grads, before)


def _before_value_clipping(params: list[Tensor], grads: list[Tensor], tell: Clipped) -> bool | list[Tensor]:
    """Whether nothing may be clipped; on a device, without waiting for it, what to multiply each gradient with."""
    if not grads:
        return False
    if all(is_here(g) for g in grads):
        norm = number(measure.total(measure.norms(grads)))
        if not math.isfinite(norm):
            norm = number(measure.total(measure.wide_norms(grads)))
        return tell(params, norm) and not math.isfinite(norm)
    if not tell(params, torch.nn.utils.get_total_norm(grads, 2.0, False)):
        return False
    largest = torch._foreach_norm(grads, math.inf)
    return [torch.where(one.isinf(), math.nan, 1.0).to(g.dtype) for one, g in zip(largest, grads, strict=True)]
