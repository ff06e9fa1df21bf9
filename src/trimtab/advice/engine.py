"""From a finding to ordered advice: recommendations whose conditions hold in this run, and the rule's own points."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypedDict

from trimtab.core.config import Config
from trimtab.core.policy import remedies_for
from trimtab.core.schedule import RAISED, rates_of
from trimtab.core.types import FROZEN, Column, Finding, Kind
from trimtab.core.window import NUM_PAST, Window

UNKNOWN = math.nan
"""Every comparison with it is false: a condition on something that was not measured does not hold."""
JUMP_AGO = 24
TINY_STEP = 1e-5
"""Relative size of an update below which a lower learning rate cannot help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The circumstances of one finding. Numbers that were not measured are NaN.

    Norms are those before any clipping, the guard's or the loop's. "Recent" means the last 64 steps.
    """

    name: str
    step: int
    evidence: Mapping[str, float] = field(default_factory=dict)
    subject: tuple[str, ...] = ()
    remedies: frozenset[str] = frozenset()  # kinds of action that mode `act` has for this finding
    rates: tuple[float, ...] = ()  # the learning rate of every group
    lr_before: float = UNKNOWN  # the rate before it jumped, where it did so a few steps ago
    lr_jumped_to: float = UNKNOWN  # and the highest since
    warming: bool = False  # the rate rose at this step
    warmed_up: bool = False  # the first steps ran at a lower rate
    lr_multiplier: float = 1.0  # below 1 while a cut by the guard is in force
    spent: int = 0  # actions the guard has taken so far
    clipping: bool = False  # by the guard or by the loop
    adaptive: bool = False  # by a strategy that finds its own limit
    limit: float = UNKNOWN
    clip_rate: float = UNKNOWN  # share of recent steps that were clipped
    kept: float = UNKNOWN  # median share of the gradient that clipping left
    norm: float = UNKNOWN  # of this step
    usual_norm: float = UNKNOWN  # the median of the recent steps before it
    calm_norm: float = UNKNOWN  # the same before it began to rise, where it did
    lowest_norm: float = UNKNOWN  # of the recent steps before it
    highest_norm: float = UNKNOWN
    num_norms: int = 0
    norm_rises: bool = False
    loss: float = UNKNOWN  # the newest finite one
    loss_now: float = UNKNOWN  # of this step, finite or not
    first_loss: float = UNKNOWN
    best_loss: float = UNKNOWN
    loss_rises: bool = False
    num_losses: int = 0
    update_ratio: float = UNKNOWN
    adam: bool = False  # the optimizer divides by the size of gradients
    weight_norm: float = UNKNOWN
    num_weights: int = 0
    num_parameters: int = 0  # tensors, frozen ones included
    num_frozen: int = 0  # parameters that require no gradient
    batch_size: float = UNKNOWN
    input_bad: bool = False
    input_size: float = UNKNOWN  # root mean square over the usual one
    temperature: float = UNKNOWN  # the factor on the logits
    towers: float = UNKNOWN  # outputs of equal shape: the modalities of a contrastive model
    autocast: float = UNKNOWN  # 0 none, 1 float16, 2 bfloat16
    float16: bool = False  # float16 is at work: autocast, weights, or a scaler without another reason
    float16_weights: bool = False
    bfloat16_weights: bool = False
    scaler: bool = False
    num_rejected: int = 0  # among the recent steps, this one included
    num_recent: int = 0  # steps that are remembered, this one included
    exception: str = ""
    mode: str = "advise"
    activations: bool = False
    full_every: int = 0

    @property
    def lr(self) -> float:
        """The highest learning rate of this step."""
        return max(self.rates, default=UNKNOWN)

    @property
    def wrong_sign(self) -> bool:
        """Whether the finding says that the update climbs the loss: no learning rate fixes that."""
        return self.name == "diverging-loss" and "best" not in self.evidence

    @property
    def lr_jumped(self) -> bool:
        """Whether the finding is that the learning rate jumped."""
        return self.name == "learning-rate" and "highest" in self.evidence

    @property
    def contrastive(self) -> bool:
        """Whether the model has a temperature."""
        return not math.isnan(self.temperature)

    @property
    def out_of_memory(self) -> bool:
        """Whether the step ended because memory ran out."""
        text = self.exception.lower()
        return "out of memory" in text or "not enough memory" in text

    @property
    def gpu_error(self) -> bool:
        """Whether an accelerator raised the error."""
        return any(word in self.exception.lower() for word in ("cuda", "hip error", "cublas", "cudnn", "device-side"))

    @property
    def tiny_steps(self) -> bool:
        """Whether the steps are so small already that the rate is not to blame."""
        return self.update_ratio < TINY_STEP

    @property
    def rate_may_be_high(self) -> bool:
        """Whether nothing that is known speaks against a lower learning rate."""
        senseless = bool(self.rates) and not 0 < self.lr < math.inf
        return not (self.wrong_sign or self.input_bad or self.tiny_steps or senseless)

    @property
    def learned(self) -> bool:
        """Whether the loss once was at half of where it began, or lower."""
        return self.best_loss < 0.5 * self.first_loss


def gather(finding: Finding, window: Window, config: Config, spent: int = 0) -> Facts:
    """The circumstances of `finding`, which is about the newest sample of `window`. Pure."""
    now = window.now.scalars
    recent = [*window.past, now][-NUM_PAST:]
    by_loop, clipping = _clipping(recent, config)
    if finding.name == "chronic-clipping":  # the rule has looked at what matters more closely
        clipping |= {"clipping": True, "clip_rate": 1.0, "kept": finding.evidence.get("coef", UNKNOWN)}
    before = [s["grad_norm"] / _handed(s, by_loop) for s in recent[:-1] if math.isfinite(s.get("grad_norm", UNKNOWN))]
    norm_rises = _rises(before, 2.0)
    losses = [s["loss"] for s in window.past if "loss" in s]
    loss_now, level = now.get("loss", UNKNOWN), window.level("loss")
    rates, rates_before = rates_of(now) or window.schedule.rates, window.schedule.rates
    lr_before, lr_jumped_to = _jump([max(r) for s in recent[-JUMP_AGO:] if (r := rates_of(s))])
    if finding.name == "learning-rate" and math.isnan(lr_before):  # the rule has looked farther back
        lr_before = finding.evidence.get("highest", UNKNOWN)
    autocast = _latest(recent, "autocast")
    if math.isnan(autocast) and any("in_rms" in s for s in recent):
        autocast = 0.0  # the forward pass was watched, and only what is switched on is recorded
    scaler = "scale" in now or any("scale" in s for s in recent[-8:])
    weights = window.now.col(Kind.GRAD, Column.L2)
    size, usual_size = now.get("in_rms", UNKNOWN), window.history("in_rms").median()
    ratios = [s["update_ratio"] for s in recent[-16:] if "update_ratio" in s]
    return Facts(
        name=finding.name,
        step=finding.step,
        evidence=finding.evidence,
        subject=finding.subject,
        remedies=remedies_for(finding),
        rates=rates,
        lr_before=lr_before,
        lr_jumped_to=lr_jumped_to,
        warming=bool(rates and rates_before) and max(rates) > 1.001 * max(rates_before) > 0,
        warmed_up=window.schedule.effort < 0.9 * window.schedule.num_seen - 1,
        lr_multiplier=now.get("lr_multiplier", 1.0),
        spent=spent,
        loss=loss_now if math.isfinite(loss_now) else next(reversed(losses), UNKNOWN),
        loss_now=loss_now,
        first_loss=level.start,
        best_loss=min(level.best, level.now),
        loss_rises=_rises(losses, 1.2),
        num_losses=len(losses),
        norm=now.get("grad_norm", UNKNOWN) / _handed(now, by_loop),
        usual_norm=_median(before),
        calm_norm=_median(before[: len(before) // 2] if norm_rises else before),
        lowest_norm=min(before, default=UNKNOWN),
        highest_norm=max(before, default=UNKNOWN),
        num_norms=len(before),
        norm_rises=norm_rises,
        update_ratio=_median([v for v in ratios if math.isfinite(v)]),
        adam=any("moment_lag" in s for s in recent),
        weight_norm=_latest(recent, "weight_norm"),
        num_weights=sum(window.now.layout.numel[window.now.layout.rows(Kind.GRAD)]),
        num_parameters=int(weights.size),
        num_frozen=int((weights == FROZEN).sum()),
        batch_size=_latest(recent, "batch_size"),
        input_bad=bool(now.get("in_bad")),
        input_size=size / usual_size if usual_size > 0 else UNKNOWN,
        temperature=_latest(recent, "temperature"),
        towers=_latest(recent, "towers"),
        autocast=autocast,
        float16=autocast == 1.0 or _latest(recent, "float16") == 1.0 or (scaler and math.isnan(autocast)),
        float16_weights=_latest(recent, "float16") == 1.0,
        bfloat16_weights=_latest(recent, "bfloat16") == 1.0,
        scaler=scaler,
        num_rejected=sum(1 for s in recent if s.get("rejected")),
        num_recent=len(recent),
        exception=": ".join(window.now.notes.get("exception", ())),
        mode=config.mode,
        activations=config.activations,
        full_every=config.full_every,
        **clipping,
    )


class _Clipping(TypedDict):
    """The facts about clipping, by their names in `Facts`."""

    clipping: bool
    adaptive: bool
    limit: float
    clip_rate: float
    kept: float


def _clipping(recent: Sequence[Mapping[str, float]], config: Config) -> tuple[bool, _Clipping]:
    """Whether the loop itself clips (the norms it hands over show it), and all facts about clipping."""
    by_guard = config.mode != "observe" and bool(config.clip)
    handed = [s["handed"] for s in recent if math.isfinite(s.get("handed", UNKNOWN))]
    # The same factor in every step is a division (by micro-batches, say), not a clip.
    by_loop = bool(handed) and min(handed) < 0.99 and max(handed) > 1.001 * min(handed)
    used = [s for s in recent if ("handed" in s or "clip_coef" in s) and not s.get("rejected")]
    coefs = [s.get("clip_coef", 1.0) * _handed(s, by_loop) for s in used if not s.get("scaler_skipped")]
    clipped = [c for c in coefs if c < 0.999]
    limit = config.clip.norm if by_guard and config.clip.norm is not None else UNKNOWN
    if math.isnan(limit):  # what a clipped step is left with is the limit, if it is always the same
        left = [s["grad_norm"] * s.get("clip_coef", 1.0) for s in used if "grad_norm" in s and _is_clipped(s, by_loop)]
        limit = left[-1] if len(left) > 3 and 0 < max(left) < 1.01 * min(left) else UNKNOWN
    return by_loop, {
        "clipping": by_guard or by_loop or bool(clipped),
        "adaptive": by_guard and config.clip.adaptive is not None,
        "limit": limit,
        "clip_rate": len(clipped) / len(coefs) if coefs else UNKNOWN,
        "kept": _median(clipped),
    }


def _jump(tops: Sequence[float]) -> tuple[float, float]:
    """The rate before the last jump among these, and the highest from there on."""
    before = next((i for i, (a, b) in reversed(list(enumerate(pairwise(tops)))) if b > RAISED * a > 0), None)
    return (UNKNOWN, UNKNOWN) if before is None else (tops[before], max(tops[before:]))


def _handed(scalars: Mapping[str, float], by_loop: bool) -> float:
    """What the loop's own clipping left of the gradient: dividing by it gives the norm before."""
    handed = scalars.get("handed", 1.0)
    return handed if by_loop and 0.0 < handed < 1.0 else 1.0


def _is_clipped(scalars: Mapping[str, float], by_loop: bool) -> bool:
    return scalars.get("clip_coef", 1.0) * _handed(scalars, by_loop) < 0.99


def _rises(values: Sequence[float], times: float) -> bool:
    """Whether the newest quarter lies clearly above the older half."""
    if len(values) < 3:
        return False
    early = _median(values[: max(len(values) // 2, 1)])
    return _median(values[-max(len(values) // 4, 1) :]) > early + (times - 1.0) * abs(early)


def _latest(recent: Sequence[Mapping[str, float]], name: str) -> float:
    return next((s[name] for s in reversed(recent) if name in s), UNKNOWN)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else UNKNOWN


log = logging.getLogger("trimtab")
Condition = Callable[[Facts], bool]
MOST = 5
"""A finding carries at most this many points of advice."""
OWN_RANK = 10
"""The points of a rule's own page have ranks 10, 20, 30, … among those of the recommendations."""
LATE = 500
"""From this step on warm-up is no longer advised: the problems it prevents come earlier."""


def always(_: Facts) -> bool:
    """Hold in all circumstances."""
    return True


def never(_: Facts) -> bool:
    """Hold in no circumstances."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One thing to try, where the facts of the run call for it.

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
        "lr_jumped_to": facts.lr_jumped_to,
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
    """Ask a condition; one that raises counts as not met."""
    try:
        return bool(condition(facts))
    except Exception as error:
        log.warning(
            "advice: the condition of %s failed (%s: %s) and is passed over", who.id, type(error).__name__, error
        )
        return False
