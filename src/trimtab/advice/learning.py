"""Recommendations about runs that do not learn, or slowly: plateaus, vanishing gradients, dead units."""

from __future__ import annotations

import math

from trimtab.advice.engine import Recommendation, always

LEARNING: tuple[Recommendation, ...] = (
    Recommendation(
        id="A32.1",
        topic="activation",
        findings=("vanishing-gradient", "zero-gradient"),
        rank=15,
        when="gradients die on their way through the layers, or whole weights get none",
        holds=lambda f: "ratio" in f.evidence or "num_parameters" in f.evidence,
        text="Change the activation: GELU (or SiLU) for ReLU whose units died, and for sigmoid and tanh in deep "
        "stacks, whose slopes multiply to nothing.",
        also=("A11.4", "A17.1"),
    ),
    Recommendation(
        id="A17.2",
        topic="activation",
        findings=("dead-units",),
        rank=28,
        when="always",
        holds=always,
        text="Use an activation that cannot die: LeakyReLU(0.01) is the cheapest, GELU or SiLU for transformers and "
        "deep networks, ELU where negative outputs help; He initialisation for all of them.",
    ),
    Recommendation(
        id="A17.4",
        topic="activation",
        findings=("saturated-units",),
        rank=28,
        when="always",
        holds=always,
        text="Use an activation without limits (GELU, SiLU), or keep tanh with Xavier initialisation and a "
        "normalisation before it.",
    ),
    Recommendation(
        id="A32.2",
        topic="residual",
        findings=("vanishing-gradient",),
        rank=6,
        when="the first layers get far less gradient than the last",
        holds=lambda f: "ratio" in f.evidence,
        text="Add residual connections around the layers, with a normalisation before each.",
        filled="Add residual connections around the layers, with a normalisation before each: the first layers get "
        "{ratio} of the gradient of the last.",
        also=("A11.3",),
    ),
    Recommendation(
        id="A32.3",
        topic="depth",
        findings=("vanishing-gradient",),
        rank=19,
        when="the first layers get far less gradient than the last",
        holds=lambda f: "ratio" in f.evidence,
        text="Try fewer layers: if the shallower network learns, depth is what starves the first ones.",
    ),
    Recommendation(
        id="A32.4",
        topic="raise-lr",
        findings=("not-learning", "vanishing-gradient"),
        rank=32,
        when="the loss does not rise, the steps are not known to be small, and no layer is cut off",
        holds=lambda f: not f.loss_rises and math.isnan(f.update_ratio) and "ratio" not in f.evidence,
        text="Raise the learning rate a little, say to double.",
        filled="Raise the learning rate a little, from {lr} to {lr_2}.",
    ),
    Recommendation(
        id="C11.1",
        topic="raise-lr",
        findings=("not-learning", "vanishing-gradient"),
        rank=14,
        when="the steps are known to be small (0.00001 to 0.0003 of the weights) and the loss does not rise",
        holds=lambda f: 1e-5 < f.update_ratio < 3e-4 and not f.loss_rises and "ratio" not in f.evidence,
        text="Raise the learning rate by two fifths, then to double.",
        filled="Raise the learning rate from {lr} to {lr_1_4}, then to {lr_2}: a step changes the weights by only "
        "{update_ratio} of their size, a thousandth is usual.",
    ),
    Recommendation(
        id="steps-too-small",
        topic="raise-lr",
        findings=("update-ratio",),
        rank=5,
        when="the steps are far too small",
        holds=lambda f: f.evidence.get("update_ratio", 1.0) < 1e-2,
        text="Raise the learning rate tenfold.",
        filled="Raise the learning rate tenfold, from {lr} to {lr_10}: a step changes the weights by only "
        "{update_ratio} of their size, a thousandth is usual.",
    ),
    Recommendation(
        id="unit-of-the-schedule",
        topic="schedule",
        findings=("update-ratio", "learning-rate"),
        rank=14,
        when="the steps are far too small, or the learning rate is 0",
        holds=lambda f: f.evidence.get("update_ratio", 1.0) < 1e-2 or f.evidence.get("lr", 1.0) == 0,
        text="Check the length of the schedule: is it counted in steps where you mean epochs, or the other way round?",
    ),
    Recommendation(
        id="C11.2",
        topic="norm-band",
        findings=("not-learning", "update-ratio", "weights-unchanged"),
        rank=16,
        when="no recent gradient norm reached 0.3, but the usual one is above 0.1, and the optimizer is not of Adam's "
        "kind",
        holds=lambda f: (
            f.highest_norm < 0.3 and f.usual_norm >= 0.1 and f.num_norms >= 16 and not (f.clipping or f.adam)
        ),
        text="Check whether the learning rate is too low: gradient norms are always below 0.3, and steps of plain SGD "
        "shrink with them.",
        filled="Check whether the learning rate of {lr} is too low: gradient norms were at most {highest_norm} in "
        "{num_norms} steps, and steps of plain SGD shrink with them.",
    ),
    Recommendation(
        id="C8.1",
        topic="norm-band",
        findings=("not-learning", "update-ratio", "weights-unchanged", "vanishing-gradient"),
        rank=18,
        when="the usual gradient norm is below 0.1",
        holds=lambda f: f.usual_norm < 0.1 and not f.clipping,
        text='Look at "Gradients by layer" in `trimtab report --html`: with a norm below 0.1 gradients may be '
        "vanishing. The smallest row alone says little (a bias before BatchNorm has none).",
        filled='Look at "Gradients by layer" in `trimtab report --html`: with a norm of usually {usual_norm} '
        "gradients may be vanishing. The smallest row alone says little (a bias before BatchNorm has none).",
        also=("A35.2",),
    ),
    Recommendation(
        id="C8.2",
        topic="norm-band",
        findings=("not-learning", "targets-do-not-predict"),
        rank=48,
        when="the usual gradient norm is between 0.1 and 1",
        holds=lambda f: 0.1 <= f.usual_norm <= 1.0 and not f.highest_norm < 0.3,
        text="Look at the data and the loss: gradients are of a healthy size (0.1 to 1).",
        filled="Look at the data and the loss: gradients are of a healthy size (usually {usual_norm}).",
    ),
    Recommendation(
        id="C11.3",
        topic="warm-up",
        findings=("not-learning",),
        rank=12,
        when="the rate is still being warmed up after step 100",
        holds=lambda f: f.warming and f.step > 100,
        text="Shorten the warm-up to 100 steps.",
        filled="Shorten the warm-up to 100 steps: at step {step} the learning rate is still rising ({lr}).",
    ),
    Recommendation(
        id="A32.5",
        topic="frozen",
        findings=("not-learning", "vanishing-gradient", "weights-unchanged", "zero-gradient"),
        rank=8,
        when="some parameters require no gradient",
        holds=lambda f: f.num_frozen > 0,
        text="Check which parts are frozen: some parameters have `requires_grad=False`.",
        filled="Check which parts are frozen: {num_frozen} parameters have `requires_grad=False`. Is that meant?",
    ),
    Recommendation(
        id="A35.5",
        topic="activations",
        findings=("vanishing-gradient", "zero-gradient", "not-learning", "collapsed-output", "modality-collapse"),
        rank=17,
        when="activations are not watched yet",
        holds=lambda f: not f.activations,
        text="Watch the activations in the next run, `activations = true`: dead-units and saturated-units then name "
        "the layer.",
    ),
    Recommendation(
        id="A35.3",
        topic="lower-lr",
        findings=("dead-units", "saturated-units", "collapsed-output", "update-ratio"),
        rank=7,
        when="the steps are not small (above a hundredth of the weights, where known)",
        holds=lambda f: f.rate_may_be_high and f.evidence.get("update_ratio", 1.0) > 1e-2 and not f.update_ratio < 1e-3,
        text="Lower the learning rate tenfold: one large step is the usual cause.",
        filled="Lower the learning rate tenfold, from {lr} to {lr_tenth}: one large step is the usual cause.",
    ),
    Recommendation(
        id="C15.2",
        topic="overfit-one",
        findings=("not-learning", "targets-do-not-predict", "chronic-clipping"),
        rank=19,
        when="the loss never came to half of where it began",
        holds=lambda f: not f.learned,
        text="Train on one single batch until its loss is near 0. If it is not after a few hundred steps, the model, "
        "the loss or its gradient is wrong; if it is, look at the data.",
    ),
    Recommendation(
        id="C10.4",
        topic="alignment",
        findings=("not-learning", "targets-do-not-predict", "diverging-loss", "oscillating-loss", "chronic-clipping"),
        rank=33,
        when="the loss never came to half of where it began",
        holds=lambda f: not f.learned and not f.wrong_sign,
        leads=lambda f: f.name in ("not-learning", "targets-do-not-predict"),
        text="Print a few inputs with their targets as the model sees them: do they belong together? In a language "
        "model `targets[0]` must be `inputs[1]`.",
    ),
    Recommendation(
        id="cleared-gradients",
        topic="cleared",
        findings=("missing-gradient",),
        rank=5,
        when="no parameter has a gradient",
        holds=lambda f: (
            f.num_parameters > 0 and f.evidence.get("num_parameters", 0.0) >= f.num_parameters - f.num_frozen
        ),
        text="Check the order: `optimizer.zero_grad()` between `loss.backward()` and the step clears every gradient. "
        "Is `loss.backward()` called at all?",
    ),
    Recommendation(
        id="cut-off",
        topic="cut-off",
        findings=("missing-gradient",),
        rank=6,
        when="some parameters have a gradient, and others none",
        holds=lambda f: f.evidence.get("num_parameters", 0.0) < f.num_parameters - f.num_frozen,
        text="Look between these parameters and the loss for `.detach()`, `.data`, `.item()`, numpy, "
        "`torch.no_grad()` or a branch that is not called.",
    ),
    Recommendation(
        id="unused-head",
        topic="unused-head",
        findings=("missing-gradient",),
        rank=25,
        when="some parameters have a gradient, and others none",
        holds=lambda f: f.evidence.get("num_parameters", 0.0) < f.num_parameters - f.num_frozen,
        text="If they belong to an unused head, remove it or leave it out of the optimizer.",
    ),
    Recommendation(
        id="divide-micro-batches",
        topic="divide",
        findings=("accumulation-not-divided",),
        rank=5,
        when="always",
        holds=always,
        text="Divide each loss by the number of micro-batches before its backward pass.",
        filled="Divide each loss before its backward pass: `(loss / {num_backwards}).backward()`.",
    ),
)
