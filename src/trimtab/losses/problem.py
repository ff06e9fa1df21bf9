"""What every backend is given: one prepared N-way problem, and what it must give back.

A tuple ``t = (i_1, .., i_N)`` takes one sample of each modality; its logit is ``z[t] = scale * s[t]`` with similarity
``s`` of `similarity.py`. The B tuples ``(i, .., i)`` are the positives; all others are negatives. A backend reduces the
*negatives* to one number per anchor ``(m, i)``, over all tuples with ``t_m = i``:

===========  ==========================================  =======================================================
kind         value ``[N, B]``                            cotangent ``g [N, B]`` becomes the weight of tuple ``t``
===========  ==========================================  =======================================================
lse          ``log sum exp z[t]``                        ``sum_m g_m[t_m] exp(z[t] - L_m[t_m])``
sum          ``sum z[t]``                                ``sum_m g_m[t_m]``
softplus     ``sum log(1 + exp(z[t] + bias))``           ``sigmoid(z[t] + bias) sum_m g_m[t_m]``
===========  ==========================================  =======================================================

The positives stay outside on purpose: ``softplus(L - z[i..i])`` keeps its gradient where ``logsumexp - z[i..i]`` has
rounded to zero. Everything else (smoothing, reductions, anchors) happens once, after the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["lse", "sum", "softplus"]
Precision = Literal["ieee", "tf32", "bf16"]

__all__ = ["Kind", "Precision", "Problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prepared problem: inputs of one dtype and device, already normalised and masked."""

    xs: tuple[torch.Tensor, ...]
    """N tensors ``[B, D]`` in the dtype sums are kept in (float32, or float64 for float64 inputs)."""
    similarity: str
    scale: torch.Tensor
    """0-dim, the positive factor of the logits; may require grad."""
    bias: torch.Tensor | None = None
    """0-dim, only for kind ``softplus``; may require grad."""
    offset: torch.Tensor | None = None
    """0-dim without gradient, taken off every similarity: ``z = scale * (s - offset)``. A softmax does not see it, but
    logits near 0 keep digits that large ones round away. Given only to backends that know it (`backends.OFFSET`)."""
    present: torch.Tensor | None = None
    """``[N, B]`` bool; a tuple that uses an absent entry does not exist. None: all are there."""
    precision: Precision = "ieee"
    """Of the large matrix products alone; never of the sums."""
    chunk: int | None = None
    """Tuples per tile; None lets the backend choose. Any value gives the same loss."""
    share: tuple[int, int] = (0, 1)
    """``(k, n)``: only the k-th of n disjoint parts of all tuples, so that n processes can divide the work.

    Which tuples a part holds is the backend's business, as long as the n parts are a partition and are near equal in
    work. An anchor without tuples in this part gets ``-inf`` (lse) or 0 (sum, softplus), with zero gradient.
    """

    @property
    def num_modalities(self) -> int:
        """N."""
        return len(self.xs)

    @property
    def batch(self) -> int:
        """B."""
        return self.xs[0].shape[0]

    @property
    def width(self) -> int:
        """D."""
        return self.xs[0].shape[1]
