"""Recommendations about steps that are too large (explosion, divergence, oscillation, jumps) and about clipping."""

from __future__ import annotations

import math

from trimtab.advice.engine import LATE, Recommendation, always
from trimtab.advice.numerics import EXPLOSION, NAN

DYNAMICS: tuple[Recommendation, ...] = (
    Recommendation(
        id="D15.3",
        topic="lower-lr",
        findings=(*EXPLOSION, *NAN, "learning-rate", "update-ratio"),
        rank=3,
        when="the learning rate jumped a few steps ago",
        holds=lambda f: f.lr > f.lr_before and not f.input_bad,
        leads=lambda f: f.lr > 3 * f.lr_before,
        text="Put the learning rate back to what it was before it jumped.",
        filled="Put the learning rate back to {lr_before}: it has just jumped to {lr}. Was it a schedule, a resume, "
        "or an unfreezing?",
    ),
    Recommendation(
        id="D15.3c",
        topic="lower-lr",
        findings=EXPLOSION,
        rank=3,
        when="the learning rate jumped a few steps ago and is back where it was",
        holds=lambda f: f.lr_jumped_to > 3 * f.lr and f.lr <= 1.5 * f.lr_before,
        leads=always,
        text="Leave the learning rate, it is back where it was: a few steps far too large did this. Go back to a "
        "checkpoint from before them.",
        filled="Leave the learning rate, it is back at {lr}: a few steps at {lr_jumped_to} did this. Go back to a "
        "checkpoint from before them.",
    ),
    Recommendation(
        id="A33.2",
        topic="lower-lr",
        findings=EXPLOSION,
        rank=12,
        when="nothing clips yet, and the steps are not tiny already",
        holds=lambda f: f.rate_may_be_high and not f.clipping and not f.input_size > 3,
        text="Lower the learning rate tenfold.",
        filled="Lower the learning rate tenfold, from {lr} to {lr_tenth}.",
        also=("A11.2", "A35.3"),
    ),
    Recommendation(
        id="B24.2",
        topic="lower-lr",
        findings=EXPLOSION,
        rank=12,
        when="clipping is on and it happens all the same",
        holds=lambda f: f.rate_may_be_high and f.clipping and not f.input_size > 3,
        text="Lower the learning rate by half: clipping is on, and it was not enough.",
        filled="Lower the learning rate by half, from {lr} to {lr_half}: clipping is on, and it was not enough.",
        also=("B25.2", "B26.4"),
    ),
    Recommendation(
        id="C10.1",
        topic="lower-lr",
        findings=("oscillating-loss",),
        rank=5,
        when="the steps are not tiny already",
        holds=lambda f: f.rate_may_be_high,
        text="Lower the learning rate to three fifths, then to a fifth; or lower the momentum.",
        filled="Lower the learning rate from {lr} to {lr_3_5}, then to {lr_1_5}; or lower the momentum.",
    ),
    Recommendation(
        id="sign-of-the-loss",
        topic="sign",
        findings=("diverging-loss",),
        rank=24,
        when="the update climbs the loss, or the loss never came to half of where it began",
        holds=lambda f: f.wrong_sign or not f.learned,
        leads=lambda f: f.wrong_sign,
        text="Check the sign of the loss and of every term in it, `maximize=` of the optimizer, and the sign of "
        "weight decay.",
    ),
    Recommendation(
        id="before-the-onset",
        topic="go-back",
        findings=("diverging-loss",),
        rank=21,
        when="the loss climbed away from a better level",
        holds=lambda f: "onset" in f.evidence and not f.wrong_sign,
        text="Go back to a checkpoint from before the onset.",
        filled="Go back to a checkpoint from before step {onset}.",
    ),
    Recommendation(
        id="B24.3",
        topic="rising-norm",
        findings=(*EXPLOSION, *NAN),
        rank=13,
        when="the gradient norm had doubled in the recent steps before this one",
        holds=lambda f: f.norm_rises and not f.wrong_sign,
        text="Watch the gradient norm, and act on a rise: it had been rising for a while, which is the early sign.",
        filled="Watch the gradient norm, and act on a rise: over the {num_norms} steps before this one it rose from "
        "{calm_norm} to {highest_norm}, which is the early sign.",
        also=("B24", "B26.2", "D15.2"),
    ),
    Recommendation(
        id="B24.4",
        topic="keep-checkpoint",
        findings=("loss-spike",),
        rank=15,
        when="the gradient norm of this step is not out of the ordinary yet",
        holds=lambda f: not f.norm > 10 * f.usual_norm,
        text="Keep a checkpoint from before this step: a spike often comes a few steps before an explosion.",
        filled="Keep a checkpoint from before step {step}: a spike often comes a few steps before an explosion.",
    ),
    Recommendation(
        id="which-rose-first",
        topic="which-rose-first",
        findings=("diverging-loss",),
        rank=41,
        when="the loss climbed away from a better level",
        holds=lambda f: not f.wrong_sign,
        text='Compare "Loss", "Gradient norm" and "Learning rate" in `trimtab report --html`: which of them rose '
        "first?",
    ),
    Recommendation(
        id="which-jumped",
        topic="which-jumped",
        findings=("weight-jump",),
        rank=10,
        when="neither the learning rate nor the gradient norm is known to have jumped",
        holds=lambda f: not f.norm > 5 * f.usual_norm and math.isnan(f.lr_before),
        text='Compare "Learning rate" and "Gradient norm" in `trimtab report --html` around this step: which of them '
        "jumped?",
        filled='Compare "Learning rate" and "Gradient norm" in `trimtab report --html` around step {step}: which of '
        "them jumped?",
    ),
    Recommendation(
        id="beta2",
        topic="beta2",
        findings=("weight-jump",),
        rank=22,
        when="the optimizer is of Adam's kind, and the gradient norm jumped",
        holds=lambda f: f.adam and f.norm > 5 * f.usual_norm,
        text="Lower beta2 of Adam to 0.95, so that its second moment follows faster.",
    ),
    Recommendation(
        id="A33.3",
        topic="normalisation",
        findings=("exploding-gradient", "diverging-loss"),
        rank=44,
        when="the inputs are not to blame",
        holds=lambda f: not f.input_size > 3 and not f.wrong_sign,
        text="Add LayerNorm (or another normalisation) before the layers whose gradient grew most; residual paths in "
        "recurrent or very deep models.",
        also=("A17.3",),
    ),
    Recommendation(
        id="A33.4",
        topic="stable-loss",
        findings=EXPLOSION,
        rank=39,
        when="a contrastive loss over more than two modalities",
        holds=lambda f: f.contrastive and f.towers > 2 and not f.wrong_sign,
        text="Use the norm-based similarity in the contrastive loss; its values are bounded by the number of "
        "modalities.",
        filled="Use the norm-based similarity in the contrastive loss; its values are bounded by the number of "
        "modalities ({towers}).",
    ),
    Recommendation(
        id="A33.5",
        topic="batch",
        findings=("exploding-gradient", "diverging-loss"),
        rank=62,
        when="the batch has 64 samples or more",
        holds=lambda f: f.batch_size >= 64 and not f.wrong_sign,
        text="Try half the batch together with half the learning rate. A smaller batch alone makes gradients noisier, "
        "not calmer.",
        filled="Try half the batch ({batch_half} instead of {batch}) together with half the learning rate. A smaller "
        "batch alone makes gradients noisier, not calmer.",
    ),
    Recommendation(
        id="A35.7",
        topic="batch",
        findings=(*EXPLOSION, "oscillating-loss"),
        rank=27,
        when="the batch has fewer than 8 samples",
        holds=lambda f: f.batch_size < 8 and not f.wrong_sign,
        text="Accumulate micro-batches up to 8 samples or more: gradients of fewer are noisy.",
        filled="Accumulate {micro_batches} micro-batches to a step (and divide the loss by {micro_batches}): "
        "gradients of {batch} samples are noisy, 8 or more are calmer.",
        also=("B25.4b",),
    ),
    Recommendation(
        id="A35.9",
        topic="warm-up",
        findings=(*EXPLOSION, "oscillating-loss", "update-ratio", "dead-units"),
        rank=31,
        when=f"before step {LATE}, and no warm-up has been seen",
        holds=lambda f: (
            f.step < LATE
            and not (f.warming or f.warmed_up or f.wrong_sign or f.tiny_steps)
            and f.evidence.get("update_ratio", 1.0) > 1e-2
        ),
        text="Warm the learning rate up over the first 500 steps.",
        filled="Warm the learning rate up over the first 500 steps, from about {lr_tenth} or less to {lr}.",
    ),
    Recommendation(
        id="C10.2",
        topic="warm-up",
        findings=(*EXPLOSION, "oscillating-loss"),
        rank=31,
        when=f"before step {LATE}, while or after the rate was warmed up",
        holds=lambda f: f.step < LATE and (f.warming or f.warmed_up) and not f.wrong_sign,
        text="Lengthen the warm-up to 300 to 500 steps.",
    ),
    Recommendation(
        id="C15.3",
        topic="lower-lr",
        findings=(*EXPLOSION, "oscillating-loss"),
        rank=6,
        when="the steps are tiny already",
        holds=lambda f: f.tiny_steps and not f.wrong_sign,
        text="Leave the learning rate: the steps are tiny already. Look for what is wrong in the data, the loss or "
        "its gradient.",
        filled="Leave the learning rate: a step changes the weights by only {update_ratio} of their size. Look for "
        "what is wrong in the data, the loss or its gradient.",
    ),
    Recommendation(
        id="C9.1",
        topic="weight-norm",
        findings=("weight-jump",),
        rank=34,
        when="always",
        holds=always,
        text='See "Update ratio" in `trimtab report --html`: weights should change gradually; a jump is instability, '
        "even while the loss still looks fine.",
    ),
    Recommendation(
        id="C9.2",
        topic="weight-size",
        findings=(*EXPLOSION, "chronic-clipping", "saturated-units"),
        rank=16,
        when="the weights are larger than the root of their number: a root mean square above 1",
        holds=lambda f: f.num_weights > 0 and f.weight_norm > math.sqrt(f.num_weights),
        text="Check the initialisation and use weight decay: the norm of all weights should be well below the root of "
        "their number.",
        filled="Check the initialisation and use weight decay: the norm of all weights is {weight_norm}, a root mean "
        "square of {weight_rms}; healthy ones lie well below 1.",
    ),
    Recommendation(
        id="D16.3",
        topic="reconsider",
        findings=(*EXPLOSION, *NAN, "oscillating-loss", "learning-rate", "update-ratio"),
        rank=4,
        when="the guard has acted three times or more in this run",
        holds=lambda f: f.spent >= 3,
        text="Review the settings and the data: the guard has corrected this run several times already.",
        filled="Review the settings and the data: the guard has corrected this run {spent} times already.",
    ),
    Recommendation(
        id="B26.1",
        topic="defaults",
        findings=("diverging-loss", "update-ratio"),
        rank=46,
        when="it went wrong within the first 50 steps",
        holds=lambda f: f.step < 50 and not f.wrong_sign and f.evidence.get("update_ratio", 1.0) > 1e-2,
        text="Begin with settings that are known to work (the default learning rate of the optimizer, warm-up, "
        '`clip="percentile"`) and change one at a time.',
    ),
)


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
        text="Find out why the norm is above 10 in every step, before clipping: a sum instead of a mean, raw inputs "
        "or targets.",
        filled="Find out why the norm is above 10 in every one of the last {num_norms} steps, usually {usual_norm} "
        "before clipping: a sum instead of a mean, raw inputs or targets.",
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
