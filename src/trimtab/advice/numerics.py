"""Recommendations about numbers that are not finite, or about to be: NaN, float16, loss scale."""

from __future__ import annotations

import math

from trimtab.advice.engine import Recommendation, always

NAN = ("nonfinite-loss", "nonfinite-gradient")
EXPLOSION = ("exploding-gradient", "loss-spike", "diverging-loss", "weight-jump")

NUMERICS: tuple[Recommendation, ...] = (
    Recommendation(
        id="loss-first",
        topic="which-first",
        findings=("nonfinite-gradient",),
        rank=9,
        when="the loss of this step is not finite either, and the batch is",
        holds=lambda f: not f.input_bad and f.num_losses > 0 and not math.isfinite(f.loss_now),
        text="Look at the loss first: it is not finite either, and gradients follow from it.",
    ),
    Recommendation(
        id="finite-loss",
        topic="anomaly",
        findings=("nonfinite-gradient",),
        rank=23,
        when="the loss of this step is finite, and so is the batch",
        holds=lambda f: not f.input_bad and math.isfinite(f.loss_now),
        text="Run this one step again under `torch.autograd.set_detect_anomaly(True)`: it names the operation whose "
        "backward pass returned NaN.",
    ),
    Recommendation(
        id="A31.1",
        topic="lower-lr",
        findings=NAN,
        rank=25,
        when="the loss or the gradient norm was rising before, or the first steps were large for the weights",
        holds=lambda f: (
            f.rate_may_be_high and (f.loss_rises or f.norm_rises or (f.step < 10 and f.update_ratio > 0.01))
        ),
        leads=lambda f: f.loss_rises or f.norm_rises,
        text="Lower the learning rate tenfold.",
        filled="Lower the learning rate tenfold, from {lr} to {lr_tenth}.",
        also=("A35.3",),
    ),
    Recommendation(
        id="A31.2",
        topic="eps",
        findings=NAN,
        rank=22,
        when="the batch is not to blame, nothing runs in float16, and the loss was not climbing",
        holds=lambda f: not f.input_bad and not f.float16 and not f.loss_rises,
        leads=lambda f: f.name == "nonfinite-gradient" and math.isfinite(f.loss_now) and not f.norm_rises,
        text="Put an epsilon inside every normalisation, square root and logarithm: `x * (x.square().sum(-1, "
        "keepdim=True) + 1e-8).rsqrt()`. Added outside, or masked with `torch.where`, it still has an infinite "
        "gradient at 0.",
    ),
    Recommendation(
        id="A35.4",
        topic="eps",
        findings=(*NAN, "scale-collapse", "nonfinite-buffer"),
        rank=21,
        when="float16 is at work, and the batch is not to blame",
        holds=lambda f: not f.input_bad and f.float16,
        text="Normalise in float32: an epsilon of 1e-8 is exactly 0 in float16, so it protects nothing there. Cast "
        "first (`x.float()`), or use 1e-4.",
    ),
    Recommendation(
        id="A31.3",
        topic="stable-loss",
        findings=NAN,
        rank=42,
        when="a contrastive loss over more than two modalities is not finite, and the batch is not to blame",
        holds=lambda f: not f.input_bad and not math.isfinite(f.loss_now) and f.contrastive and f.towers > 2,
        text="Use the norm-based similarity, with a bounded logit scale, for the contrastive loss over several "
        "modalities: products of many features overflow or vanish.",
        filled="Use the norm-based similarity, with a bounded logit scale, for the contrastive loss over {towers} "
        "modalities: products of many features overflow or vanish.",
    ),
    Recommendation(
        id="A31.3b",
        topic="stable-loss",
        findings=NAN,
        rank=43,
        when="the loss is not finite, it is no contrastive loss with a temperature, and the batch is not to blame",
        holds=lambda f: not f.input_bad and not f.contrastive and f.num_losses > 0 and not math.isfinite(f.loss_now),
        text="Give raw logits to the loss (`cross_entropy`, `binary_cross_entropy_with_logits`) and use `logsumexp`: "
        "the logarithm of a softmax or sigmoid is -inf as soon as it rounds to 0.",
    ),
    Recommendation(
        id="A31.5",
        topic="division",
        findings=("nonfinite-loss",),
        rank=23,
        when="the batch is not to blame",
        holds=lambda f: not f.input_bad,
        leads=lambda f: f.input_size < 3 and not (f.loss_rises or f.norm_rises) and f.step >= 10,
        text="Look for a division by zero in your own code: a mean over an empty mask, a batch without valid targets, "
        "a standard deviation of one value, the logarithm of 0.",
    ),
    Recommendation(
        id="A35.1",
        topic="which-first",
        findings=("nonfinite-weight", "nonfinite-optimizer-state", "nonfinite-buffer", "nonfinite-validation"),
        rank=24,
        when="the batch of this step is not the cause",
        holds=lambda f: not f.input_bad,
        text='Find out which was not finite first: "What was found" in `trimtab report` lists input, loss, gradient '
        "and weight of the first bad step in the order of cause.",
    ),
    Recommendation(
        id="reject",
        topic="reject",
        findings=("nonfinite-optimizer-state", "nonfinite-weight"),
        rank=15,
        when="the guard only observes, and lets non-finite updates through",
        holds=lambda f: f.mode == "observe",
        text='Let the guard reject non-finite updates: `mode="advise"` does, `mode="observe"` lets them through.',
    ),
    Recommendation(
        id="A35.6",
        topic="huge-loss",
        findings=(*NAN, *EXPLOSION, "scale-collapse"),
        rank=16,
        when="the last finite loss is above 1000, and float16 is at work",
        holds=lambda f: abs(f.loss) > 1000 and f.float16,
        leads=always,
        text="Make the loss smaller: float16 ends at 65504, and a loss above 1000 overflows in it soon. Take the mean "
        "instead of the sum, and normalise the targets.",
        filled="Make the loss smaller: float16 ends at 65504, and a loss of {loss} overflows in it soon. Take the "
        "mean instead of the sum, and normalise the targets.",
    ),
    Recommendation(
        id="A35.6b",
        topic="huge-loss",
        findings=(*NAN, *EXPLOSION),
        rank=26,
        when="the loss was above 1000 from the first step on, and nothing runs in float16",
        holds=lambda f: abs(f.first_loss) > 1000 and not f.float16 and not f.wrong_sign,
        text="Scale the loss: it was above 1000 from the first step on. Take the mean instead of the sum, and "
        "normalise the targets; gradients shrink with it.",
        filled="Scale the loss: it was {first_loss} in the first steps. Take the mean instead of the sum, and "
        "normalise the targets; gradients shrink with it.",
    ),
    Recommendation(
        id="A35.8",
        topic="temperature",
        findings=("temperature-runaway", "not-learning", "modality-collapse", *NAN, *EXPLOSION),
        rank=14,
        when="the factor on the logits is above 100, or below 14 where the trouble is not an explosion",
        holds=lambda f: f.temperature > 100.5 or (f.temperature < 13.9 and f.name not in (*NAN, *EXPLOSION)),
        leads=lambda f: f.name == "temperature-runaway",
        text="Keep `logit_scale.exp()` between 14 and 100: `logit_scale.clamp_(math.log(14), math.log(100))` after "
        "each step, under `torch.no_grad()`.",
        filled="Keep `logit_scale.exp()` between 14 and 100, it is {temperature}: `logit_scale.clamp_(math.log(14), "
        "math.log(100))` after each step, under `torch.no_grad()`.",
    ),
    Recommendation(
        id="A35.10",
        topic="float16",
        findings=(*NAN, "zero-gradient", "vanishing-gradient"),
        rank=12,
        when="float16 is at work without a GradScaler",
        holds=lambda f: f.float16 and not f.scaler,
        text="Scale the loss: float16 needs a `torch.amp.GradScaler` (pass it as `scaler=`); or use bfloat16, which "
        "needs none.",
    ),
    Recommendation(
        id="A35.10b",
        topic="float16",
        findings=("nonfinite-loss", "scale-collapse", "nonfinite-buffer", "diverging-loss"),
        rank=38,
        when="float16 is at work with a GradScaler",
        holds=lambda f: f.float16 and f.scaler,
        text="Keep the loss, norms, variances and softmax in float32 (`torch.autocast(..., enabled=False)` around "
        "them), or use bfloat16. Try the step once in float32: is it finite there?",
    ),
    Recommendation(
        id="E20.2",
        topic="bfloat16",
        findings=("scale-collapse",),
        rank=26,
        when="float16 is at work",
        holds=lambda f: f.float16,
        text="Use bfloat16 if the device can, and leave the scaler out: its range is that of float32.",
    ),
    Recommendation(
        id="collapsed-after-divergence",
        topic="lower-lr",
        findings=("scale-collapse",),
        rank=15,
        when="the loss was rising before",
        holds=lambda f: f.loss_rises and f.rate_may_be_high,
        text="Lower the learning rate and go back to a checkpoint: the run was diverging before the scale collapsed.",
        filled="Lower the learning rate from {lr} to {lr_tenth} and go back to a checkpoint: the run was diverging "
        "before the scale collapsed.",
    ),
    Recommendation(
        id="float16-weights",
        topic="float16",
        findings=("nonfinite-weight",),
        rank=22,
        when="some weights are float16",
        holds=lambda f: f.float16_weights,
        text="Keep master weights in float32: float16 ends at 65504.",
    ),
    Recommendation(
        id="float16-validation",
        topic="float16",
        findings=("nonfinite-validation",),
        rank=22,
        when="float16 is at work",
        holds=lambda f: f.float16,
        text="Evaluate once in float32: is it finite there?",
    ),
    Recommendation(
        id="bfloat16-rounding",
        topic="bfloat16",
        findings=("weights-unchanged",),
        rank=5,
        when="some weights are bfloat16",
        holds=lambda f: f.bfloat16_weights,
        text="Keep float32 master weights: in bfloat16 an update below 1/256 of a weight is rounded away.",
    ),
    Recommendation(
        id="D16.2",
        topic="persistent-nan",
        findings=NAN,
        rank=8,
        when="at least three of the recent steps were rejected",
        holds=lambda f: f.num_rejected >= 3,
        leads=lambda f: f.num_rejected >= 8,
        text="Find the cause, skipping steps does not remove it: check the preprocessing of the data, and the place "
        "in the architecture that produces it.",
        filled="Find the cause, skipping steps does not remove it: {num_rejected} of the last {num_recent} steps were "
        "rejected. Check the preprocessing of the data, and the place in the architecture that produces it.",
    ),
)
