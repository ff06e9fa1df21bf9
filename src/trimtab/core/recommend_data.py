"""Recommendations about the data: batches that hold NaN, outliers, sorted or constant data, labels out of range."""

from __future__ import annotations

from trimtab.core.advice import Recommendation, always
from trimtab.core.recommend_numerics import EXPLOSION, NAN

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
