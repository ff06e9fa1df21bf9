"""`trimtab doctor` on the recipe: silent on the sound one, and 24 seeded faults named first, each with exit code 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.matrix import sampled
from trimtab.doctor.checklist import Report, Status
from trimtab.doctor.examine import examine
from trimtab.doctor.target import check_target
from trimtab.train.recipe import doctor_target
from trimtab.train.recipes.pairs import RECIPE

SMALL = {"num_pairs": 240, "width": 16, "heads": 2, "batch_size": 16}
Built = dict[str, Any]
STEP = Callable[[nn.Module, Any], Any]
LATE = (
    "learning-rate",
    "not-learning",
    "gradcheck",
    "collapsed-output",
    "initial-loss",
    "not-reproducible",
    "checkpoint-round-trip",
    "resume-differs",
)
"""Experiments that end the list and take longest: what is named before them is named whether they run or not."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def build() -> Built:
    return doctor_target(RECIPE, SMALL)


def loop(
    built: Built,
    *,
    zero: bool = True,
    steps: int = 1,
    scaler: Any = None,
    dtype: torch.dtype | None = None,
    clip: float = 0.0,
    factor: float = 1.0,
) -> None:
    """A loop of the user's own around the loss: backward and step are no longer doctor's."""
    inner, optimizer = built["step_fn"], built["optimizer"]

    def step_fn(model: nn.Module, batch: Any) -> float:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = factor * inner(model, batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for _ in range(steps):
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        if zero:
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    built["step_fn"] = step_fn
    if scaler is not None:
        built["scaler"] = scaler


def around(built: Built, change: Callable[[STEP, nn.Module, Any], Any]) -> None:
    inner = built["step_fn"]
    built["step_fn"] = lambda model, batch: change(inner, model, batch)


def loss_detached(built: Built) -> None:
    around(built, lambda inner, model, batch: inner(model, batch).detach())


def output_data(built: Built) -> None:
    built["model"].register_forward_hook(lambda module, given, out: out.data)


def parameters_missing(built: Built) -> None:
    built["optimizer"] = torch.optim.AdamW(built["model"].blocks.parameters(), lr=2e-3)


def parameters_recreated(built: Built) -> None:
    built["model"].head = nn.Linear(SMALL["width"], 3)


def rate(value: float) -> Callable[[Built], None]:
    def change(built: Built) -> None:
        for group in built["optimizer"].param_groups:
            group["lr"] = value

    return change


def evaluating(built: Built) -> None:
    built["model"].eval()


def batchnorm_evaluating(built: Built) -> None:
    for module in built["model"].modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def no_grad(built: Built) -> None:
    around(built, lambda inner, model, batch: torch.no_grad()(inner)(model, batch))


def in_place(built: Built) -> None:
    def spoil(module: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        given[0].mul_(0.5)  # what the layer keeps for its backward pass

    built["model"].projector.register_forward_hook(spoil)


def all_frozen(built: Built) -> None:
    built["model"].requires_grad_(False)


def dead_branch(built: Built) -> None:
    built["model"].words.register_forward_hook(lambda module, given, out: out * 0.0)


def cut_branch(built: Built) -> None:
    built["model"].vision.register_forward_hook(lambda module, given, out: out.detach())


def dataset(built: Built) -> Any:
    built["loader"].dataset.images = built["loader"].dataset.images.clone()
    return built["loader"].dataset


def nan_pixel(built: Built) -> None:
    data = dataset(built)
    data.images[data.asked.first[0], 0, 0, 0] = float("nan")


def labels_from_one(built: Built) -> None:
    dataset(built).asked.labels.add_(1)


def empty_batches(built: Built) -> None:
    built["loader"] = [{key: value[:0] for key, value in batch.items()} for batch in built["loader"]]


def double_input(built: Built) -> None:
    data = dataset(built)
    data.images = data.images.double()


def on_meta(built: Built) -> None:
    built["model"].to("meta")


def float16_without_scaler(built: Built) -> None:
    loop(built, dtype=torch.float16, factor=1e-3)


def clipped_before_unscaling(built: Built) -> None:
    loop(built, dtype=torch.float16, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10), clip=1.0)


def stepped_twice(built: Built) -> None:
    loop(built, steps=2)


def never_cleared(built: Built) -> None:
    loop(built, zero=False)


def blind(built: Built) -> None:
    one = next(iter(built["loader"]))

    def covered(inner: STEP, model: nn.Module, batch: Any) -> Any:
        same = {key: one[key][: len(batch[key])] for key in ("first", "second", "prompt")}
        return inner(model, {**batch, **same})

    around(built, covered)


def wrong_sign(built: Built) -> None:
    around(built, lambda inner, model, batch: -inner(model, batch))


FAULTS: tuple[tuple[Callable[[Built], None], str], ...] = (
    (loss_detached, "loss-detached"),
    (output_data, "loss-detached"),
    (parameters_missing, "optimizer-misses-parameters"),
    (parameters_recreated, "stale-optimizer"),
    (rate(0.0), "learning-rate"),
    (rate(10.0), "learning-rate"),
    (evaluating, "eval-mode"),
    (batchnorm_evaluating, "batchnorm-frozen"),
    (no_grad, "no-grad"),
    (in_place, "in-place-hazard"),
    (all_frozen, "missing-gradient"),
    (dead_branch, "zero-gradient"),
    (cut_branch, "missing-gradient"),
    (nan_pixel, "nonfinite-input"),
    (labels_from_one, "label-range"),
    (empty_batches, "empty-batch"),
    (double_input, "dtype-mismatch"),
    (on_meta, "device-placement"),
    (float16_without_scaler, "gradient-underflow"),
    (clipped_before_unscaling, "clip-before-unscale"),
    (stepped_twice, "double-step"),
    (never_cleared, "stale-gradient"),
    (blind, "loss-ignores-input"),
    (wrong_sign, "loss-sign"),
)


def seen(change: Callable[[Built], None] | None = None, ignore: tuple[str, ...] = LATE) -> Report:
    built = build()
    if change is not None:
        change(built)
    return examine(check_target(built, lenient=True), ignore=ignore)


def test_the_sound_recipe_passes_without_a_word() -> None:
    report = seen(ignore=())
    assert [line.name for line in report.lines if not line.ok] == []


@pytest.mark.parametrize(
    ("change", "cause"),
    sampled(
        {f"{i}-{one[1]}": one for i, one in enumerate(FAULTS)}, "0-loss-detached 3-stale-optimizer 13-nonfinite-input"
    ),
)
def test_e12_a_seeded_fault_is_named_first(change: Callable[[Built], None], cause: str) -> None:
    fails = [line.name for line in seen(change, tuple(name for name in LATE if name != cause)).of(Status.FAIL)]
    assert fails[:1] == [cause], fails
