"""From a finding to ordered advice: recommendations that the evidence supports, merged with the rule's own."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from trimtab.core.circumstances import Facts
from trimtab.core.types import Finding

log = logging.getLogger("trimtab")
Condition = Callable[[Facts], bool]
MOST = 6
"""So many points of advice a finding carries at most: nobody works through more."""
OWN_RANK = 10
"""The points of a rule's own page have ranks 10, 20, 30, … among those of the recommendations."""
LATE = 500
"""From this step on warm-up is no advice any more: what it would have prevented has not happened in it."""


def never(_: Facts) -> bool:
    """Hold in no circumstances."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One thing to try, when the evidence speaks for it.

    `findings` are the names it may be attached to, `holds` the condition and `when` the same in words. Lower ranks
    come first; where `leads` holds it goes to the head. Of several with one `topic` only the first is given. `text`
    says it without numbers, `filled` with those of the run, which is used when all of them are known. `also` are the
    numbers of other points in the source documents that ask for the same.
    """

    id: str
    topic: str
    findings: tuple[str, ...]
    rank: int
    when: str
    holds: Condition
    text: str
    filled: str = ""
    leads: Condition = never
    also: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """Every point of the source documents that this one answers."""
        return (self.id, *self.also)

    def said(self, facts: Facts) -> str:
        """The text with the run's own numbers, or without where one of them is not known."""
        try:
            return self.filled.format_map(figures(facts)) if self.filled else self.text
        except KeyError:
            return self.text


def applicable(facts: Facts, table: Iterable[Recommendation]) -> list[Recommendation]:
    """The recommendations that the circumstances support, best first, one per topic."""
    fit = [
        (-1 if _holds(r, r.leads, facts) else r.rank, r) for r in table if facts.name in r.findings and _fits(r, facts)
    ]
    out: dict[str, Recommendation] = {}
    for _, one in sorted(fit, key=lambda pair: pair[0]):  # stable: equals stay in the order of the table
        out.setdefault(one.topic, one)
    return list(out.values())


def advise(finding: Finding, own: tuple[str, ...], facts: Facts, table: Iterable[Recommendation]) -> tuple[str, ...]:
    """The advice for a finding: what the evidence supports and what its rule says, best first, nothing twice.

    A point of the rule that a recommendation says better, or that the circumstances contradict, is left out.
    """
    given = applicable(facts, table)
    topics = {r.topic for r in given}
    ranked = [(-1 if _holds(r, r.leads, facts) else r.rank, r.said(facts)) for r in given]
    for place, point in enumerate(own, 1):
        left = _what_is_left(point, topics, facts)
        if left:
            ranked.append((OWN_RANK * place, left))
    ordered = [text for _, text in sorted(ranked, key=lambda pair: pair[0])]
    return tuple(dict.fromkeys(ordered))[:MOST]


def figures(facts: Facts) -> dict[str, str]:
    """The numbers of the run that a text may name; those that are not known are not there."""
    lr, usual, batch = facts.lr, facts.usual_norm, facts.batch_size
    numbers = {
        "lr": lr,
        "lr_tenth": lr / 10,
        "lr_half": lr / 2,
        "lr_3_5": 0.6 * lr,
        "lr_1_5": 0.2 * lr,
        "lr_1_4": 1.4 * lr,
        "lr_2": 2 * lr,
        "lr_10": 10 * lr,
        "effective_lr": lr * facts.kept,
        "limit": facts.limit,
        "norm": facts.norm,
        "usual_norm": usual,
        "lowest_norm": facts.lowest_norm,
        "highest_norm": facts.highest_norm,
        "fair_limit": 2 * usual,
        "too_large": 1 / facts.kept if facts.kept > 0 else math.nan,
        "loss": facts.loss,
        "batch": batch,
        "batch_half": batch // 2 if batch >= 2 else math.nan,
        "micro_batches": -(-8 // batch) if batch >= 1 else math.nan,
        "temperature": facts.temperature,
        "update_ratio": facts.update_ratio,
        "lr_before": facts.lr_before,
        "lr_leapt_to": facts.lr_leapt_to,
        "weight_norm": facts.weight_norm,
        "weight_rms": facts.weight_norm / math.sqrt(facts.num_weights) if facts.num_weights else math.nan,
        "input_size": facts.input_size,
    }
    numbers |= {key: value for key, value in facts.evidence.items() if key not in numbers}
    counts = {
        "step": facts.step,
        "num_norms": facts.num_norms,
        "num_rejected": facts.num_rejected,
        "num_frozen": facts.num_frozen,
        "num_groups": len(facts.rates),
        "spent": facts.spent,
        "full_every": facts.full_every,
    }
    out = {key: _number(value) for key, value in numbers.items() if math.isfinite(value)}
    out |= {key: f"{value:,}" for key, value in counts.items()}
    if math.isfinite(facts.clip_rate):
        out["clip_rate"] = f"{facts.clip_rate:.0%}"
    if facts.rates:
        out["rates"] = ", ".join(f"{rate:.3g}" for rate in facts.rates)
    return out


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


# -- the points of a rule's own page ---------------------------------------------------------------------------------

# What a point is about, told by how it begins: a recommendation on the same topic takes its place.
_TOPICS: tuple[tuple[str, str], ...] = (
    ("lower-lr", r"lower the learning rate|halve the learning rate|too large: lower the learning rate"),
    ("raise-lr", r"raise the learning rate|too small: raise it"),
    ("clip", r"clip the gradient norm|clip: "),
    ("warm-up", r"add warm-up"),
    ("outliers", r"look at the batch(es)? of (this|the last) steps? for outliers"),
    ("division", r"check divisions, logarithms"),
    ("eps", r"square roots, norms, logs and divisions"),
    ("float16", r"under float16, (keep the loss|scale the loss)|scale the loss: "),
    ("bfloat16", r"use bfloat16, which needs no scaler|or train under bfloat16"),
    ("normalisation", r"in recurrent or very deep models add normalisation"),
    ("residual", r"residual connections"),
    ("activation", r"relu or gelu instead|use leakyrelu or gelu"),
    ("activations", r"look for dead or saturated units"),
    ("overfit-one", r"try to overfit one single batch"),
    ("alignment", r"check that inputs and targets belong together|print a few inputs with their targets"),
    ("fair-limit", r"set the threshold to about"),
    ("temperature", r"bound it after each step"),
    ("early-stop", r"go back to the checkpoint of the best validation"),
)

# What the circumstances contradict, wherever in a clause it is said.
_CONTRADICTED: tuple[tuple[str, Condition], ...] = (
    (r"\bclip (the gradient norm|less)|\bclip: |clip=1\.0", lambda f: f.clipping or f.wrong_sign),
    (r"(lengthen the|add) warm-up|or warm it up", lambda f: f.step >= LATE or f.wrong_sign),
    (r"(lower|halve) the learning rate|smaller learning rate", lambda f: not f.rate_may_be_high),
    (r"learning rate \(try a tenth\) if the loss was rising", lambda f: f.num_losses > 8 and not f.loss_rises),
    (r"learning rate if the gradient norm was growing", lambda f: f.num_norms > 8 and not f.norm_rises),
    (r"raise the learning rate", lambda f: f.loss_rises),
    (r"under float16|with float16 weights|under bfloat16", lambda f: not f.float16 and not math.isnan(f.autocast)),
    (r"scale the loss|use a gradscaler|without a gradscaler", lambda f: f.scaler),
    (r"are unscaled before", lambda f: not f.scaler),
    (r"^too large", lambda f: f.evidence.get("update_ratio", 1.0) < 1e-2),
    (r"^too small", lambda f: f.evidence.get("update_ratio", 0.0) > 1e-2),
    (r"activations = true", lambda f: f.activations),
)


def topic_of(point: str) -> str:
    """What a point of a rule's page is about; "none" where no recommendation speaks of it."""
    return next((topic for topic, pattern in _TOPICS if re.match(pattern, point, re.IGNORECASE)), "none")


def _what_is_left(point: str, topics: set[str], facts: Facts) -> str:
    """The clauses of a point that are neither said better already nor contradicted.

    Once its first clause is gone only one that stands alone is left: "with Adam lower beta2", not "if that fails".
    """
    clauses = [c for c in point.split("; ") if topic_of(c) not in topics]
    kept = [
        c
        for c in clauses
        if not any(re.search(p, c, re.IGNORECASE) and _holds(p, no, facts) for p, no in _CONTRADICTED)
    ]
    if kept and not point.startswith(kept[0]):
        kept = [c for c in kept if c.startswith("with ")]
    text = "; ".join(kept)
    return text[:1].upper() + text[1:]


def _fits(one: Recommendation, facts: Facts) -> bool:
    return _holds(one, one.holds, facts)


def _holds(who: Recommendation | str, condition: Condition, facts: Facts) -> bool:
    """Ask a condition; one that breaks holds nothing up and counts as not met."""
    try:
        return bool(condition(facts))
    except Exception as error:
        name = who.id if isinstance(who, Recommendation) else repr(who)
        log.warning("advice: the condition of %s failed (%s: %s) and is passed over", name, type(error).__name__, error)
        return False


def unknown_findings(table: Iterable[Recommendation], known: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Names that recommendations attach to and no rule has: each is a mistake in the table."""
    names = frozenset(known)
    wrong = {r.id: tuple(n for n in r.findings if n not in names) for r in table}
    return {key: bad for key, bad in wrong.items() if bad}
