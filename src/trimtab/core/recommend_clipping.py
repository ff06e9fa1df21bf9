"""Recommendations about clipping: limits that are too high or too low, and clipping that only hides the disease."""

from __future__ import annotations

from trimtab.core.advice import Recommendation
from trimtab.core.recommend_numerics import EXPLOSION

CHRONIC = ("chronic-clipping",)
OFTEN = 0.5
"""Share of clipped steps from which on clipping is no exception any more."""

CLIPPING: tuple[Recommendation, ...] = (
    Recommendation(
        id="B24.1",
        topic="lower-limit",
        findings=("exploding-gradient", "diverging-loss", "loss-spike"),
        rank=18,
        when="clipping is on with a limit above 0.3, and clipped steps are the exception",
        holds=lambda f: f.limit > 0.3 and f.clip_rate < OFTEN and not f.wrong_sign and not f.adaptive,
        text="Lower the clip limit to 0.3.",
        filled="Lower the clip limit from {limit} to 0.3; the usual norm is {usual_norm}, so look whether clipping "
        "then becomes the rule.",
        also=("B25.3", "B26.5"),
    ),
    Recommendation(
        id="C15.1",
        topic="hidden",
        findings=(*CHRONIC, "exploding-gradient", "diverging-loss", "oscillating-loss"),
        rank=6,
        when="at least half of the recent steps were clipped",
        holds=lambda f: f.clip_rate >= OFTEN and not f.wrong_sign,
        text="Look for the cause, clipping only hides it: the rate really used is LR x limit / norm.",
        filled="Look for the cause, clipping only hides it: {clip_rate} of the recent steps were clipped, gradients "
        "are {too_large} times too large, and the rate really used is LR x limit / norm = {effective_lr}.",
        also=("C15",),
    ),
    Recommendation(
        id="C12.1",
        topic="early-clipping",
        findings=CHRONIC,
        rank=27,
        when="before step 200",
        holds=lambda f: f.step < 200,
        text="Look again after step 200: much clipping is common at first and should become rarer by itself.",
        also=("C8.3", "C12"),
    ),
    Recommendation(
        id="C12.2",
        topic="early-clipping",
        findings=CHRONIC,
        rank=26,
        when="from step 200 on, when at least half of the recent steps were clipped",
        holds=lambda f: f.step >= 200 and f.clip_rate >= OFTEN,
        text="Clipping should have become rarer by now and has not: this does not pass by itself.",
        filled="Clipping should have become rarer by step {step} and has not ({clip_rate} of the recent steps): this "
        "does not pass by itself.",
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
        also=("D15.1",),
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
        id="D15.1b",
        topic="fair-limit",
        findings=("exploding-gradient",),
        rank=28,
        when="the limit is fixed and more than five times the usual norm",
        holds=lambda f: not f.adaptive and f.limit > 5 * f.usual_norm,
        text="Set the clip limit for this model: about twice its usual norm.",
        filled="Set the clip limit for this model: {limit} is far above its usual norm of {usual_norm}, so clipping "
        "hardly ever helps; take about {fair_limit}.",
    ),
    Recommendation(
        id="C8.4",
        topic="norm-band",
        findings=(*CHRONIC, *EXPLOSION),
        rank=17,
        when="every recent gradient norm was above 10 before clipping",
        holds=lambda f: f.lowest_norm > 10 and f.num_norms >= 16,
        text="The norm before clipping is above 10 in every step: find the factor (a sum in place of a mean, raw "
        "inputs or targets), then lower the learning rate.",
        filled="The norm before clipping is above 10 in every one of the last {num_norms} steps, usually {usual_norm}: "
        "find the factor (a sum in place of a mean, raw inputs or targets), then lower the learning rate.",
        also=("A35.2",),
    ),
    Recommendation(
        id="B25.1",
        topic="norm-band",
        findings=("exploding-gradient", "diverging-loss", "loss-spike"),
        rank=36,
        when="clipping is on and the usual norm is above the limit",
        holds=lambda f: f.clipping and f.usual_norm > f.limit,
        text="Compare the norms in `trimtab report` with the limit: the average before clipping should lie below it.",
        filled="Compare the norms in `trimtab report` with the limit: before clipping they average {usual_norm}, and "
        "should lie below {limit}. (0.5 is right for a loss of that scale only.)",
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
)
