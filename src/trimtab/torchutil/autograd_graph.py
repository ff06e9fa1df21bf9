"""The autograd graph behind a tensor, freed or not: its nodes, and which of them are loss functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from torch import Tensor

LOSS_NODES = {
    "NllLoss": "nll",
    "BinaryCrossEntropyWithLogits": "bce-logits",
    "BinaryCrossEntropy": "bce",
    "MseLoss": "mse",
    "L1Loss": "l1",
    "SmoothL1Loss": "l1",
    "HuberLoss": "l1",
    "CtcLoss": "ctc",
}
"""How the names of nodes begin that a loss function leaves, and the kind of loss that it is."""

JOINING = ("Div", "Mul", "Add", "Sum", "Mean", "Neg", "Sub", "ToCopy", "View", "Squeeze", "Alias")
"""How the names of nodes begin that only join, scale or reduce losses."""


def loss_kind(node: Any) -> str:
    """The kind of loss function that a node belongs to; empty where it belongs to none.

    Example:
        >>> import torch
        >>> loss = torch.nn.functional.mse_loss(torch.ones(2, requires_grad=True), torch.zeros(2))
        >>> loss_kind(loss.grad_fn)
        'mse'
    """
    name = node.name()
    return next((kind for prefix, kind in LOSS_NODES.items() if name.startswith(prefix)), "")


class GraphWalk:
    """The nodes behind a tensor, each once, beginning with its own.

    `follow` says behind which nodes to go on (all, if not given). The walk goes deep first, from the last input to the
    first; with `nearest_first` it goes level by level. It ends after `max_looks` places: nodes, nodes seen before, and
    inputs without a gradient all count. With `revisit` a node comes as often as paths lead to it. After the walk,
    `complete` says whether it came to its end before that limit.

    Example:
        >>> import torch
        >>> walk = GraphWalk((torch.ones(1, requires_grad=True) * 2.0).sum())
        >>> [node.name() for node in walk][:2], walk.complete
        (['SumBackward0', 'MulBackward0'], True)
    """

    def __init__(
        self,
        tensor: Tensor,
        *,
        follow: Callable[[Any], bool] | None = None,
        nearest_first: bool = False,
        max_looks: int | None = None,
        revisit: bool = False,
    ) -> None:
        self._root, self._follow, self._revisit = tensor.grad_fn, follow, revisit
        self._nearest_first, self._max_looks = nearest_first, max_looks
        self.complete = False

    def __iter__(self) -> Iterator[Any]:
        self.complete = False
        ahead, seen = deque[Any]([self._root]), set[Any]()
        for _ in count() if self._max_looks is None else range(self._max_looks):
            if not ahead:
                self.complete = True
                return
            node = ahead.popleft() if self._nearest_first else ahead.pop()
            if node is None or node in seen:
                continue
            if not self._revisit:
                seen.add(node)
            yield node
            if self._follow is None or self._follow(node):
                ahead.extend(following for following, _ in node.next_functions)


def first_inputs(node: Any, *, skip_constants: bool = False) -> Iterator[Any]:
    """A node, the node of its first input, that one's first input and so on, until there is none.

    `skip_constants` takes the first input that has a gradient; without it a first input that has none ends the way.
    """
    while node is not None:
        yield node
        following = [n for n, _ in node.next_functions if n is not None or not skip_constants]
        node = following[0] if following else None


MAX_LOOKS = 512


def keeps_tensors(tensor: Tensor) -> bool:
    """Whether the graph behind a tensor still holds what it saved for a backward pass: none was made, or it kept it.

    Example:
        >>> import torch
        >>> loss = torch.ones(2, requires_grad=True).exp().sum()
        >>> keeps_tensors(loss), loss.backward(), keeps_tensors(loss)
        (True, None, False)
    """
    return any(_keeps(node) for node in GraphWalk(tensor, max_looks=MAX_LOOKS))


def _keeps(node: Any) -> bool:
    for name in dir(node):
        if name == "saved_tensors" or name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # it was freed
                return False
            if isinstance(value, Tensor) or (isinstance(value, tuple) and any(isinstance(v, Tensor) for v in value)):
                return True
    return False
