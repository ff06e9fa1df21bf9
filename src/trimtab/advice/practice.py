"""Recommendations about the data, and about how a run is kept: checkpoints, health checks, stopping, memory, rates."""

from __future__ import annotations

from trimtab.advice.engine import Recommendation, always
from trimtab.advice.numerics import EXPLOSION, NAN

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
        when='the guard only watches or advises, and `mode="act"` would cut the rate',
        holds=lambda f: f.mode in ("observe", "advise") and "cut_lr" in f.remedies and f.rate_may_be_high and f.lr > 0,
        text='Let the guard adjust the learning rate: `mode="act"` cuts it when this happens, and raises it again '
        "slowly.",
        filled='Let the guard adjust the learning rate: `mode="act"` cuts it from {lr} when this happens, and raises '
        "it again slowly.",
    ),
    Recommendation(
        id="D15.4",
        topic="health",
        findings=("nonfinite-buffer", "nonfinite-ema", "nonfinite-validation"),
        rank=35,
        when="training looks fine while something else is broken",
        holds=always,
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
        holds=always,
        text="Stop early: go back to the checkpoint of the best validation.",
        filled="Stop early: go back to the checkpoint of the best validation ({best}; it is {val_loss} now).",
    ),
    Recommendation(
        id="raise-weight-decay",
        topic="act",
        findings=("overfitting",),
        rank=15,
        when='the guard only watches or advises, and `mode="act"` would raise the weight decay',
        holds=lambda f: f.mode in ("observe", "advise") and "raise_weight_decay" in f.remedies,
        text='Use more weight decay; `mode="act"` raises it by half when this happens.',
    ),
    Recommendation(
        id="D15.7",
        topic="fallback",
        findings=(*LOST, "scale-collapse"),
        rank=48,
        when='the run goes on by itself although it is lost, and `mode="act"` would end it',
        holds=lambda f: f.mode in ("observe", "advise") and "stop" in f.remedies,
        text='Have a way out for the next time: `mode="raise"` stops with the reason at the first serious finding, '
        '`mode="act"` when nothing else helps.',
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
        id="unfrozen-trunk",
        topic="unfrozen",
        findings=("learning-rate",),
        rank=25,
        when="the learning rate jumped, and the optimizer has several parameter groups",
        holds=lambda f: f.lr_jumped and len(f.rates) > 1,
        text="When a trunk is unfrozen give it a tenth of the learning rate of the head or less.",
    ),
    Recommendation(
        id="B25.4",
        topic="batch",
        findings=("step-exception",),
        rank=5,
        when="the error says that memory ran out",
        holds=lambda f: f.out_of_memory,
        text="Halve the batch and accumulate twice as many micro-batches: the step stays the same.",
        filled="Halve the batch, from {batch} to {batch_half}, and accumulate twice as many micro-batches: the step "
        "stays the same.",
    ),
    Recommendation(
        id="E20.8",
        topic="memory",
        findings=("step-exception",),
        rank=6,
        when="the error says that the memory of a GPU ran out",
        holds=lambda f: f.out_of_memory and f.gpu_error,
        text="Print `torch.cuda.max_memory_allocated()` once per epoch: a peak that grows is a leak (a loss kept with "
        "its graph), one that does not is a batch too large.",
    ),
    Recommendation(
        id="late-errors",
        topic="late-errors",
        findings=("step-exception",),
        rank=15,
        when="a GPU raised the error, and it is not about memory",
        holds=lambda f: f.gpu_error and not f.out_of_memory,
        text="Run it again with `CUDA_LAUNCH_BLOCKING=1`, or the same batch on the CPU: a GPU reports errors late, at "
        "another line.",
    ),
)


DATA: tuple[Recommendation, ...] = (
    Recommendation(
        id="bad-batch",
        topic="outliers",
        findings=(*NAN, "nonfinite-buffer", "nonfinite-weight", "nonfinite-optimizer-state"),
        rank=1,
        when="the batch of this step holds NaN or Inf",
        holds=lambda f: f.input_bad,
        leads=always,
        text="Repair the data: the batch of this step holds NaN or Inf, and this follows from it.",
        filled="Repair the data: the batch of step {step} holds NaN or Inf, and this follows from it.",
    ),
    Recommendation(
        id="B25.5",
        topic="outliers",
        findings=EXPLOSION,
        rank=11,
        when="the inputs of this step were more than three times their usual size",
        holds=lambda f: f.input_size > 3,
        leads=always,
        text="Look at the batch of this step first: its inputs are far larger than usual. A corrupt file, a sample "
        "that was not normalised, an extreme outlier.",
        filled="Look at the batch of step {step} first: its inputs are {input_size} times as large as usual. A "
        "corrupt file, a sample that was not normalised, an extreme outlier.",
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
        id="sorted-data",
        topic="shuffle",
        findings=("constant-batch",),
        rank=5,
        when="all targets are of one class",
        holds=lambda f: "targets" in f.subject,
        text="Shuffle the data, `DataLoader(..., shuffle=True)`: sorted by class, batches are all of one class.",
    ),
    Recommendation(
        id="shared-buffer",
        topic="shared-buffer",
        findings=("constant-batch",),
        rank=15,
        when="all samples of the batch are equal",
        holds=lambda f: "batch" in f.subject,
        text="Check that samples do not share a buffer: copy what is put into a batch.",
    ),
    Recommendation(
        id="missing-files",
        topic="missing-files",
        findings=("constant-batch",),
        rank=16,
        when="all samples of the batch are equal",
        holds=lambda f: "batch" in f.subject,
        text="Check the path of the data: missing files may be read as zeros.",
    ),
    Recommendation(
        id="targets-outside",
        topic="label-values",
        findings=("label-range",),
        rank=5,
        when="the loss is a binary cross-entropy",
        holds=lambda f: "share" in f.evidence,
        text="Divide masks by 255, or compare (`mask > 0`): targets of a binary cross-entropy lie between 0 and 1.",
    ),
    Recommendation(
        id="labels-from-zero",
        topic="label-values",
        findings=("label-range",),
        rank=5,
        when="the loss or an embedding refused a label",
        holds=lambda f: "share" not in f.evidence,
        text="Shift labels so that they begin at 0, and use `ignore_index` for those that mean unknown.",
    ),
)
