"""Random negatives: ``R`` index sets, in each of which the other modalities of an anchor are permuted independently.

For anchor ``(m, i)`` and set ``r``, candidate ``j`` is the tuple of ``x_m[i]`` with ``x_k[perm[r, m, k, j]]`` of all
others. The column ``j = i`` is left out, as in Symile's ``n``, and so is a tuple that happens to be the positive:
``R (B - 1)`` negatives at most, for ``R`` matrix products ``[B, B]`` per modality.

Every candidate that is kept is uniform among all negatives of its anchor, so that the mean of ``exp z`` over them is
unbiased for the mean over all ``B^(N-1) - 1``. The loss is not an estimate of the *full* one: it has fewer candidates
(``log K`` is lower), and the logarithm of a mean over few is low in the mean. Candidates of one set are dependent,
since a permutation uses every row once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.losses.backends.dense import line_similarity, reduce_anchors
from trimtab.losses.problem import Kind, Problem
from trimtab.losses.similarity import wide

__all__ = ["draw_permutations", "reduce_sampled", "sampled_count"]


def draw_permutations(
    num: int, batch: int, count: int, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """``[R, N, N, B]``: for set r and anchor modality m, the order of the rows of modality k (k = m: as they are)."""
    home = device if generator is None else generator.device
    order = torch.rand(count, num, num, batch, generator=generator, device=home, dtype=torch.float64).argsort(-1)
    own = torch.arange(num, device=home)
    order[:, own, own] = torch.arange(batch, device=home)
    return order.to(device)


def reduce_sampled(problem: Problem, kind: Kind, permutations: Tensor) -> Tensor:
    """``[N, B]``: for every anchor, the reduction over its sampled negatives."""
    count = permutations.shape[0]

    def block(m: int, tile: tuple[int, int], xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        others = [k for k in range(len(xs)) if k != m]
        columns = permutations[:, m].movedim(1, 0).reshape(len(xs), -1)  # [N, R * B]
        if problem.similarity == "volume":  # chance puts rows of one sample side by side, which span next to nothing
            xs = [wide(x) for x in xs]
        s = line_similarity([xs[k][columns[k]] for k in others], xs[m][slice(*tile)], problem.similarity).T
        i = torch.arange(*tile, device=s.device).unsqueeze(1)
        j = torch.arange(problem.batch, device=s.device).repeat(count)
        same, there = _columns(problem, columns, others)
        valid = (i != j) & ~(same & (columns[others[0]] == i))
        return s.to(problem.scale.dtype), valid if there is None else valid & there

    return reduce_anchors(problem, kind, count * problem.batch, block)


def sampled_count(problem: Problem, permutations: Tensor) -> Tensor:
    """``[N, B]``: the candidates of every anchor, its positive among them."""
    n, batch = problem.num_modalities, problem.batch
    j = torch.arange(batch, device=permutations.device).repeat(permutations.shape[0])
    rows = []
    for m in range(n):
        others = [k for k in range(n) if k != m]
        columns = permutations[:, m].movedim(1, 0).reshape(n, -1)
        same, there = _columns(problem, columns, others)
        there = torch.ones_like(same) if there is None else there
        first = columns[others[0]]
        left_out = torch.zeros(batch, dtype=torch.long, device=j.device)
        left_out.index_add_(0, j, there.long()).index_add_(0, first, (there & same & (first != j)).long())
        rows.append(there.sum() - left_out + 1)
    return torch.stack(rows).to(problem.scale.dtype)


def _columns(problem: Problem, columns: Tensor, others: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Of each column: whether all its rows are of one sample, and whether all are there (None: they are)."""
    same = (columns[list(others)] == columns[others[0]]).all(0)
    if problem.present is None:
        return same, None
    return same, torch.stack([problem.present[k][columns[k]] for k in others]).all(0)
