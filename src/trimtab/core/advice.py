"""From a finding to ordered advice: recommendations whose conditions hold in this run, and the rule's own points."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from trimtab.core.circumstances import Facts
from trimtab.core.types import Finding

log = logging.getLogger("trimtab")
Condition = Callable[[Facts], bool]
MOST = 5
"""A finding carries at most this many points of advice."""
OWN_RANK = 10
"""The points of a rule's own page have ranks 10, 20, 30, … among those of the recommendations."""
LATE = 500
"""From this step on warm-up is no longer advised: the trouble it prevents comes earlier."""


def always(_: Facts) -> bool:
    """Hold in all circumstances."""
    return True


def never(_: Facts) -> bool:
    """Hold in no circumstances."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One thing to try, when the facts of the run speak for it.

    `findings` are the names it may be attached to, `holds` the condition and `when` the same in words. Lower ranks
    come first; where `leads` holds it goes to the head. Of several with one `topic` only the first is given. `text`
    says it without numbers, `filled` with those of the run, which is used when all of them are known. `also` are the
    numbers of other points in the source documents that ask for the same.

    What always fits a finding stands on its rule's page, under "What to try". Whatever depends on the run (its
    precision, its clipping, its rates, its data) is a recommendation: nothing is decided by the wording of a text.
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
    """The recommendations whose conditions hold, best first, one per topic."""
    return [one for _, one in _ranked(facts, table)]


def advise(finding: Finding, own: tuple[str, ...], facts: Facts, table: Iterable[Recommendation]) -> tuple[str, ...]:
    """The advice for a finding: what its circumstances call for and what its rule says, best first, nothing twice."""
    ranked = [(rank, one.said(facts)) for rank, one in _ranked(facts, table)]
    ranked += [(OWN_RANK * place, point) for place, point in enumerate(own, 1)]
    ordered = [text for _, text in sorted(ranked, key=lambda pair: pair[0])]
    return tuple(dict.fromkeys(ordered))[:MOST]


def _ranked(facts: Facts, table: Iterable[Recommendation]) -> list[tuple[int, Recommendation]]:
    fit = [
        (-1 if _holds(r, r.leads, facts) else r.rank, r)
        for r in table
        if facts.name in r.findings and _holds(r, r.holds, facts)
    ]
    out: dict[str, tuple[int, Recommendation]] = {}
    for rank, one in sorted(fit, key=lambda pair: pair[0]):  # stable: equals stay in the order of the table
        out.setdefault(one.topic, (rank, one))
    return list(out.values())


def figures(facts: Facts) -> dict[str, str]:
    """The numbers of the run that a text may name; those that are not known are not there."""
    lr, batch = facts.lr, facts.batch_size
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
        "usual_norm": facts.usual_norm,
        "calm_norm": facts.calm_norm,
        "lowest_norm": facts.lowest_norm,
        "highest_norm": facts.highest_norm,
        "too_large": 1 / facts.kept if facts.kept > 0 else math.nan,
        "loss": facts.loss,
        "first_loss": facts.first_loss,
        "batch": batch,
        "batch_half": batch // 2 if batch >= 2 else math.nan,
        "micro_batches": -(-8 // batch) if batch >= 1 else math.nan,
        "temperature": facts.temperature,
        "towers": facts.towers,
        "update_ratio": facts.update_ratio,
        "lr_before": facts.lr_before,
        "lr_jumped_to": facts.lr_leapt_to,
        "weight_norm": facts.weight_norm,
        "weight_rms": facts.weight_norm / math.sqrt(facts.num_weights) if facts.num_weights else math.nan,
        "input_size": facts.input_size,
    }
    numbers |= {key: value for key, value in facts.evidence.items() if key not in numbers}
    counts = {
        "step": facts.step,
        "num_norms": facts.num_norms,
        "num_rejected": facts.num_rejected,
        "num_recent": facts.num_recent,
        "num_frozen": facts.num_frozen,
        "num_groups": len(facts.rates),
        "spent": facts.spent,
    }
    out = {key: _number(value) for key, value in numbers.items() if math.isfinite(value)}
    out |= {key: f"{value:,}" for key, value in counts.items()}
    if 0 < facts.calm_norm < math.inf:
        out["fair_limit"] = fair_limit(facts.calm_norm)
    if math.isfinite(facts.clip_rate):
        out["clip_rate"] = f"{facts.clip_rate:.0%}"
    if facts.rates:
        out["rates"] = ", ".join(f"{rate:.3g}" for rate in facts.rates)
    return out


def fair_limit(norm: float) -> str:
    """A clip limit that touches only exceptional steps of a run with this usual norm: twice that, in two digits.

    Example:
        >>> fair_limit(0.137), fair_limit(1234.0)
        ('0.27', '2500')
    """
    return f"{float(f'{2 * norm:.2g}'):g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _holds(who: Recommendation, condition: Condition, facts: Facts) -> bool:
    """Ask a condition; one that breaks holds nothing up and counts as not met."""
    try:
        return bool(condition(facts))
    except Exception as error:
        log.warning(
            "advice: the condition of %s failed (%s: %s) and is passed over", who.id, type(error).__name__, error
        )
        return False


def unknown_findings(table: Iterable[Recommendation], known: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Names that recommendations attach to and no rule has: each is a mistake in the table."""
    names = frozenset(known)
    wrong = {r.id: tuple(n for n in r.findings if n not in names) for r in table}
    return {key: bad for key, bad in wrong.items() if bad}
