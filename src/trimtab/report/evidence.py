"""The numbers that a finding rests on, in words: `4 of 8 gradients`, `gradient norm 68.8`; no names of fields."""

from __future__ import annotations

import math
from collections.abc import Mapping

_WORDS = {
    "grad_norm": "gradient norm",
    "usual_grad_norm": "gradient norm usually",
    "usual": "usually",
    "usual_most": "usually at most",
    "highest": "highest before",
    "lowest": "lowest before",
    "z": "spreads above usual",
    "growth": "times its usual norm",
    "lr": "learning rate",
    "effective_lr": "learning rate after clipping",
    "update_ratio": "update / weight norm",
    "ratio": "ratio",
    "rms": "root mean square",
    "last": "last finite value",
    "first": "at the first step",
    "best": "best",
    "before": "before",
    "start": "at the start",
    "loss": "loss",
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "chance": "loss of guessing",
    "coef": "kept by clipping",
    "harm": "harm to the weights (above 1: some)",
    "scale": "loss scale",
    "share": "share",
    "change": "change relative to its size",
    "eps": "epsilon of the optimizer",
    "num": "bad values",
    "z_score": "spreads above usual",
}
_STEPS = {"last_step": "at step", "best_step": "best at step", "onset": "began at step"}
_COUNTS = {"num_nan": "NaN", "num_inf": "Inf"}


def evidence_words(evidence: Mapping[str, float]) -> list[str]:
    """One short phrase per number; two that belong together are one.

    Example:
        >>> evidence_words({"num_tensors": 4.0, "num_measured": 8.0, "num_nan": 90.0, "num_inf": 0.0})
        ['4 of 8 gradients', '90 NaN']
        >>> evidence_words({"grad_norm": float("nan"), "onset": 120.0, "my_own_number": 0.25})
        ['gradient norm NaN', 'began at step 120', 'my own number 0.25']
    """
    left = dict(evidence)
    words = []
    if "num_tensors" in left:
        of, num = left.pop("num_measured", None), left.pop("num_tensors")
        words.append(f"{_number(num)} of {_number(of)} gradients" if of is not None else f"{_number(num)} tensors")
    for name, value in left.items():
        if name in _COUNTS:
            words += [f"{_number(value)} {_COUNTS[name]}"] if value else []
        elif name in _STEPS:
            words.append(f"{_STEPS[name]} {_number(value)}")
        else:
            words.append(f"{_WORDS.get(name, _plain(name))} {_number(value)}")
    return words


def _plain(name: str) -> str:
    words = name.replace("_", " ").replace("/", " ").strip()
    return f"number of {words.removeprefix('num ')}" if words.startswith("num ") else words


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
