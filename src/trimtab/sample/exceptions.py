"""What an exception that ended a step says about its cause."""

from __future__ import annotations

from torch import Tensor

MAX_CHARACTERS = 300
_TEXTS = {
    "label_error": (
        "is out of bounds",
        "target out of",
        "index out of range",
        "class values must be",
        "should be between 0",
    ),
    "no_grad_error": ("does not require grad",),
}
"""PyTorch's wording of troubles that have a name of their own."""


def told_by(error: Exception) -> tuple[dict[str, float | Tensor], dict[str, tuple[str, ...]]]:
    """The facts and notes of a sample for a step that never ended."""
    text = " ".join(str(error).split())[:MAX_CHARACTERS]
    known = [fact for fact, words in _TEXTS.items() if any(word in text.lower() for word in words)]
    facts: dict[str, float | Tensor] = dict.fromkeys(("exception", *known), 1.0)
    return facts, {"exception": (type(error).__name__, text)}
