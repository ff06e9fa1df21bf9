"""Recommendations about numbers that are not finite, or about to be: NaN, float16, loss scale, data."""

from __future__ import annotations

import math

from trimtab.core.advice import Recommendation

NAN = ("nonfinite-loss", "nonfinite-gradient")
EXPLOSION = ("exploding-gradient", "loss-spike", "diverging-loss", "weight-jump")

NUMERICS: tuple[Recommendation, ...] = (
    Recommendation(
        id="A31.1",
        topic="lower-lr",
        findings=NAN,
        rank=25,
        when="the loss or the gradient norm was rising before, or it is one of the first ten steps",
        holds=lambda f: f.rate_may_be_high and (f.loss_rises or f.norm_rises or f.step < 10),
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
        when="the batch is not to blame, and nothing runs in float16",
        holds=lambda f: not f.input_bad and not f.float16,
        text="Put an epsilon inside every normalisation, square root and logarithm: "
        "`x * (x.square().sum(-1, keepdim=True) + 1e-8).rsqrt()`. Added outside, or masked with `torch.where`, it "
        "still has an infinite gradient at 0.",
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
        when="the loss itself is not finite, and the batch is not to blame",
        holds=lambda f: not f.input_bad and not math.isfinite(f.loss_now) and not math.isnan(f.temperature),
        text="Use the norm-based similarity (version 1), with a bounded logit scale, for a contrastive loss over "
        "several modalities: products of many features overflow or vanish.",
    ),
    Recommendation(
        id="A31.3b",
        topic="stable-loss",
        findings=(*NAN, *EXPLOSION),
        rank=43,
        when="the loss is not finite, or far above 1000, and it is no contrastive loss with a temperature",
        holds=lambda f: (
            not f.input_bad
            and math.isnan(f.temperature)
            and (abs(f.loss) > 1000 or (f.name in NAN and math.isnan(f.loss_now)))
        ),
        text="Give raw logits to the loss (`cross_entropy`, `binary_cross_entropy_with_logits`) and use `logsumexp`: "
        "the logarithm of a softmax or sigmoid is -inf as soon as it rounds to 0.",
    ),
    Recommendation(
        id="A31.4",
        topic="clip",
        findings=NAN,
        rank=32,
        when="nothing clips yet, and the gradient norm was rising or above 10",
        holds=lambda f: not f.clipping and not f.input_bad and (f.norm_rises or f.usual_norm > 10),
        text="Clip the gradient norm at 1.0, `Guard(..., clip=1.0)`: the steps before this one were growing. Clipping "
        "keeps a run away from NaN; it cannot mend one.",
        filled="Clip the gradient norm at 1.0, `Guard(..., clip=1.0)`: it had grown to {highest_norm} before this "
        "step. Clipping keeps a run away from NaN; it cannot mend one.",
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
        text="Find out which was not finite first: `trimtab report` lists input, loss, gradient and weight of the "
        "first bad step in the order of cause.",
    ),
    Recommendation(
        id="A35.6",
        topic="huge-loss",
        findings=(*NAN, *EXPLOSION, "scale-collapse"),
        rank=16,
        when="the last finite loss is above 1000",
        holds=lambda f: abs(f.loss) > 1000,
        leads=lambda f: f.float16,
        text="A loss above 1000 is about to overflow: take the mean instead of the sum, and normalise the targets. "
        "float16 ends at 65504.",
        filled="A loss of {loss} is about to overflow: take the mean instead of the sum, and normalise the targets. "
        "float16 ends at 65504.",
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
        "each step, under `no_grad`.",
        filled="Keep `logit_scale.exp()` between 14 and 100, it is {temperature}: "
        "`logit_scale.clamp_(math.log(14), math.log(100))` after each step, under `no_grad`.",
    ),
    Recommendation(
        id="A35.10",
        topic="float16",
        findings=(*NAN, "zero-gradient", "gradient-underflow", "vanishing-gradient"),
        rank=12,
        when="float16 is at work without a GradScaler",
        holds=lambda f: f.float16 and not f.scaler,
        text="Mixed precision with care: float16 needs a GradScaler (pass it as `scaler=`), or use bfloat16, which "
        "needs none.",
    ),
    Recommendation(
        id="A35.10b",
        topic="float16",
        findings=("nonfinite-loss", "scale-collapse", "nonfinite-buffer", "diverging-loss"),
        rank=38,
        when="float16 is at work with a GradScaler",
        holds=lambda f: f.float16 and f.scaler,
        text="Mixed precision with care: keep the loss, norms, variances and softmax in float32 "
        "(`torch.autocast(..., enabled=False)` around them), or use bfloat16. Try the step once in float32: is it "
        "finite there?",
    ),
    Recommendation(
        id="B25.5",
        topic="outliers",
        findings=EXPLOSION,
        rank=11,
        when="the inputs of this step were more than three times their usual size",
        holds=lambda f: f.input_size > 3,
        leads=lambda f: True,
        text="Look at the batch of this step first: its inputs are far larger than usual. A corrupt file, a sample "
        "that was not normalised, an extreme outlier.",
        filled="Look at the batch of step {step} first: its inputs are {input_size} times as large as usual. A corrupt "
        "file, a sample that was not normalised, an extreme outlier.",
    ),
    Recommendation(
        id="B25.5b",
        topic="outliers",
        findings=EXPLOSION,
        rank=34,
        when="the inputs of this step were of their usual size",
        holds=lambda f: f.input_size <= 3 and not f.wrong_sign,
        text="Look at the targets of this batch for outliers and wrong labels; its inputs are of the usual size.",
        filled="Look at the targets of step {step} for outliers and wrong labels; its inputs are of the usual size.",
    ),
    Recommendation(
        id="D16.2",
        topic="persistent-nan",
        findings=NAN,
        rank=8,
        when="at least three of the recent steps were rejected",
        holds=lambda f: f.num_rejected >= 3,
        leads=lambda f: f.num_rejected >= 8,
        text="This keeps coming back: skipping steps is no cure. Check the preprocessing of the data, and the place "
        "in the architecture that produces it.",
        filled="This keeps coming back, {num_rejected} of the last 64 steps were rejected: skipping steps is no cure. "
        "Check the preprocessing of the data, and the place in the architecture that produces it.",
    ),
)
