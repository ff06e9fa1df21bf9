"""Recommendations about steps that are too large: explosion, divergence, oscillation, weights that jump."""

from __future__ import annotations

import math

from trimtab.core.advice import LATE, Recommendation, always
from trimtab.core.recommend_numerics import EXPLOSION, NAN

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
        holds=lambda f: f.lr_leapt_to > 3 * f.lr and f.lr <= 1.5 * f.lr_before,
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
        filled="Try half the batch ({batch_half} in place of {batch}) together with half the learning rate. A smaller "
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
        "even while the loss still looks well.",
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
        text="Review the settings and the data: the guard has had to correct this run again and again.",
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
