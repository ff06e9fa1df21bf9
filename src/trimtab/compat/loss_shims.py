"""Losses that other projects call by these names and arguments, computed by `nway_loss`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.losses.nway import excluded, nway_loss
from trimtab.losses.problem import as_factor, check_name, make_problem
from trimtab.losses.tuple_reduction import lse

NEGATIVES = ("n", "n_squared")

__all__ = ["ClipLoss", "Symile", "gram_volume_loss", "triangle_area_loss"]


class ClipLoss(nn.Module):
    """OpenCLIP's contrastive loss of two modalities, by its signature.

    Features are taken as they come: normalise them before, as OpenCLIP's models do. The value is the mean of the two
    cross-entropies; its gradient stays right where theirs has rounded away (a loss below 1e-7 in float32, or logits
    that autocast made of half precision), and large batches are never held as a matrix of logits.

    With ``world_size > 1`` the loss is that of the batches of all ranks of the default process group, on every rank,
    with the gradient that `DistributedDataParallel` averages to that of one process: what OpenCLIP gives with
    ``gather_with_grad``. ``local_loss``, ``gather_with_grad`` and ``cache_labels`` choose among ways to compute it
    there, and are accepted here.

    Example:
        >>> image, text = torch.eye(4), torch.eye(4)
        >>> round(float(ClipLoss()(image, text, logit_scale=10.0)), 6)
        0.000136
        >>> list(ClipLoss()(image, text, 10.0, output_dict=True))
        ['contrastive_loss']
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod is True; the ranks meet through torch.distributed alone: leave it out")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} of world_size {world_size}; expected 0 to {world_size - 1}")
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self.rank, self.world_size = rank, world_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or a dictionary with it. A bias is added to every logit alike: the softmax never sees it."""
        group = None
        if self.world_size > 1:
            if not dist.is_initialized():
                raise ValueError(f"world_size is {self.world_size}, but torch.distributed is not initialised")
            group = dist.group.WORLD
        loss: Tensor = nway_loss(
            [image_features, text_features],
            similarity="mip",
            objective="axis",
            normalize=None,
            logit_scale=logit_scale,
            group=group,
        )
        if isinstance(logit_bias, Tensor) and logit_bias.requires_grad:
            loss = loss + 0.0 * logit_bias.sum()  # DistributedDataParallel wants a gradient for every parameter
        return {"contrastive_loss": loss} if output_dict else loss


class Symile(nn.Module):
    """Symile's loss of N modalities by their multilinear inner product (Saporta et al., 2024), for N of 2 and more.

    ``negative_sampling="n_squared"`` compares every anchor with all tuples of the others (``objective="full"``),
    ``"n"`` with one random set of B - 1 of them (``objective="sampled"``), drawn again at every call.

    Representations are taken as they come, `logit_scale` is the factor itself (already exponentiated), and a random
    tuple that happens to be the positive is left out of the negatives, where the original counts it.

    Example:
        >>> xs = [torch.randn(5, 8) for _ in range(3)]
        >>> Symile("n_squared")(xs, logit_scale=1.0).shape
        torch.Size([])
    """

    def __init__(self, negative_sampling: str = "n") -> None:
        check_name("negative_sampling", negative_sampling, NEGATIVES)
        super().__init__()
        self.negative_sampling = negative_sampling

    def forward(
        self, representations: Sequence[Tensor], logit_scale: float | Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """The mean over all modalities as anchors; `generator` draws the negatives of ``"n"``."""
        objective = "full" if self.negative_sampling == "n_squared" else "sampled"
        loss: Tensor = nway_loss(
            list(representations),
            similarity="mip",
            objective=objective,
            normalize=None,
            logit_scale=logit_scale,
            generator=generator,
        )
        return loss

    def extra_repr(self) -> str:
        """The way negatives are chosen."""
        return f"negative_sampling={self.negative_sampling!r}"


def gram_volume_loss(xs: Sequence[Tensor], logit_scale: float | Tensor = 1 / 0.07, anchor: int = 0) -> Tensor:
    """GRAM's loss: the smaller the volume that a tuple's unit vectors span, the more alike they are.

    Modality `anchor` of sample i is compared with the others of all samples j, and the others of i with the anchor
    of all j; the mean of both. The gradient is finite where vectors lie in one plane (volume 0).

    Example:
        >>> x = torch.eye(4)
        >>> near, far = [x, x + 0.1, x - 0.1], [x, x.roll(1, 0), x.roll(2, 0)]
        >>> bool(gram_volume_loss(near, logit_scale=10.0) < gram_volume_loss(far, logit_scale=10.0))
        True
    """
    halves = [
        nway_loss(xs, similarity="volume", objective=objective, logit_scale=logit_scale, anchors=[anchor])
        for objective in ("axis", "joint")
    ]
    return (halves[0] + halves[1]) / 2


def triangle_area_loss(xs: Sequence[Tensor], logit_scale: float | Tensor = 1 / 0.07) -> Tensor:
    """TRIANGLE's loss of three modalities: the flatter the triangle of their unit vectors, the more alike they are.

    The logit is minus twice the squared area (as published: smooth where the triangle is flat) of the first modality of
    sample i with the other two of sample j; the mean of the two cross-entropies over i and over j.

    Example:
        >>> x = torch.eye(4)
        >>> near, far = [x, x + 0.1, x - 0.1], [x, x.roll(1, 0), x.roll(2, 0)]
        >>> bool(triangle_area_loss(near, logit_scale=10.0) < triangle_area_loss(far, logit_scale=10.0))
        True
    """
    x, y, z = make_problem(_three(xs), "norm", normalize="l2").xs
    with torch.autocast(x.device.type, enabled=False):
        xy, xz, yz = x @ y.T, x @ z.T, (y * z).sum(-1)
        xx, yy, zz = x.square().sum(-1).unsqueeze(1), y.square().sum(-1), z.square().sum(-1)
        u, v, uv = xx + yy - 2 * xy, xx + zz - 2 * xz, xx - xz - xy + yz  # |x-y|^2, |x-z|^2, <x-y, x-z>
        logits = as_factor("logit_scale", logit_scale, x, positive=True) * (uv.square() - u * v) / 2
        negatives = logits.masked_fill(torch.eye(len(x), dtype=torch.bool, device=x.device), -torch.inf)
        return excluded(torch.stack([lse(negatives, 1), lse(negatives, 0)]), logits.diagonal()).mean()


def _three(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(xs) != 3:
        raise ValueError(f"there are {len(xs)} modalities; a triangle has 3 corners")
    return xs
