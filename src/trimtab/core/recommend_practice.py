"""Recommendations about how a run is kept: checkpoints, health checks, stopping, memory, what to print."""

from __future__ import annotations

from trimtab.core.advice import Recommendation
from trimtab.core.recommend_numerics import EXPLOSION

LOST = ("nonfinite-weight", "nonfinite-optimizer-state")

PRACTICE: tuple[Recommendation, ...] = (
    Recommendation(
        id="B26.3",
        topic="save-checkpoints",
        findings=(*LOST, "diverging-loss", "weight-jump"),
        rank=47,
        when="what was learned may be lost",
        holds=lambda f: not f.wrong_sign and f.step > 20,
        text="Save a checkpoint every epoch, keep the last three and the best, and check that it is finite before it "
        "replaces a good one.",
    ),
    Recommendation(
        id="D15.3b",
        topic="act",
        findings=(*EXPLOSION, "oscillating-loss", "learning-rate", "update-ratio"),
        rank=58,
        when="the guard only watches or advises",
        holds=lambda f: f.mode in ("observe", "advise") and f.rate_may_be_high and f.lr > 0,
        text='Let the guard adjust the rate: `mode="act"` cuts it when this happens, and gives it back slowly.',
        filled='Let the guard adjust the rate: `mode="act"` cuts it from {lr} when this happens, and gives it back '
        "slowly.",
    ),
    Recommendation(
        id="D15.4",
        topic="health",
        findings=("nonfinite-buffer", "nonfinite-ema", "nonfinite-validation"),
        rank=35,
        when="training looks fine while something else is broken",
        holds=lambda f: True,
        text="Ask `guard.health()` before each validation and each save: it says which part is not sound.",
    ),
    Recommendation(
        id="D15.5",
        topic="verify-load",
        findings=(*LOST, "weight-corrupted", "optimizer-state-lost"),
        rank=25,
        when="something may have been loaded: within the first 50 steps of this guard, or weights changed from outside",
        holds=lambda f: f.step < 50 or f.name in ("weight-corrupted", "optimizer-state-lost"),
        text="After loading a checkpoint validate it: every tensor finite, optimizer state there, and the validation "
        "loss the one it was saved with.",
    ),
    Recommendation(
        id="D15.6",
        topic="early-stop",
        findings=("overfitting",),
        rank=5,
        when="always",
        holds=lambda f: True,
        text="Stop early: go back to the checkpoint of the best validation.",
        filled="Stop early: go back to the checkpoint of the best validation ({best}; it is {val_loss} now).",
    ),
    Recommendation(
        id="D15.7",
        topic="fallback",
        findings=(*LOST, "scale-collapse"),
        rank=48,
        when="the run goes on by itself although it is lost",
        holds=lambda f: f.mode in ("observe", "advise"),
        text='Have a way out for the next time: `mode="raise"` stops with the reason at the first grave finding, '
        '`mode="act"` after three such steps.',
    ),
    Recommendation(
        id="E20.6",
        topic="print-groups",
        findings=("learning-rate", "update-ratio", "weights-unchanged"),
        rank=15,
        when="the optimizer has several parameter groups",
        holds=lambda f: len(f.rates) > 1,
        text="Print learning rate and weight decay of every parameter group: is each as intended?",
        filled="Print learning rate and weight decay of all {num_groups} parameter groups: the rates are {rates}. Is "
        "each as intended?",
    ),
    Recommendation(
        id="B25.4",
        topic="batch",
        findings=("step-exception",),
        rank=5,
        when="the error says that memory ran out",
        holds=lambda f: "out of memory" in f.exception.lower(),
        text="Halve the batch and accumulate twice as many micro-batches: the step stays the same.",
        filled="Halve the batch, from {batch} to {batch_half}, and accumulate twice as many micro-batches: the step "
        "stays the same.",
    ),
    Recommendation(
        id="E20.8",
        topic="memory",
        findings=("step-exception",),
        rank=6,
        when="the error says that memory ran out",
        holds=lambda f: "out of memory" in f.exception.lower(),
        text="Print `torch.cuda.max_memory_allocated()` once per epoch: a peak that grows is a leak (a loss kept with "
        "its graph), one that does not is a batch too large.",
    ),
    Recommendation(
        id="E20.2",
        topic="bfloat16",
        findings=("gradient-underflow", "scale-collapse"),
        rank=26,
        when="float16 is at work",
        holds=lambda f: f.float16,
        text="If the device can do bfloat16, use it and leave the scaler out: its range is that of float32.",
    ),
)
