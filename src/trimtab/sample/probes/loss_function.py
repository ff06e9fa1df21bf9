"""Which loss function a loss came from, read off the names of its graph; the graph itself may already be freed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

NUM_NODES = 16
_KINDS = {"NllLoss": "nll", "BinaryCrossEntropy": "bce", "MseLoss": "mse"}
PASSING = ("Div", "Mul", "Add", "Sum", "Mean", "Neg", "Sub", "ToCopy", "View", "Squeeze", "Alias")
_SUPERVISED = ("NllLoss", "BinaryCrossEntropy", "MseLoss", "SmoothL1Loss", "HuberLoss", "CtcLoss")
_RESHAPING = ("View", "Squeeze", "Unsqueeze", "Reshape", "Alias", "ToCopy", "UnsafeView", "Transpose", "T", "Permute")
_CHOOSING = ("Gather", "Index", "Select", "Take", "Max", "Min", "Minimum", "Maximum")


def _ends(loss: Tensor, *, through: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The known loss functions near the end of a graph, nearest first; `through` names what may lie in between."""
    ahead = [loss.grad_fn]
    for _ in range(NUM_NODES):
        if not ahead:
            return
        node = ahead.pop(0)
        if node is None:
            continue
        name = node.name()
        kind = next((k for prefix, k in _KINDS.items() if name.startswith(prefix)), None)
        if kind is not None:
            yield kind, node
        elif not through or name.startswith(through):
            ahead += [following for following, _ in node.next_functions]


def kind_of(loss: Tensor) -> str:
    """`nll`, `bce` or `mse` where exactly one of them is at the end of the graph; empty where it is not known."""
    found = {kind for kind, _ in _ends(loss, through=PASSING)}
    return found.pop() if len(found) == 1 else ""


def is_bounded(loss: Tensor) -> bool:
    """Whether a cross-entropy that cannot be negative was reduced to one number before anything else came to it.

    A policy gradient weighs the single terms, and may be anything.
    """
    for kind, node in _ends(loss):
        if kind in ("nll", "bce"):
            shapes: Any = getattr(node, "_input_metadata", ())
            return len(shapes) > 0 and len(shapes[0].shape) == 0
    return False


def is_fixed(loss: Tensor) -> bool:
    """Whether a loss is known to measure answers against targets that stay what they are, so that it should fall.

    It is where all of it comes from means of well-known loss functions, over whole answers. Values that were chosen
    from an answer (`q.gather(1, actions)`) are compared with returns that grow as the agent gets better; a policy
    gradient or a game between two models ends in no such function at all.
    """
    ahead, known = [loss.grad_fn], False
    for _ in range(NUM_NODES):
        if not ahead:
            return known
        node: Any = ahead.pop(0)
        if node is None:
            continue
        name = node.name()
        if name.startswith(_SUPERVISED):
            shapes: Any = getattr(node, "_input_metadata", ())
            if not shapes or len(shapes[0].shape) > 0 or _is_chosen(node):
                return False
            known = True
        elif name.startswith(PASSING):
            ahead += [following for following, _ in node.next_functions]
        else:
            return False
    return False


def _is_chosen(node: Any) -> bool:
    """Whether what a loss function compares was picked out of an answer."""
    for _ in range(NUM_NODES):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None:
            return False
        name = node.name()
        if name.startswith(_CHOOSING):
            return True
        if not name.startswith(_RESHAPING):
            return False
    return False


def is_detached(loss: Tensor) -> bool:
    """Whether nothing leads from this loss back to a model."""
    return loss.is_leaf  # without making a Python object of its graph
