"""Do the N-way losses teach encoders to find one view of a thing among many, given its other views?

    python benchmarks/nway_training.py [--seeds 5] [--steps 400] [--quick] [--out FILE]

Real pairs: six measurements of each handwritten digit that ships with trimtab (see `digit_views`); the classes are not
used. A small encoder per view is trained on 1,437 images; then, among 360 images it never saw, each view is looked for
with the other five (leave one out), and with each single other view (pairs). R@1 is the share found first of 360;
chance is 0.0028. The control is the loss that six-way training started with: unit vectors, one product over all six,
exp(logit_scale) = 14.3, cross-entropy over the [B]^6 tensor, by its formula.

The second table is the generated set of the acceptance tests: a latent vector seen through six fixed random maps with
noise, 128 held-out samples.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trimtab.data import load_digits
from trimtab.losses import nway_loss
from trimtab.train.recipes.clip6.model import version_zero
from trimtab.train.recipes.clip6.views import latent_views

Views = list[Tensor]
Loss = Callable[[Sequence[Tensor], Tensor], Tensor]
WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train: a loss of encodings and scale, where the scale begins, and how the encodings are compared."""

    name: str
    loss: Loss
    scale: float
    product: bool


def digit_views() -> tuple[Views, Views]:
    """Six measurements of each image, standardised by the training images: ``(training, held out)``.

    The left half, the right half, the ink per row and per column, the low spatial frequencies, the edges, and a camera
    of a quarter of the pixels. No two see the same, and none sees everything.
    """
    images = torch.from_numpy(load_digits()[0]).float().view(-1, 8, 8) / 16.0
    k = torch.arange(8.0)
    waves = torch.cos(math.pi * (k[None] + 0.5) * k[:, None] / 8)  # DCT-II, one row per frequency
    spectrum = waves @ images @ waves.T
    down, right = images.diff(dim=1)[:, :, :7], images.diff(dim=2)[:, :7]
    views = [
        images[:, :, :4].flatten(1),
        images[:, :, 4:].flatten(1),
        torch.cat([images.sum(1), images.sum(2)], 1),
        spectrum[:, :4, :4].flatten(1),
        torch.hypot(down, right).flatten(1),
        F.avg_pool2d(images[:, None], 2).flatten(1),
    ]
    held = torch.arange(len(images)) % 5 == 0
    return _standardised([v[~held] for v in views], [v[held] for v in views])


def _standardised(train: Views, held: Views) -> tuple[Views, Views]:
    stats = [(v.mean(0), v.std(0).clamp_min(1e-3)) for v in train]
    train = [(v - mean) / std for v, (mean, std) in zip(train, stats, strict=True)]
    return train, [(v - mean) / std for v, (mean, std) in zip(held, stats, strict=True)]


def arms() -> list[Arm]:
    """Objectives times similarities, and the control."""
    similarities = {"norm": 1 / 0.07, "mip": 1.0, "paircos": 1 / 0.07}
    made = []
    for objective, (similarity, scale) in itertools.product(
        ("axis", "joint", "full", "pairwise"), similarities.items()
    ):
        if objective == "pairwise" and similarity == "mip":
            continue  # of two rows, the mean product and the mean cosine are the same

        def loss(
            xs: Sequence[Tensor], scale: Tensor, objective: str = objective, similarity: str = similarity
        ) -> Tensor:
            return nway_loss(xs, similarity=similarity, objective=objective, logit_scale=scale)

        made.append(Arm(name=f"{objective} {similarity}", loss=loss, scale=scale, product=similarity == "mip"))
    made.append(Arm(name="control: version 0", loss=version_zero, scale=1 / 0.07, product=True))
    return made


def train(
    arm: Arm, data: Views, *, batch: int, steps: int, seed: int, rate: float = 2e-3
) -> tuple[nn.ModuleList, float]:
    """Encoders after ``steps`` steps of AdamW, and the norm of the very first gradient."""
    torch.manual_seed(seed)
    encoders = nn.ModuleList(nn.Sequential(nn.Linear(v.shape[1], 64), nn.GELU(), nn.Linear(64, WIDTH)) for v in data)
    log_scale = nn.Parameter(torch.tensor(math.log(arm.scale)))
    optimizer = torch.optim.AdamW([*encoders.parameters(), log_scale], lr=rate)
    draw = torch.Generator().manual_seed(seed)
    first = math.nan
    for step in range(steps):
        rows = torch.randperm(len(data[0]), generator=draw)[:batch]
        xs = [encoder(v[rows]) for encoder, v in zip(encoders, data, strict=True)]
        loss = arm.loss(xs, log_scale.clamp(max=math.log(100.0)).exp())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = math.sqrt(sum(float(p.grad.square().sum()) for p in encoders.parameters() if p.grad is not None))
        optimizer.step()
    return encoders, first


@torch.no_grad()
def retrieval(arm: Arm, encoders: nn.ModuleList, held: Views) -> tuple[float, float]:
    """R@1 of leave-one-out (mean over the six views) and of single pairs (mean over the 30 ordered pairs)."""
    units = [F.normalize(encoder(v), dim=-1) for encoder, v in zip(encoders, held, strict=True)]
    own = torch.arange(len(units[0]))

    def found(query: Tensor, view: Tensor) -> float:
        return float(((query @ view.T).argmax(1) == own).float().mean())

    left_out = []
    for m, view in enumerate(units):
        others = torch.stack(units[:m] + units[m + 1 :])
        left_out.append(found(others.prod(0) if arm.product else others.sum(0), view))
    pairs = [found(p, q) for p, q in itertools.permutations(units, 2)]
    return statistics.fmean(left_out), statistics.fmean(pairs)


def table(
    title: str, chosen: list[Arm], batch: int, steps: int, seeds: int, data: Callable[[int], tuple[Views, Views]]
) -> str:
    """One table: every arm with every seed at one batch size."""
    lines = [f"### {title}: batch {batch}, {steps} steps, {seeds} seeds", ""]
    lines += ["| loss | leave one out R@1 | lowest to highest | pairs R@1 | first gradient norm | ms per step |"]
    lines += ["|---|---|---|---|---|---|"]
    for arm in chosen:
        outs, pairs, firsts, spent = [], [], [], 0.0
        for seed in range(seeds):
            train_views, held = data(seed)
            began = time.process_time()
            encoders, first = train(arm, train_views, batch=batch, steps=steps, seed=seed)
            spent += time.process_time() - began
            out, pair = retrieval(arm, encoders, held)
            outs.append(out)
            pairs.append(pair)
            firsts.append(first)
        mean = statistics.fmean
        lines.append(
            f"| {arm.name} | {mean(outs):.3f} | {min(outs):.3f} to {max(outs):.3f} | {mean(pairs):.3f} "
            f"| {mean(firsts):.2g} | {1000 * spent / (steps * seeds):.1f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="N-way losses on six views of real digits.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help="where every loss takes part; the control builds batch^6")
    parser.add_argument("--large", type=int, default=128, help="for the losses that cost batch^2")
    parser.add_argument("--quick", action="store_true", help="one seed, 100 steps")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    seeds, steps = (1, 100) if given.quick else (given.seeds, given.steps)
    torch.set_num_threads(1)
    real, every = digit_views(), arms()
    cheap = [arm for arm in every if arm.name.split()[0] in ("axis", "joint", "pairwise")]
    of_latent = [
        arm
        for arm in every
        if arm.name in ("axis norm", "axis mip", "full norm", "pairwise norm", "control: version 0")
    ]
    product = next(arm for arm in every if arm.name == "axis mip")
    starts = [replace(product, name=f"axis mip from {start:.3g}", scale=start) for start in (1 / 15, 0.25, 1.0, 4.0)]
    text = "\n".join(
        [
            table("Six views of digits", every, given.batch, steps, seeds, lambda seed: real),
            table("Six views of digits, large batch", cheap, given.large, steps, seeds, lambda seed: real),
            table("Where the scale of the product begins", starts, given.large, steps, seeds, lambda seed: real),
            table(
                "Generated: six tanh maps of one latent vector",
                of_latent,
                given.batch,
                100 if given.quick else 300,
                seeds,
                latent_views,
            ),
        ]
    )
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
