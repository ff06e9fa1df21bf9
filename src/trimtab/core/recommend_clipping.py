"""Recommendations about clipping: none yet, limits that are too high or too low, clipping that only hides a cause."""

from __future__ import annotations

from trimtab.core.advice import Recommendation, always
from trimtab.core.recommend_numerics import EXPLOSION, NAN

CHRONIC = ("chronic-clipping",)
OFTEN = 0.5
"""Share of clipped steps from which on clipping is no exception any more."""
AT_THE_LIMIT = (
    "`Guard(..., clip={fair_limit})`: twice the usual norm of this run ({calm_norm}), so that it touches only the "
    "exceptions"
)

CLIPPING: tuple[Recommendation, ...] = (
    Recommendation(
        id="A33.1",
        topic="clip",
        findings=("exploding-gradient", "loss-spike", "diverging-loss"),
        rank=7,
        when="nothing clips yet, and the steps are not tiny already",
        holds=lambda f: not (f.clipping or f.wrong_sign or f.tiny_steps),
        text='Clip the gradient norm now: `Guard(..., clip="percentile")` finds the limit in the norms of the run.',
        filled=f"Clip the gradient norm now, {AT_THE_LIMIT}.",
        also=("A11.1", "E20.7"),
    ),
    Recommendation(
        id="A33.1b",
        topic="clip",
        findings=("weight-jump", "outlier-batch"),
        rank=23,
        when="nothing clips yet",
        holds=lambda f: not f.clipping,
        text='Clip the gradient norm: `Guard(..., clip="percentile")` finds the limit in the norms of the run.',
        filled=f"Clip the gradient norm, {AT_THE_LIMIT}.",
    ),
    Recommendation(
        id="A31.4",
        topic="clip",
        findings=NAN,
        rank=32,
        when="nothing clips yet, and the gradient norm was rising",
        holds=lambda f: not f.clipping and not f.input_bad and f.norm_rises,
        text='Clip the gradient norm, `Guard(..., clip="percentile")`: it was rising before this step. Clipping keeps '
        "a run away from NaN; it cannot repair one.",
        filled="Clip the gradient norm, `Guard(..., clip={fair_limit})`: it had grown from {calm_norm} to "
        "{highest_norm} before this step. Clipping keeps a run away from NaN; it cannot repair one.",
    ),
    Recommendation(
        id="B24.1",
        topic="lower-limit",
        findings=("exploding-gradient", "diverging-loss", "loss-spike"),
        rank=18,
        when="clipping is on with a fixed limit of more than three times the usual norm, and hardly ever acts",
        holds=lambda f: f.limit > 3 * f.calm_norm > 0 and f.clip_rate < OFTEN and not f.wrong_sign and not f.adaptive,
        text='Lower the clip limit to about twice the usual norm, or let `clip="percentile"` find it.',
        filled="Lower the clip limit from {limit} to about {fair_limit}: the usual norm is {calm_norm}, so {limit} "
        "hardly ever acts.",
        also=("B25.3", "B26.5", "D15.1"),
    ),
    Recommendation(
        id="C15.1",
        topic="hidden",
        findings=(*CHRONIC, "exploding-gradient", "diverging-loss", "oscillating-loss"),
        rank=6,
        when="at least half of the recent steps were clipped",
        holds=lambda f: f.clip_rate >= OFTEN and not f.wrong_sign,
        text="Look for the cause, clipping only hides it: the learning rate really used is LR x limit / norm.",
        filled="Look for the cause, clipping only hides it: {clip_rate} of the recent steps were clipped, gradients "
        "are {too_large} times too large, and the learning rate really used is LR x limit / norm = {effective_lr}.",
        also=("C15",),
    ),
    Recommendation(
        id="C12.1",
        topic="early-clipping",
        findings=CHRONIC,
        rank=13,
        when="before step 200",
        holds=lambda f: f.step < 200,
        text="Look again after step 200: much clipping is common at first and should become rarer by itself.",
        also=("C8.3", "C12"),
    ),
    Recommendation(
        id="C12.2",
        topic="early-clipping",
        findings=CHRONIC,
        rank=13,
        when="from step 200 on, when at least half of the recent steps were clipped",
        holds=lambda f: f.step >= 200 and f.clip_rate >= OFTEN,
        text="Do not wait for it to pass: clipping should have become rarer by now and has not.",
        filled="Do not wait for it to pass: clipping should have become rarer by step {step} and has not ({clip_rate} "
        "of the recent steps).",
    ),
    Recommendation(
        id="D16.1",
        topic="fair-limit",
        findings=CHRONIC,
        rank=14,
        when="the limit is fixed and the loss does not rise",
        holds=lambda f: not f.adaptive and not f.loss_rises,
        text='Raise the limit to about the usual norm of this model, or let `clip="percentile"` find it; otherwise '
        "lower the learning rate.",
        filled="Raise the limit from {limit} to about {fair_limit}, twice the usual norm of this model, or let "
        '`clip="percentile"` find it; with plain SGD lower the learning rate to {effective_lr} at the same time.',
    ),
    Recommendation(
        id="D16.1b",
        topic="lower-lr",
        findings=CHRONIC,
        rank=14,
        when="the loss rises although nearly every step is clipped",
        holds=lambda f: f.loss_rises and f.rate_may_be_high,
        text="Lower the learning rate by half: even clipped steps make the loss rise.",
        filled="Lower the learning rate by half, from {lr} to {lr_half}: even clipped steps make the loss rise.",
    ),
    Recommendation(
        id="C8.4",
        topic="norm-band",
        findings=(*CHRONIC, *EXPLOSION),
        rank=17,
        when="every recent gradient norm was above 10 before clipping",
        holds=lambda f: f.lowest_norm > 10 and f.num_norms >= 16,
        text="Find out why the norm is above 10 in every step, before clipping: a sum in place of a mean, raw inputs "
        "or targets.",
        filled="Find out why the norm is above 10 in every one of the last {num_norms} steps, usually {usual_norm} "
        "before clipping: a sum in place of a mean, raw inputs or targets.",
        also=("A35.2",),
    ),
    Recommendation(
        id="B25.1",
        topic="norm-band",
        findings=("exploding-gradient", "diverging-loss", "loss-spike"),
        rank=36,
        when="clipping is on and the usual norm is above the limit",
        holds=lambda f: f.clipping and f.usual_norm > f.limit,
        text='Compare "Gradient norm" in `trimtab report --html` with the limit: norms before clipping should usually '
        "lie below it.",
        filled='Compare "Gradient norm" in `trimtab report --html` with the limit: norms before clipping are usually '
        "{usual_norm}, and should lie below {limit}.",
        also=("B26.2", "D15.2"),
    ),
    Recommendation(
        id="C10.3",
        topic="gradcheck",
        findings=("diverging-loss", "oscillating-loss", *CHRONIC),
        rank=35,
        when="gradients flip, or nearly every step is clipped, or the loss rises after steps were cut or are tiny",
        holds=lambda f: f.name != "diverging-loss" or f.tiny_steps or f.lr_multiplier < 1 or f.clip_rate >= OFTEN,
        text="Check hand-written gradients against finite differences: `torch.autograd.gradcheck` in float64, on the "
        "loss and every custom `autograd.Function`.",
    ),
    Recommendation(
        id="unscale-first",
        topic="unscale",
        findings=CHRONIC,
        rank=8,
        when="a GradScaler is in use",
        holds=lambda f: f.scaler,
        text="Check that `scaler.unscale_(optimizer)` comes before the clipping: scaled gradients are thousands of "
        "times too large.",
    ),
    Recommendation(
        id="let-the-guard-clip",
        topic="unscale",
        findings=("clip-before-unscale",),
        rank=20,
        when="always",
        holds=always,
        text="Or let the guard clip, with `scaler=scaler`: it unscales first.",
        filled="Or let the guard clip, `Guard(..., clip={threshold}, scaler=scaler)`: it unscales first.",
    ),
)
