"""Debugging guides: what to do about a symptom, step by step, and how to see with trimtab whether it applies."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step of a guide: what to do, how to see whether it is needed, and its number in docs/how-to/advice.md."""

    do: str
    check: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What to do about one symptom: points in order, and common advice about it that is wrong."""

    problem: str
    title: str
    signs: str
    findings: tuple[str, ...]
    points: tuple[Point, ...]
    beware: tuple[str, ...] = ()


_NAN = Guide(
    problem="nan",
    title="The loss is NaN or Inf",
    signs="The loss or a gradient is not finite, often after the very first steps. Run the loop under a guard: it "
    "rejects such updates and names what broke.",
    findings=("nonfinite-loss", "nonfinite-gradient", "nonfinite-input", "nonfinite-weight", "scale-collapse"),
    points=(
        Point(
            do="See what was not finite first: the batch, the loss, a gradient or a weight. Fix that one only.",
            check='"What was found" in `trimtab report` lists the findings of the first bad step in the order of '
            "cause; nonfinite-input means that the data are to blame.",
            source="A35.1",
        ),
        Point(
            do="Lower the learning rate tenfold.",
            check='Only if they rose before: see "loss" and "gradient norm" in `trimtab report`, and '
            "exploding-gradient or loss-spike shortly before.",
            source="A31.1",
        ),
        Point(
            do="Put an epsilon inside every normalisation, square root and logarithm: 1e-8 in float32, 1e-4 in "
            "float16.",
            check="nonfinite-gradient with a finite loss is the mark of sqrt or norm at 0.",
            source="A31.2",
        ),
        Point(
            do="Use the stable form of the loss: raw logits into cross_entropy or binary_cross_entropy_with_logits; "
            "for similarities of more than two modalities the norm-based one.",
            check="nonfinite-loss with -inf or inf, and no nonfinite-input.",
            source="A31.3",
        ),
        Point(
            do='Clip the gradient norm, at about twice its usual value: `Guard(..., clip="percentile")` finds it.',
            check='Only if norms grew before the NaN (exploding-gradient): "gradient norm" in `trimtab report`, which '
            "also says how often it clips.",
            source="A31.4",
        ),
        Point(
            do="Look for a division by zero in your own code: empty masks, batches without valid targets, the "
            "standard deviation of one value.",
            check="nonfinite-loss while everything before it was calm; empty-batch and label-range name two causes.",
            source="A31.5",
        ),
    ),
    beware=(
        "Clipping cannot repair a NaN: clip_grad_norm_ spreads it to every parameter. Reject the step instead.",
        "With a GradScaler an Inf in the scaled gradients now and then is routine: it skips the step and lowers its "
        "scale. scale-collapse says when it is not.",
        "Do not replace NaN by 0 and go on: the step then has an arbitrary direction, and Adam remembers it.",
        "In float16 an epsilon of 1e-8 is exactly 0.",
    ),
)

_PLATEAU = Guide(
    problem="plateau",
    title="The loss does not go down",
    signs="The loss stays near its first value. A smallest gradient norm below 1e-7 is often taken as the sign of "
    "vanishing gradients; it is a weak one.",
    findings=("not-learning", "vanishing-gradient", "zero-gradient", "missing-gradient", "targets-do-not-predict"),
    points=(
        Point(
            do="Check whether part of the model is frozen, cut off, or unknown to the optimizer.",
            check="missing-gradient, no-grad, optimizer-misses-parameters and weights-unchanged name the parameters.",
            source="A32.5",
        ),
        Point(
            do="Train on one single batch until its loss is near 0, and print a few inputs with their targets.",
            check="If one batch cannot be learned, model or loss is wrong; if it can, targets-do-not-predict points "
            "at the data.",
            source="C10.4",
        ),
        Point(
            do="Raise the learning rate a little: to 1.4 times, then to double.",
            check='Below about 0.0003 steps are small: "Update ratio" in `trimtab report --html`. With SGD a '
            '"Gradient norm" in `trimtab report --html` that is always below 0.3 says the same.',
            source="A32.4",
        ),
        Point(
            do="Change the activation: GELU for ReLU.",
            check="Set `activations = true`: dead-units and saturated-units name the layer.",
            source="A32.1",
        ),
        Point(
            do="Add residual connections, with a normalisation before each block.",
            check="vanishing-gradient says how much less the first layers get than the last.",
            source="A32.2",
        ),
        Point(
            do="Reduce the depth of the network.",
            check="vanishing-gradient should disappear in the shallower one.",
            source="A32.3",
        ),
    ),
    beware=(
        "The smallest gradient norm alone misleads: a bias before BatchNorm, an unused embedding or the key bias of "
        "attention has a gradient of about 0 by design. Look at the trend with depth.",
        "Frozen parameters have no gradient and need none: that is no fault.",
    ),
)

_EXPLOSION = Guide(
    problem="explosion",
    title="The loss or the gradient explodes",
    signs="The gradient norm jumps far above its own history: above 100, or five times the clip limit, in the usual "
    "rules of thumb. Rising norms and sudden loss spikes come before.",
    findings=("exploding-gradient", "loss-spike", "diverging-loss", "weight-jump", "learning-rate", "chronic-clipping"),
    points=(
        Point(
            do="Clip the gradient norm now, at about twice the usual norm of your model; lower if it goes on.",
            check='"gradient norm" in `trimtab report` has the median, the highest, and the share of clipped steps; '
            "`trimtab tune clip` suggests a limit.",
            source="A33.1",
        ),
        Point(
            do="Lower the learning rate tenfold; by half if clipping is on already. Was it raised by a schedule, a "
            "resume, or an unfreezing?",
            check="learning-rate and weight-jump name the step. `trimtab run --mode act train.py` cuts it for you.",
            source="A33.2",
        ),
        Point(
            do="Look at the batch of that step for corrupt files, outliers and wrong labels.",
            check="outlier-batch and label-range.",
            source="B25.5",
        ),
        Point(
            do="Add LayerNorm.",
            check="exploding-gradient names the layers that grew most.",
            source="A33.3",
        ),
        Point(
            do="Use the stable form of the loss, and a mean instead of a sum.",
            check='A "loss" in `trimtab report` that is above 1000 from the start; temperature-runaway in contrastive '
            "losses.",
            source="A33.4",
        ),
        Point(
            do="Change the batch: fewer than 8 samples are noisy, so accumulate; halve a large one only together with "
            "the rate.",
            check="accumulation-not-divided if the losses of micro-batches are added up undivided.",
            source="A33.5",
        ),
    ),
    beware=(
        "Clipping may only hide the cause: where it acts on every step the rate really used is LR x limit / norm: "
        "chronic-clipping says so. Then look for the cause (gradcheck, one batch, alignment of targets).",
        "A learning rate 20 times lower is not a general remedy: on a sound model it only makes training slow.",
        "A smaller batch is not always calmer: its gradients are noisier.",
        "Fixed thresholds (norms of 10 or 100, an average below 0.5) and fixed clip limits (1.0, 0.5, 0.3) depend on "
        "the scale of the loss; compare with your own history, as trimtab does.",
    ),
)

_SLOW = Guide(
    problem="slow",
    title="Training is slow",
    signs="Each step takes long, or the loss goes down too slowly.",
    findings=("needless-scaler", "update-ratio", "not-learning"),
    points=(
        Point(
            do="Measure thoroughly less often: `full_every = 1000` (log_frequency=1000 in the gradient monitor).",
            check="Compare steps per second with TRIMTAB_DISABLE=1.",
            source="A34.1",
        ),
        Point(
            do="Switch off the watching of activations: `activations = false`, the default.",
            check="Look for it in trimtab.toml, pyproject.toml or the Guard's settings.",
            source="A34.2",
        ),
        Point(
            do="For more than two modalities use the norm-based loss in its line form: N x B^2 similarities instead "
            "of B^N.",
            check="Time the loss alone, forward and backward.",
            source="A34.3",
        ),
        Point(
            do="Remove `torch.autograd.set_detect_anomaly(True)`, and a GradScaler where nothing is float16.",
            check="needless-scaler; search your code for set_detect_anomaly.",
            source="A34.4",
        ),
        Point(
            do="On a GPU load data with pin_memory=True and move it with non_blocking=True.",
            check="`trimtab doctor` (loader-settings).",
            source="E20.4",
        ),
        Point(
            do="If steps are fast but learning is slow: raise the rate to 1.4 times, then to double (5e-5 to 7e-5 to "
            "1e-4).",
            check="update-ratio says when steps are far too small; gradient norms always below 0.3 hint at it.",
            source="C11.1",
        ),
        Point(
            do="Shorten the warm-up to 100 steps.",
            check="Print the learning rate: does it still rise after step 100?",
            source="C11.3",
        ),
    ),
    beware=(
        "The norm-based loss as a full tensor is the slowest and largest of all: only its line form is fast.",
        "A low gradient norm says something about the rate with plain SGD only; Adam's steps do not depend on it.",
    ),
)

_CHECKLIST = Guide(
    problem="checklist",
    title="Ten points to check in any run that misbehaves",
    signs="Go through them in order; each takes a minute.",
    findings=(),
    points=(
        Point(
            do="No NaN or Inf anywhere.",
            check="nonfinite-input, nonfinite-loss, nonfinite-gradient, nonfinite-weight, nonfinite-buffer.",
            source="A35.1",
        ),
        Point(
            do="Gradient norms between 0.1 and 10, or at least steady.",
            check='"gradient norm" in `trimtab report`: median and highest. A loss that is a sum has larger ones and '
            "may be sound.",
            source="A35.2",
        ),
        Point(
            do="Try a learning rate ten times smaller.",
            check="update-ratio: a step should change the weights by about a thousandth of their size.",
            source="A35.3",
        ),
        Point(
            do="An epsilon of 1e-8 inside every division, norm and logarithm.",
            check="nonfinite-gradient with a finite loss. In float16 it must be 1e-4 or so.",
            source="A35.4",
        ),
        Point(
            do="Activations neither dead nor saturated.",
            check="`activations = true`, then dead-units and saturated-units.",
            source="A35.5",
        ),
        Point(
            do="In float16 no loss above 1000: it is about to overflow.",
            check='"loss" in `trimtab report`, first and last. Take the mean, normalise the targets. In float32 a '
            "large loss overflows nothing; it only makes gradients large.",
            source="A35.6",
        ),
        Point(
            do="A batch of at least 8 samples.",
            check="Fewer are noisy: accumulate micro-batches, and divide (accumulation-not-divided).",
            source="A35.7",
        ),
        Point(
            do="logit_scale.exp() between 14 and 100 in contrastive losses.",
            check="temperature-runaway.",
            source="A35.8",
        ),
        Point(
            do="Warm-up of at least 500 steps.",
            check='"What was found" in `trimtab report`: trouble in the first steps only (dead-units, loss-spike) is '
            "the sign of none.",
            source="A35.9",
        ),
        Point(
            do="Mixed precision with care: GradScaler with float16, none with bfloat16, unscale before clipping.",
            check="gradient-underflow, scale-collapse, clip-before-unscale, needless-scaler.",
            source="A35.10",
        ),
    ),
)

GUIDES: dict[str, Guide] = {g.problem: g for g in (_NAN, _PLATEAU, _EXPLOSION, _SLOW, _CHECKLIST)}


def find_guide(problem: str) -> Guide:
    """The guide for a problem, by its name in any case.

    Example:
        >>> find_guide("NaN").title
        'The loss is NaN or Inf'
    """
    found = GUIDES.get(problem.strip().lower())
    if found is None:
        raise InputError(f"there is no guide for the problem {problem!r}; expected one of {', '.join(GUIDES)}")
    return found
