"""The four documented versions of the stable similarity, each of all tuples of any number of modalities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.losses.prepare import check_name, check_xs
from trimtab.losses.stable import FORMS, StableLossFunctions

VERSIONS = {0: "einsum", 1: "norm", 2: "cosine", 3: "distance"}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "swish": functional.silu,
    "mish": functional.mish,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "scaled_tanh": lambda x: 1.7159 * torch.tanh(2 / 3 * x),
}
"""Those of `trimtab.nn.ImprovedActivations`, by the same names."""

__all__ = ["ACTIVATIONS", "VERSIONS", "StableLoss", "get_stable_loss_function"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLoss:
    """A similarity of N modalities ``[B, D]``: call it with them. Made by `get_stable_loss_function`."""

    loss_version: int
    normalize: bool
    eps: float
    activation: str | None
    form: str
    rescale: bool

    def __call__(self, *features: Tensor) -> Tensor:
        """The similarities of all tuples, ``[B] * N``, or of the lines ``[B, B]`` of the last modality."""
        xs = check_xs(features)
        ops = StableLossFunctions(eps=self.eps, clamp_min=-torch.inf, clamp_max=torch.inf)
        method = {
            0: ops.stable_einsum_similarity,
            1: ops.stable_norm_based_similarity,
            2: ops.stable_cosine_similarity_nd,
            3: ops.stable_euclidean_distance_nd,
        }[self.loss_version]
        result: Tensor = method(*xs, normalize=self.normalize, form=self.form)
        if self.rescale and self.loss_version == 0:
            result = result * float(xs[0].shape[1]) ** ((len(xs) - 2) / 2)
        return result if self.activation is None else ACTIVATIONS[self.activation](result)


def get_stable_loss_function(
    loss_version: int = 0,
    normalize: bool = True,
    eps: float = 1e-8,
    activation: str | None = None,
    *,
    form: str = "full",
    rescale: bool = False,
) -> StableLoss:
    """A similarity function ``fn(*features)`` of N modalities ``[B, D]``, by its documented number.

    ==========  ======================================================================  ==================
    version     value of a tuple of (unit) vectors ``u_m`` with sum ``s``               range if normalised
    ==========  ======================================================================  ==================
    0 einsum    ``sum_d prod_m u_m[d]``                                                 -1 to 1
    1 norm      ``|s|``                                                                 0 to N
    2 cosine    signed geometric mean of ``cos(u_m, s)``                                -1 to 1
    3 distance  ``-1/N sum_m |u_m - s/N|``                                              -1 to 0
    ==========  ======================================================================  ==================

    These are logits without a scale. For training prefer `nway_loss` (``similarity`` mip, norm, cosmean or dist):
    its default objective needs N times B x B of these numbers, not ``B^N``.

    Args:
        loss_version: 0 to 3.
        normalize: make the rows of length 1 first; without it, versions 0, 1 and 3 grow with the features.
        eps: length below which a row counts as having no direction, and fades to zero.
        activation: name of a function of `trimtab.nn.ImprovedActivations` applied to the result.
        form: `full` gives ``[B] * N``; `line` gives ``[B, B]``, entry ``(i, j)`` of the tuple that takes sample ``j``
            of the last modality and ``i`` of all others: the lines that `nway_loss(objective="axis")` compares.
        rescale: multiply version 0 by ``D^(N/2 - 1)``. Products of unit vectors vanish with N and D (5e-5 for six equal
            vectors of width 512), and a softmax over them learns nothing; so rescaled they are of order 1.

    Differs from the documented original: versions 2 and 3 have the shape of the others, version 2 has a sign, no
    gradient is NaN or infinite (zero rows, orthogonal or equal vectors, half precision), nothing is cut off by a clamp,
    ``normalize=False`` acts, an unknown activation is an error, and a tensor that would not fit into memory is refused
    (`TooCostly`) before it is allocated.

    Example:
        >>> import torch
        >>> from trimtab.losses import get_stable_loss_function
        >>> calculate_loss = get_stable_loss_function(loss_version=1)
        >>> features = [torch.eye(4)] * 3
        >>> calculate_loss(*features).shape, round(float(calculate_loss(*features)[2, 2, 2]), 4)
        (torch.Size([4, 4, 4]), 3.0)
    """
    if isinstance(loss_version, bool) or loss_version not in VERSIONS:
        known = ", ".join(f"{number} ({name})" for number, name in VERSIONS.items())
        raise ValueError(f"loss_version is {loss_version!r}; expected one of {known}")
    check_name("activation", activation, [*ACTIVATIONS, None])
    check_name("form", form, FORMS)
    StableLossFunctions(eps=eps)  # says what is wrong with it now, not at the first batch
    return StableLoss(
        loss_version=loss_version, normalize=normalize, eps=eps, activation=activation, form=form, rescale=rescale
    )
