"""The losses' part of the self-test: every version against its formula, spoiled inputs, and six modalities at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trimtab.losses import get_stable_loss_function, nway_logits, nway_loss
from trimtab.train.selftest_kit import Facts, Group, Part, expect

BATCH, WIDTH = 16, 64
RANGES = {0: (-1.0, 1.0), 1: (0.0, 3.0), 2: (-1.0, 1.0), 3: (-1.0, 0.0)}


def _features(device: torch.device, num: int, batch: int = BATCH) -> list[Tensor]:
    return [torch.randn(batch, WIDTH).to(device).requires_grad_() for _ in range(num)]


def _by_formula(version: int, xs: list[Tensor]) -> Tensor:
    """All tuples of three modalities by definition, in double precision."""
    a, b, c = (x.detach().cpu().double() for x in xs)
    rows = [u / u.norm(dim=-1, keepdim=True) for u in (a, b, c)]
    shape = (BATCH, BATCH, BATCH, WIDTH)
    u, v, w = rows[0][:, None, None].expand(shape), rows[1][:, None].expand(shape), rows[2].expand(shape)
    if version == 0:
        product: Tensor = (u * v * w).sum(-1)
        return product
    total = u + v + w
    length: Tensor = torch.linalg.vector_norm(total, dim=-1)
    if version == 1:
        return length
    if version == 2:
        cosines = torch.stack([(x * total).sum(-1) for x in (u, v, w)]).prod(0) / length**3
        return cosines.sign() * cosines.abs().pow(1 / 3)
    return -torch.stack([torch.linalg.vector_norm(x - total / 3, dim=-1) for x in (u, v, w)]).mean(0)


def _version(device: torch.device, *, version: int) -> Facts:
    xs = _features(device, 3)
    out = get_stable_loss_function(loss_version=version)(*xs)
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    values = out.detach().cpu().double()
    low, high = RANGES[version]
    expect(bool(torch.isfinite(values).all()), "similarities of ordinary features are not finite")
    expect(low - 1e-4 <= float(values.min()), f"the least similarity is {float(values.min()):.6g}, below {low}")
    expect(float(values.max()) <= high + 1e-4, f"the largest similarity is {float(values.max()):.6g}, above {high}")
    apart = float((values - _by_formula(version, xs)).abs().max())
    expect(apart < 1e-5, f"similarities differ from their formula by up to {apart:.2g}")
    _expect_gradients(xs)
    return {
        "Shape": out.shape,
        "Range": f"[{float(values.min()):.4f}, {float(values.max()):.4f}]",
        "Mean": f"{float(values.mean()):.4f}",
        "Std": f"{float(values.std()):.4f}",
        "Valid": "✓",
        "Backward pass": "✓",
    }


def _spoiled(device: torch.device) -> Facts:
    """A row of zeros in every modality, at every magnitude and in half precision: no NaN, and no gradient for it."""
    largest = 0.0
    for dtype, factor in ((torch.float32, 1e20), (torch.float32, 1e-20), (torch.bfloat16, 1.0), (torch.float16, 1.0)):
        for version in RANGES:
            xs = [(x.detach() * factor).to(dtype) for x in _features(device, 3, batch=4)]
            for x in xs:
                x[1] = 0.0
                x.requires_grad_()
            get_stable_loss_function(loss_version=version)(*xs).sum().backward()  # type: ignore[no-untyped-call]
            what = f"version {version} in {str(dtype).removeprefix('torch.')} with features of {factor:g}"
            _expect_gradients(xs, f" ({what})")
            for x in xs:
                expect(x.grad is not None and not bool(x.grad[1].any()), f"a zero row has a gradient ({what})")
                if x.grad is not None and factor == 1.0:
                    largest = max(largest, float(x.grad.abs().max()))
    return {"Largest gradient": f"{largest:.3g}"}


def _six(device: torch.device) -> Facts:
    """The lines through the diagonal are all that the documented cross-entropy over `[B]^6` ever uses."""
    xs = _features(device, 6, batch=4)
    z = nway_logits(xs, similarity="norm", logit_scale=10.0)
    target = torch.zeros_like(z)
    index = torch.arange(4, device=device)
    target[(index,) * 6] = 1.0
    turns = [[(k + r) % 6 for k in range(6)] for r in range(6)]
    every = torch.stack([cross_entropy(z.permute(t), target.permute(t), reduction="sum") for t in turns]).mean() / 4
    mine: Tensor = nway_loss(xs, similarity="norm", objective="axis", logit_scale=10.0)
    apart = abs(float(mine.detach()) / float(every.detach()) - 1)
    expect(apart < 1e-4, f"the loss of lines differs from that of all 4^6 logits by {apart:.2g}")
    large = _features(device, 6, batch=128)
    loss: Tensor = nway_loss(large, similarity="norm", objective="axis", logit_scale=10.0)
    loss.backward()  # type: ignore[no-untyped-call]
    _expect_gradients(large)
    return {"Loss": f"{float(loss.detach()):.4f}", "Batch": 128, "Difference to all logits": f"{apart:.1e}"}


def _expect_gradients(xs: list[Tensor], where: str = "") -> None:
    for m, x in enumerate(xs):
        expect(x.grad is not None, f"modality {m} got no gradient{where}")
        expect(x.grad is not None and bool(torch.isfinite(x.grad).all()), f"modality {m} got a bad gradient{where}")


LOSSES = Group(
    heading="Testing Stable Loss Functions",
    parts=(
        Part(name="Einsum-based (v0)", body=partial(_version, version=0)),
        Part(name="Norm-based (v1)", body=partial(_version, version=1)),
        Part(name="Cosine similarity (v2)", body=partial(_version, version=2)),
        Part(name="Distance-based (v3)", body=partial(_version, version=3)),
        Part(name="zero rows, extreme values, half precision", body=_spoiled),
        Part(name="six modalities", body=_six),
    ),
)
