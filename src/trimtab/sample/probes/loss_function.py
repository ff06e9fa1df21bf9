"""Which loss function a loss came from, read off the names of its graph; the graph itself may already be freed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor

from trimtab.torchutil.autograd_graph import JOINING, LOSS_NODES, GraphWalk, first_inputs, loss_kind

NUM_NODES = 16
_KINDS = {"nll": "nll", "bce": "bce", "bce-logits": "bce", "mse": "mse"}
_SUPERVISED = tuple(prefix for prefix in LOSS_NODES if prefix != "L1Loss")
_RESHAPING = ("View", "Squeeze", "Unsqueeze", "Reshape", "Alias", "ToCopy", "UnsafeView", "Transpose", "T", "Permute")
_CHOOSING = ("Gather", "Index", "Select", "Take", "Max", "Min", "Minimum", "Maximum")


def _ends(loss: Tensor, *, through: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The known loss functions near the end of a graph, nearest first; `through` names what may lie in between."""

    def follow(node: Any) -> bool:
        return loss_kind(node) not in _KINDS and (not through or node.name().startswith(through))

    for node in GraphWalk(loss, follow=follow, nearest_first=True, max_looks=NUM_NODES, revisit=True):
        if (kind := _KINDS.get(loss_kind(node))) is not None:
            yield kind, node


def kind_of(loss: Tensor) -> str:
    """`nll`, `bce` or `mse` where exactly one of them is at the end of the graph; empty where it is not known."""
    found = {kind for kind, _ in _ends(loss, through=JOINING)}
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
    known = False
    walk = GraphWalk(loss, follow=_joins, nearest_first=True, max_looks=NUM_NODES, revisit=True)
    for node in walk:
        if node.name().startswith(_SUPERVISED):
            shapes: Any = getattr(node, "_input_metadata", ())
            if not shapes or len(shapes[0].shape) > 0 or _is_chosen(node):
                return False
            known = True
        elif not _joins(node):
            return False
    return known and walk.complete


def _joins(node: Any) -> bool:
    return bool(node.name().startswith(JOINING))


def _is_chosen(node: object) -> bool:
    """Whether what a loss function compares was picked out of an answer."""
    for before in islice(first_inputs(node), 1, 1 + NUM_NODES):
        name = before.name()
        if name.startswith(_CHOOSING):
            return True
        if not name.startswith(_RESHAPING):
            return False
    return False


def is_detached(loss: Tensor) -> bool:
    """Whether nothing leads from this loss back to a model."""
    return loss.is_leaf  # without making a Python object of its graph
