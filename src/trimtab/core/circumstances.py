"""What a recommendation may know when it is asked: the finding's evidence, and a few facts of the run around it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trimtab.core.config import Config
from trimtab.core.policy import remedies_for
from trimtab.core.schedule import RAISED, rates_of
from trimtab.core.types import FROZEN, Column, Finding, Kind
from trimtab.core.window import NUM_PAST, Window

UNKNOWN = math.nan
"""Every comparison with it is false: a condition on something that was not measured does not hold."""
LEAP_AGO = 24
TINY_STEP = 1e-5
"""Relative size of an update below which a lower learning rate cannot be the cure."""


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
    lr_before: float = UNKNOWN  # the rate before it leapt, where it did so a few steps ago
    lr_leapt_to: float = UNKNOWN  # and the highest since
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
        """Whether the finding says that the update climbs the loss: no learning rate cures that."""
        return self.name == "diverging-loss" and "best" not in self.evidence

    @property
    def leapt(self) -> bool:
        """Whether the finding is that the learning rate leapt."""
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
    clipping = _clipping(recent, config)
    if finding.name == "chronic-clipping":  # the rule has looked at what matters more closely
        clipping |= {"clipping": True, "clip_rate": 1.0, "kept": finding.evidence.get("coef", UNKNOWN)}
    by_loop = clipping.pop("by_loop")
    before = [s["grad_norm"] / _handed(s, by_loop) for s in recent[:-1] if math.isfinite(s.get("grad_norm", UNKNOWN))]
    norm_rises = _rises(before, 2.0)
    losses = [s["loss"] for s in window.past if "loss" in s]
    loss_now, level = now.get("loss", UNKNOWN), window.level("loss")
    rates, rates_before = rates_of(now) or window.schedule.rates, window.schedule.rates
    lr_before, lr_leapt_to = _leap([max(r) for s in recent[-LEAP_AGO:] if (r := rates_of(s))])
    if finding.name == "learning-rate" and math.isnan(lr_before):  # the rule has looked farther back
        lr_before = finding.evidence.get("highest", UNKNOWN)
    autocast = _latest(recent, "autocast")
    if math.isnan(autocast) and any("in_rms" in s for s in recent):
        autocast = 0.0  # the forward pass was watched, and only what is switched on is told
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
        lr_leapt_to=lr_leapt_to,
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


def _clipping(recent: Sequence[Mapping[str, float]], config: Config) -> dict[str, Any]:
    """Who clips, to what, how often, and what is left. A loop's own clipping shows in what it hands over."""
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
    return {
        "by_loop": by_loop,
        "clipping": by_guard or by_loop or bool(clipped),
        "adaptive": by_guard and config.clip.adaptive is not None,
        "limit": limit,
        "clip_rate": len(clipped) / len(coefs) if coefs else UNKNOWN,
        "kept": _median(clipped),
    }


def _leap(tops: Sequence[float]) -> tuple[float, float]:
    """The rate before the last leap among these, and the highest from there on."""
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
