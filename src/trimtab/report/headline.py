"""The first thing to read about a run: what happened, where, why, what came of it, and what to do first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trimtab.core.types import Finding
from trimtab.report.summary import QUIET, Deed, Health, Incident, Summary, count
from trimtab.report.traces import Trace

_SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_DONE = ("The update was kept out of the weights", "NaN or Inf first came from", "NaN or Inf was already in")
_GENERAL = {"loss": "the loss", "lr": "the learning rate", "batch": "the batch of this step"}
_NUM_NAMED = 3
_NUM_LED_TO = 6
_BAD_NAMES = frozenset({"nan", "inf", "-inf"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One run, or one incident of it, in a few short sentences; parts that are not known are empty.

    `incident` is its number on the page, from 1 on; None where the run has none.
    """

    when: str
    cause: str
    why: str = ""
    place: str = ""
    led_to: str = ""
    consequence: str
    action: str
    incident: int | None = None

    def sentence(self) -> str:
        """Everything in one paragraph: `Step 120: the loss is NaN. … Do: …`."""
        parts = [f"{self.when}: {self.cause}" if self.when else self.cause]
        parts += [f"Why: {self.why}"] if self.why else []
        parts += [f"Where: {self.place}"] if self.place else []
        parts += [f"It led to: {self.led_to}"] if self.led_to else []
        parts += [self.consequence] if self.consequence else []
        parts += [f"Do: {self.action}"] if self.action else []
        return " ".join(part if part.endswith((".", "!", "?", "…")) else f"{part}." for part in parts)


def make_headline(summary: Summary, traces: Sequence[Trace] = ()) -> Headline:
    """The headline of a run: of its gravest incident, the first where several are equally grave."""
    if not summary.incidents:
        return _without_incidents(summary)
    number = max(range(len(summary.incidents)), key=lambda i: (summary.incidents[i].severity, -i))
    return of_incident(number + 1, summary, traces)


def of_incident(number: int, summary: Summary, traces: Sequence[Trace] = ()) -> Headline:
    """The headline of one incident of a run, by its number from 1 on."""
    incident = summary.incidents[number - 1]
    trace = trace_of(incident, traces)
    cause = incident.cause
    what, why, place = _what(cause), "", _place(cause)
    if trace is not None and trace.step == incident.onset:
        why, place = trace.origin.why, _traced_place(trace) or place
        if trace.origin.cause == "input" and trace.origin.samples:
            why = f"the batch contained NaN or Inf ({trace.origin.named_samples()})"
    return Headline(
        when=_when(incident),
        cause=what,
        why=plain(why),
        place=place,
        led_to=_led_to(incident),
        consequence=consequence(incident, summary),
        action=plain(cause.advice[0]) if cause.advice else f"Run trimtab explain {cause.code}.",
        incident=number,
    )


def plain(text: str) -> str:
    """Text without the marks of code.

    Example:
        >>> plain("Set `clip=1.0`.")
        'Set clip=1.0.'
    """
    return text.replace("`", "")


def trace_of(incident: Incident, traces: Iterable[Trace]) -> Trace | None:
    """The first stored trace within an incident."""
    return next((t for t in traces if incident.onset <= t.step <= incident.last_step), None)


def short(value: float) -> str:
    """A number that is read at a glance.

    Example:
        >>> short(0.41334), short(6632.2), short(1e9), short(float("nan"))
        ('0.413', '6,632', '1e+09', 'NaN')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"


_NAMES = {
    "learning-rate": "learning rate out of range",
    "update-ratio": "update size out of range",
    "label-range": "labels out of range",
    "initial-weights": "initial weights of a wrong size",
    "optimizer-settings": "settings of the optimizer",
    "no-grad": "forward pass without gradients",
    "eval-mode": "model in evaluation mode",
}


def in_words(name: str) -> str:
    """The name of a rule as words.

    Example:
        >>> in_words("nonfinite-loss"), in_words("weight-jump")
        ('loss is NaN or Inf', 'weight jump')
    """
    if name in _NAMES:
        return _NAMES[name]
    bare = name.removeprefix("nonfinite-")
    return f"{bare.replace('-', ' ')} is NaN or Inf" if bare != name else name.replace("-", " ")


def _what(finding: Finding) -> str:
    """What happened, without what was done about it and where it came from, which have their own place."""
    kept = [s for s in _SENTENCES.split(plain(finding.message).strip()) if not s.startswith(_DONE)]
    text = " ".join(kept) or in_words(finding.name)
    text = re.sub(r"\b(nan|inf)\b", lambda m: {"nan": "NaN", "inf": "Inf"}[m[0]], text)
    return f"{text[:1].upper()}{text[1:]}".removesuffix(".")


def _place(finding: Finding) -> str:
    named = [_GENERAL.get(name, name) for name in finding.subject if name.lower() not in _BAD_NAMES]
    if not named:
        return ""
    more = f" and {len(named) - _NUM_NAMED} more" if len(named) > _NUM_NAMED else ""
    return ", ".join(named[:_NUM_NAMED]) + more


def _traced_place(trace: Trace) -> str:
    origin = trace.origin
    where = f"module {origin.module}" if origin.module else ""
    way = ", in the backward pass" if origin.phase == "backward" and origin.op else ""
    parts = (where, trace.line, f"{origin.op}{way}", origin.named_samples() if origin.samples else "")
    return ", ".join(part for part in parts if part) or origin.subject


def _when(incident: Incident) -> str:
    """When its cause came; how long it lasted belongs to what came of it."""
    who = f" of {incident.optimizer}" if incident.optimizer else ""
    return f"Step {incident.onset:,}{who}"


def _led_to(incident: Incident) -> str:
    """What came after the first cause, each once, with the step of its beginning."""
    begun: dict[str, int] = {}
    for trouble in incident.troubles[1:]:
        if trouble.finding.name != incident.cause.name:
            begun.setdefault(trouble.finding.name, trouble.finding.step)
    named = [f"{in_words(name)} (step {step:,})" for name, step in list(begun.items())[:_NUM_LED_TO]]
    more = [f"{len(begun) - _NUM_LED_TO} more"] if len(begun) > _NUM_LED_TO else []
    return ", ".join(named + more)


def consequence(incident: Incident, summary: Summary) -> str:
    """What trimtab did about an incident, and how the run went on."""
    parts = [f"It lasted until step {incident.last_step:,}."] if incident.last_step > incident.onset + 1 else []
    parts += [*_protected(incident, summary), *_acted(incident, summary)]
    if incident is _first_gravest(summary):
        parts += _ended(summary)
    return " ".join(parts)


def _first_gravest(summary: Summary) -> Incident | None:
    """The incident that the end of a run is told with."""
    worst = max((i.severity for i in summary.incidents), default=None)
    return next((i for i in summary.incidents if i.severity == worst), None)


def _protected(incident: Incident, summary: Summary) -> list[str]:
    track = next((t for t in summary.tracks if t.optimizer == incident.optimizer), None)
    steps = [s for s in (track.rejected_steps if track else ()) if incident.onset <= s <= incident.last_step]
    if not steps:
        return []
    if len(steps) == 1:
        return ["trimtab rejected the update: the weights are as they were before."]
    whole = all(b - a == 1 for a, b in pairwise(steps))
    return [f"trimtab rejected {len(steps):,} updates{f', all from step {steps[0]:,} on' if whole else ''}."]


def _acted(incident: Incident, summary: Summary) -> list[str]:
    mine = [d for d in summary.deeds if belongs(d, incident)]
    words = list(dict.fromkeys(d.words for d in mine if d.applied is not False))
    failed = list(dict.fromkeys(d.words for d in mine if d.applied is False))
    out = [f"trimtab acted: {', '.join(words[:3])}."] if words else []
    return out + ([f"It could not: {', '.join(failed[:3])}."] if failed else [])


def belongs(deed: Deed, incident: Incident) -> bool:
    """Whether something was done about this incident."""
    return deed.optimizer == incident.optimizer and incident.onset <= deed.about <= incident.last_step


def _ended(summary: Summary) -> list[str]:
    after = summary.after
    known = math.isfinite(after.loss_before) and math.isfinite(after.loss_end)
    levels = f"{short(after.loss_before)} before, {short(after.loss_end)} at the end"
    if summary.health is Health.STOPPED:
        return ["The run was stopped for its health."]
    if after.lost:
        return [f"The loss has not come back: {levels}."] if known else ["The loss is not finite at the end."]
    if after.quiet_steps < QUIET:
        return ["The trouble lasted to the end of the record."]
    calm = f"The last {count(after.quiet_steps, 'step')} were quiet"
    return [f"{calm}; loss {levels}." if known else f"{calm}."]


def _without_incidents(summary: Summary) -> Headline:
    steps = sum(t.num_steps for t in summary.tracks)
    loss = summary.tracks[0].loss if summary.tracks else None
    went = f"Loss {short(loss.began)} → {short(loss.ended)}." if loss is not None else "No loss was recorded."
    if not steps:
        return Headline(
            when="",
            cause="Nothing was recorded yet"
            if summary.health is Health.UNFINISHED
            else "No training step was recorded",
            consequence="",
            action="Check that the loop reaches guard.step(loss).",
        )
    if summary.health is Health.SICK:
        return Headline(
            when=f"All {count(steps, 'step')}",
            cause=summary.headline.removesuffix("."),
            consequence=went,
            action="Run trimtab doctor on your training function: it checks what no rule saw here.",
        )
    found = "Nothing to fix: no findings" if summary.health is Health.HEALTHY else "No findings so far"
    ended = "" if summary.health in (Health.HEALTHY, Health.UNFINISHED) else f"The run ended with {summary.ending}."
    if summary.health is Health.STOPPED:
        ended = "The run was stopped for its health."
    action = (
        "Nothing: this run needs no fix."
        if not ended
        else "Read what ended it: no rule found anything wrong with the training itself."
    )
    return Headline(when=count(steps, "step"), cause=found, consequence=f"{went} {ended}".strip(), action=action)
