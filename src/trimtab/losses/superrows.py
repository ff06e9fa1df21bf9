"""The two sides of a tuple: super-rows ``p`` of the first half of the modalities, ``q`` of the rest.

``t = (p, q)`` with ``p`` in ``B^l``, ``l = N // 2``, and ``q`` in ``B^(N-l)``, both numbered in row-major order. The
reductions of all anchors follow from one reduction per super-row: all ``t`` with ``t_m = i`` are all ``p`` with
``p_m = i``, each with all ``q``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.losses.problem import Kind
from trimtab.losses.reduce import reduce_all

__all__ = ["diagonal_stride", "marginals", "outer", "share_of"]


def outer(parts: Sequence[Tensor], *, product: bool) -> Tensor:
    """``[B^k, ..]``: products (or sums) of one row of each of the k parts ``[B, ..]``."""
    result = parts[0]
    for part in parts[1:]:
        left, right = result.unsqueeze(1), part.unsqueeze(0)
        result = (left * right if product else left + right).flatten(0, 1)
    return result


def diagonal_stride(batch: int, k: int) -> int:
    """Super-row ``(i, .., i)`` of k modalities has the number ``i * diagonal_stride``."""
    return sum(batch**e for e in range(k))


def share_of(count: int, share: tuple[int, int]) -> tuple[int, int]:
    """Begin and end of the k-th of n near-equal parts of ``range(count)``."""
    k, n = share
    return count * k // n, count * (k + 1) // n


def marginals(left: Tensor, right: Tensor, num: int, kind: Kind) -> Tensor:
    """``[N, B]`` from the reductions per super-row of both sides, ``[B^l]`` and ``[B^(N-l)]``."""
    rows = []
    for side, k in ((left, num // 2), (right, num - num // 2)):
        batch = round(side.shape[0] ** (1 / k))
        table = side.reshape([batch] * k)
        for m in range(k):
            lines = table.movedim(m, 0).reshape(batch, -1)
            rows.append(reduce_all(lines, kind, 1))
    return torch.stack(rows)
