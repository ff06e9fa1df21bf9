"""Where a bad value came from, as a sample carries it: so a replay of the record says the same as the run did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trimtab.core.types import Finding, Sample

SENTENCE, SUBJECTS = "origin", "origin_subjects"
"""The notes of a sample that hold it: a sentence with a remedy; the module, the operation and the samples."""
NONFINITE = "nonfinite-"
"""How the names of findings begin that an origin explains."""


def noted(sentence: str, remedy: str, subjects: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The notes that carry an origin.

    Example:
        >>> noted("It began in head.", "Clamp it.", ("head",))["origin_subjects"]
        ('head',)
    """
    return {SENTENCE: (sentence, remedy), SUBJECTS: subjects}


def explained(finding: Finding, notes: Mapping[str, tuple[str, ...]]) -> Finding:
    """The finding with the origin in its message, its subjects and its advice, where it is about such a value."""
    known = notes.get(SENTENCE)
    if not known or not finding.name.startswith(NONFINITE):
        return finding
    sentence, remedy = known[0], known[1] if len(known) > 1 else ""
    message = finding.message if sentence in finding.message else f"{finding.message} {sentence}"
    subject = tuple(dict.fromkeys((*finding.subject, *notes.get(SUBJECTS, ()))))
    advice = (remedy, *finding.advice) if remedy and remedy not in finding.advice else finding.advice
    return replace(finding, message=message, subject=subject, advice=advice)


def is_bad(sample: Sample) -> bool:
    """Whether a sample shows a value that is not finite, and that no scaler provoked on purpose."""
    scalars = sample.scalars
    if sample.phase != "train":
        return False
    loss = scalars.get("loss", 0.0)
    if loss != loss or abs(loss) == float("inf"):
        return True
    if scalars.get("nonfinite_grads") and not scalars.get("routine_overflow"):
        return True
    return any(scalars.get(name) for name in ("bad_buffers", "weights_bad", "ema_bad", "state_bad", "in_bad"))
