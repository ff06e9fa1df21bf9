"""What an exception of a training step really says: PyTorch's words, and the trouble that has a name."""

from __future__ import annotations

import re

from trimtab.checks.events import Failure

PATTERNS: tuple[tuple[str, str], ...] = (
    ("label-range", r"^target -?\d+ is out of bounds|target out of|index out of range in self|class values must be"),
    ("label-range", r"should be between 0 and 1|all elements of (target|input) should be between"),
    ("label-range", r"device-side assert"),
    ("in-place-hazard", r"modified by an inplace operation|in-place operation"),
    ("loss-not-scalar", r"implicitly created only for scalar outputs"),
    ("no-grad", r"inference tensor"),
    ("loss-detached", r"does not require grad"),
    ("graph-reused", r"backward through the graph a second time"),
    ("device-placement", r"same device|meta tensor|meta device|device meta|expected device|on device"),
    (
        "dtype-mismatch",
        r"same dtype|expected scalar type|scalar types|not implemented for '|input type .* and (weight|bias) type",
    ),
    (
        "dtype-mismatch",
        r"must have the same dtype|expected .*dtype|result type .* can't be cast|expected floating point",
    ),
    (
        "scaler-order",
        r"unscale_\(\) (has already|is being)|since the last update|no inf checks were recorded|_scale is none",
    ),
    ("shape-mismatch", r"shapes cannot be multiplied|size mismatch|must match the size|expected input batch_size"),
    ("shape-mismatch", r"expected \d+d|expected .* channels|invalid for input of size|shape .* is invalid"),
    (
        "shape-mismatch",
        r"sizes? .* doesn't match|same shape|normalized_shape|same size|must be equal to the size|cannot be broadcast",
    ),
    ("label-range", r"index \d+ is out of bounds for dimension"),
)


def named(failure: Failure) -> str:
    """The name of the trouble; `step-exception` where it has no name of its own.

    Example:
        >>> named(Failure("IndexError", "Target 10 is out of bounds.", "", "", "loss"))
        'label-range'
    """
    text = failure.text.lower()
    if failure.kind == "NotImplementedError" and "meta" in text:
        return "device-placement"
    return next((name for name, pattern in PATTERNS if re.search(pattern, text)), "step-exception")
