"""What a watch needs to listen: wrappers that leave no trace, and measures of what they hear."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.sample.transfer import number


def main_of(output: Any) -> Any:
    """What a model says, in whatever it is wrapped: not its loss, which has no row for each sample."""
    if isinstance(output, Tensor):
        return output
    if not isinstance(output, dict | list | tuple) and hasattr(output, "__dict__"):
        output = vars(output)
    if isinstance(output, dict):
        return next((v for k, v in output.items() if isinstance(v, Tensor) and v.dim() and k != "loss"), None)
    return (
        next((v for v in output if isinstance(v, Tensor) and v.dim()), None)
        if isinstance(output, list | tuple)
        else None
    )


def size_of(grads: Any) -> float:
    """The one number among the gradients that flow into a loss; NaN where there is none."""
    found = [g for g in (grads if isinstance(grads, tuple) else (grads,)) if isinstance(g, Tensor) and g.numel() == 1]
    return number(found[0].detach().float()) if found else float("nan")


def distance(params: list[Tensor], before: dict[int, Tensor]) -> tuple[float, float]:
    """How far all of them went together, and how large those that went were."""
    by = size = 0.0
    for p in params:
        old = before[id(p)]
        if not torch.equal(p.detach(), old):
            by += number((p.detach() - old).abs().double().square().sum())
            size += number(old.abs().double().square().sum())
    return math.sqrt(by), math.sqrt(size)


def change_outside(now: dict[int, Tensor], left: dict[int, Tensor] | None, first: dict[int, Tensor]) -> str:
    """What happened to the weights since the last step left them: nothing, `back`, `scaled` or `changed`."""
    if left is None or set(left) != set(now) or all(torch.equal(now[k], left[k]) for k in now):
        return ""
    moved = [k for k in now if not torch.equal(left[k], first[k])]
    if moved and all(torch.equal(now[k], first[k]) for k in moved):
        return "back"
    ratios = []
    for key, tensor in now.items():
        one, other = tensor.double().reshape(-1), left[key].double().reshape(-1)
        size = number(other.square().sum())
        if size > 0:
            ratio = number((one * other).sum()) / size
            if number((one - ratio * other).abs().max()) > 1e-5 * number(other.abs().max()):
                return "changed"
            ratios.append(ratio)
    same = ratios and max(ratios) - min(ratios) < 1e-4 and abs(ratios[0] - 1.0) > 1e-4
    return "scaled" if same else "changed"


def wrap(home: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Put a function around one of a module or class; gives the way back."""
    inner = getattr(home, name)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        return around(inner, *args, **kwargs)

    setattr(home, name, wrapper)
    return lambda: setattr(home, name, inner)


def wrap_own(thing: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """On this one object, and off again without a trace."""
    had, inner = vars(thing).get(name), getattr(thing, name)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    setattr(thing, name, wrapper)
    return lambda: delattr(thing, name) if had is None else setattr(thing, name, had)
