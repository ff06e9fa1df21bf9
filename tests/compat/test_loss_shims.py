"""Losses by other projects' names agree with the published formulas, written out here by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from trimtab.losses import ClipLoss, Symile, gram_volume_loss, nway_loss, triangle_area_loss
from trimtab.losses.backends.sampled import draw_permutations


def features(n: int, batch: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(n)
    return [torch.randn(batch, width, generator=draw, dtype=torch.float64).to(dtype) for _ in range(n)]


def agree(mine: Callable[..., Tensor], theirs: Callable[..., Tensor], xs: list[Tensor], rtol: float = 1e-10) -> None:
    """The same loss, gradients and gradient of the scale."""
    results = []
    for function in (mine, theirs):
        leaves = [x.clone().requires_grad_() for x in xs]
        scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
        loss = function(leaves, scale)
        results.append([loss.detach(), *torch.autograd.grad(loss, [*leaves, scale])])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=rtol, atol=rtol), (a, b)


def clip_by_hand(xs: list[Tensor], scale: Tensor) -> Tensor:
    logits = scale * xs[0] @ xs[1].T
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def symile_by_hand(xs: list[Tensor], scale: Tensor) -> Tensor:
    """Three modalities, all pairs of the others as negatives."""
    a, b, c = xs
    every = scale * torch.einsum("ad,bd,cd->abc", a, b, c)
    batch = len(a)
    label = torch.arange(batch) * batch + torch.arange(batch)
    return sum(cross_entropy(every.movedim(m, 0).reshape(batch, -1), label) for m in range(3)) / 3


def test_clip_loss_is_openclips() -> None:
    xs = [normalize(x, dim=-1) for x in features(2, 6, 5)]
    agree(lambda f, s: ClipLoss()(f[0], f[1], s), clip_by_hand, xs)
    assert ClipLoss()(xs[0] * 3, xs[1], 1.0) != ClipLoss()(xs[0], xs[1], 1.0), "features are taken as they come"


def test_clip_loss_keeps_its_gradient_where_the_other_has_none() -> None:
    eye = torch.eye(4, requires_grad=True)
    loss = ClipLoss()(eye, torch.eye(4), 60.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(3 * torch.tensor(-60.0).exp().item(), rel=1e-5)
    assert eye.grad is not None
    assert eye.grad.any()


def test_clip_loss_signature() -> None:
    image, text = features(2, 4, 3)
    loss = ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True, rank=0, world_size=1, use_horovod=False)
    assert isinstance(loss, nn.Module)
    bias = torch.tensor([-10.0], dtype=torch.float64, requires_grad=True)
    plain = loss(image, text, 2.0)
    biased = loss(image, text, 2.0, bias, output_dict=True)
    assert torch.equal(biased["contrastive_loss"], plain)
    biased["contrastive_loss"].backward()
    assert bias.grad is not None
    assert float(bias.grad) == 0.0
    assert torch.equal(loss(image_features=image, text_features=text, logit_scale=2.0, logit_bias=-10.0), plain)
    with pytest.raises(ValueError, match="use_horovod"):
        ClipLoss(use_horovod=True)
    with pytest.raises(ValueError, match="rank is 2 of world_size 2"):
        ClipLoss(rank=2, world_size=2)
    with pytest.raises(ValueError, match="not initialised"):
        ClipLoss(world_size=2)(image, text, 1.0)


def test_clip_loss_of_several_ranks_goes_through_the_process_group(tmp_path: Path) -> None:
    image, text = features(2, 4, 3)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert torch.allclose(ClipLoss(world_size=2)(image, text, 2.0), ClipLoss()(image, text, 2.0), rtol=1e-12)
    finally:
        dist.destroy_process_group()


def test_symile_n_squared_is_the_full_objective() -> None:
    xs = features(3, 5, 4)
    agree(Symile("n_squared"), symile_by_hand, xs)
    agree(Symile("n_squared"), lambda f, s: nway_loss(f, objective="full", normalize=None, logit_scale=s), xs)
    agree(Symile("n_squared"), clip_by_hand, features(2, 5, 4))


def test_symile_n_by_hand_with_the_same_permutations() -> None:
    xs = features(3, 6, 4)
    order = draw_permutations(3, 6, 1, torch.Generator().manual_seed(5))[0]

    def by_hand(f: list[Tensor], scale: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        positive = scale * (f[0] * f[1] * f[2]).sum(-1)
        for m in range(3):
            k, n = (o for o in range(3) if o != m)
            logits = scale * f[m] @ (f[k][order[m, k]] * f[n][order[m, n]]).T
            i = torch.arange(6)
            again = (order[m, k] == i[:, None]) & (order[m, n] == i[:, None])  # the positive by chance
            logits = logits.masked_fill(again, -torch.inf)
            logits = torch.where(torch.eye(6, dtype=torch.bool), positive[:, None], logits)
            total = total + cross_entropy(logits, i)
        return total / 3

    agree(lambda f, s: Symile("n")(f, s, generator=torch.Generator().manual_seed(5)), by_hand, xs)
    first, second = (Symile()(xs, 1.0) for _ in range(2))
    assert first != second, "drawn anew at every call"
    with pytest.raises(ValueError, match="negative_sampling is 'n2'"):
        Symile("n2")
    assert "n_squared" in repr(Symile("n_squared"))


def test_gram_volume_loss_by_hand() -> None:
    def by_hand(f: list[Tensor], scale: Tensor) -> Tensor:
        unit = [normalize(x, dim=-1) for x in f]
        batch = len(unit[0])
        rows = torch.stack(
            [unit[0][:, None].expand(-1, batch, -1), *(u.expand(batch, -1, -1) for u in unit[1:])], dim=-2
        )
        volume = torch.linalg.det(rows @ rows.mT).sqrt()
        labels = torch.arange(batch)
        return (cross_entropy(-scale * volume, labels) + cross_entropy(-scale * volume.T, labels)) / 2

    for n in (2, 3, 4):
        agree(gram_volume_loss, by_hand, features(n, 4, 6), rtol=1e-8)
    flat = features(1, 4, 6, torch.float32)[0].requires_grad_()
    gram_volume_loss([flat, flat * 2, flat * 3]).backward()
    assert flat.grad is not None
    assert torch.isfinite(flat.grad).all(), "equal vectors: volume 0"


def test_triangle_area_loss_by_hand() -> None:
    def by_hand(f: list[Tensor], scale: Tensor) -> Tensor:
        x, y, z = (normalize(v, dim=-1) for v in f)
        u, v = x[:, None] - y[None], x[:, None] - z[None]
        area = (u.square().sum(-1) * v.square().sum(-1) - (u * v).sum(-1) ** 2) / 2
        labels = torch.arange(len(x))
        return (cross_entropy(-scale * area, labels) + cross_entropy(-scale * area.T, labels)) / 2

    agree(triangle_area_loss, by_hand, features(3, 5, 6))
    zero = [x.clone().index_fill_(0, torch.tensor([1]), 0.0).requires_grad_() for x in features(3, 4, 6, torch.float32)]
    triangle_area_loss(zero).backward()
    assert all(torch.isfinite(x.grad).all() for x in zero)
    with pytest.raises(ValueError, match="3 corners"):
        triangle_area_loss(features(4, 3, 3))
