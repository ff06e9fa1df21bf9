"""Linear layers with no activation between them, read off the graph of a loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trimtab.torchutil.autograd_graph import GraphWalk

MAX_LOOKS = 2000
LONG = 3
"""Layers in a row: two are often meant, as a factorised one."""
RESHAPING = (
    "View", "Squeeze", "Unsqueeze", "Reshape", "Alias", "ToCopy", "UnsafeView", "Clone", "Mean", "Select",
)  # fmt: skip


def linear_chain(loss: Tensor) -> int:
    """How many linear layers follow each other directly, where one would do the same; 0 where nothing is wrong.

    A chain counts if it is `LONG`. A narrow layer between two wide ones is a bottleneck, and meant: low-rank adapters,
    linear autoencoders.
    """
    walk = GraphWalk(loss, max_looks=MAX_LOOKS)
    layers = {node: found for node in walk if (found := _layer(node)) is not None}
    below = {node: _before(data) for node, (_, data) in layers.items()}
    fed = {node for node in below.values() if node in layers}
    longest = 0
    for top in layers.keys() - fed:
        chain = [top]
        while (under := below[chain[-1]]) in layers:
            chain.append(under)
        # Layers from the loss down: of each three numbers in a row the middle one must not be the smallest.
        widths = [layers[top][0][0], *(layers[node][0][1] for node in chain)]
        full = all(widths[i] >= min(widths[i - 1], widths[i + 1]) for i in range(1, len(widths) - 1))
        if full and len(chain) >= LONG:
            longest = max(longest, len(chain))
    return longest


def _layer(node: Any) -> tuple[tuple[int, int], Any] | None:
    """The width of a linear layer, outputs first, and the node of what goes in; None where a node is none."""
    name, inputs = node.name(), node.next_functions
    if name.startswith("Addmm"):
        data, weight = inputs[1][0], inputs[2][0]
    elif name.startswith("Mm"):
        data, weight = inputs[0][0], inputs[1][0]
    else:
        return None
    while weight is not None and weight.name().startswith(("TBackward", "Transpose", "ToCopy")):
        weight = weight.next_functions[0][0]
    shape: Any = getattr(getattr(weight, "variable", None), "shape", ())
    return ((int(shape[0]), int(shape[1])), data) if len(shape) == 2 else None


def _before(node: Any) -> Any:
    """The first node that does more than reshape; None at the data."""
    while node is not None and node.name().startswith(RESHAPING):
        node = node.next_functions[0][0]
    return node
