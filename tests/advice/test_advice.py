"""Advice by evidence: every point of the source documents given where it helps, and withheld where it does not.

Findings come from the real rules on small histories wherever that is practicable; `given` names the recommendations
that are really among the (at most five) points of the first finding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from trimtab.advice.engine import MOST, Facts, Recommendation, advise, applicable, fair_limit, gather
from trimtab.advice.guides import GUIDES
from trimtab.advice.recommendations import TABLE, advise_on, adviser_for, as_markdown, recommendations_for
from trimtab.core.config import Config
from trimtab.core.pipeline import Brain
from trimtab.core.registry import advice_of, all_rules, find_rule, select_rules
from trimtab.core.types import FROZEN, FULL_COLUMNS, NORM_COLUMNS, Column, Finding, Kind, Layout, Sample, Severity
from trimtab.core.window import Window

NAMES = ("stem.weight", "layers.0.weight", "layers.1.weight", "layers.2.weight", "layers.3.weight", "head.weight")
NORMS = Layout(names=NAMES, kinds=(Kind.GRAD,) * 6, numel=(1024,) * 6, columns=NORM_COLUMNS)
FULL = Layout(
    names=NAMES + NAMES, kinds=(Kind.GRAD,) * 6 + (Kind.WEIGHT,) * 6, numel=(1024,) * 12, columns=FULL_COLUMNS
)
NO_ROWS = Layout(names=(), kinds=(), numel=(), columns=())
ALL_NUMBERS = (
    *(f"A31.{i}" for i in range(1, 6)),
    *(f"A32.{i}" for i in range(1, 6)),
    *(f"A33.{i}" for i in range(1, 6)),
    *(f"A35.{i}" for i in range(1, 11)),
    *(f"A11.{i}" for i in range(1, 5)),
    *(f"A17.{i}" for i in range(1, 5)),
    *(f"B24.{i}" for i in range(1, 5)),
    *(f"B25.{i}" for i in range(1, 6)),
    *(f"B26.{i}" for i in range(1, 6)),
    *(f"C8.{i}" for i in range(1, 5)),
    *(f"C9.{i}" for i in range(1, 3)),
    *(f"C10.{i}" for i in range(1, 5)),
    *(f"C11.{i}" for i in range(1, 4)),
    "C12.1",
    "C12.2",
    *(f"C15.{i}" for i in range(1, 4)),
    *(f"D15.{i}" for i in range(1, 8)),
    *(f"D16.{i}" for i in range(1, 4)),
    *("E20.2", "E20.6", "E20.7", "E20.8"),
)
GUIDED = (*(f"A34.{i}" for i in range(1, 5)), "E20.4")
"""About lost time, which no finding is about: these stand in the guide `slow`."""


class Given(NamedTuple):
    ids: frozenset[str]
    advice: tuple[str, ...]
    finding: Finding
    facts: Facts

    def text(self, number: str) -> str:
        """What was said for this number."""
        one = next(r for r in applicable(self.facts, TABLE) if number in r.numbers)
        return one.said(self.facts)


def at(step: int, norms: tuple[float, ...] = (1.0,) * 6, **scalars: float | None) -> Sample:
    """One step as a healthy run has it, but for what is said otherwise; None takes a scalar away."""
    usual = {"loss": 1.0, "grad_norm": 1.0, "lr/0": 0.1, "update_ratio": 1e-3, "fixed": 1.0}
    told = {key.replace("__", "/"): value for key, value in scalars.items()}
    known = {key: float(value) for key, value in (usual | told).items() if value is not None}
    return Sample(step=step, layout=NORMS, table=np.array(norms, np.float32).reshape(-1, 1), scalars=known)


def calm(num: int = 60, start: int = 0, **scalars: float | None) -> list[Sample]:
    return [at(i, **scalars) for i in range(start, start + num)]


def given(name: str, history: list[Sample], **settings: Any) -> Given:
    """Let the real rule find it, and see which recommendations are among its advice."""
    config = Config.from_dict({"select": [name], **settings})
    seen: list[Given] = []

    def adviser(finding: Finding, own: tuple[str, ...], window: Window, spent: int) -> tuple[str, ...]:
        facts = gather(finding, window, config, spent)
        advice = advise_on(config, finding, own, window, spent)
        ids = frozenset(n for r in applicable(facts, TABLE) if r.said(facts) in advice for n in r.numbers)
        seen.append(Given(ids, advice, finding, facts))
        return advice

    brain = Brain(select_rules(config), None, adviser=adviser)
    for sample in history:
        brain.advance(sample, seen_at=sample.step)
    assert seen, "the rule found nothing"
    assert len(seen[0].advice) <= MOST
    assert len(set(seen[0].advice)) == len(seen[0].advice)
    return seen[0]


def told(name: str, evidence: dict[str, float] | None = None, **facts: Any) -> frozenset[str]:
    """What is given in these circumstances, for findings whose history is long to build."""
    finding = Finding(code="X", name=name, step=facts.get("step", 100), severity=Severity.WARN, message="x")
    known = Facts(**{"name": name, "step": 100, "rates": (0.1,), "evidence": evidence or {}, **facts})
    advice = advise(finding, advice_of(find_rule(name)), known, TABLE)
    return frozenset(n for r in applicable(known, TABLE) if r.said(known) in advice for n in r.numbers)


def nan(num: int = 60, before: Callable[[int], Sample] | None = None, **scalars: float | None) -> list[Sample]:
    history = [(before or at)(i) for i in range(num)]
    return [*history, at(num, **{"loss": math.nan, "grad_norm": math.nan, "rejected": 1.0, **scalars})]


def exploded(num: int = 60, **scalars: float | None) -> list[Sample]:
    return [*calm(num, **{k: v for k, v in scalars.items() if k != "in_rms"}), at(num, **{"grad_norm": 1e4, **scalars})]


def diverged(num: int = 150, **scalars: float | None) -> list[Sample]:
    """Learns for 80 steps, then climbs."""
    noise = np.random.default_rng(0).normal(0, 0.01, num)
    losses = [(0.2 + 0.8 * 0.95**i if i < 80 else 0.2 + 0.1 * (i - 80)) + float(noise[i]) for i in range(num)]
    return [at(i, **{"loss": losses[i], **scalars}) for i in range(num)]


def chronic(num: int = 30, start: int = 0, coef: float = 1e-3, **scalars: float | None) -> list[Sample]:
    return [at(i, **{"clip_coef": coef, "grad_norm": 1000.0, **scalars}) for i in range(start, start + num)]


def stuck(num: int = 130, **scalars: float | None) -> list[Sample]:
    """At chance, and hardly moving."""
    return [at(i, **{"loss": 2.3, "chance": 2.3, "update_ratio": 1e-4, "lr__0": 5e-5, **scalars}) for i in range(num)]


# -- A31: NaN --------------------------------------------------------------------------------------------------------


def rising(i: int) -> Sample:
    return at(i, loss=1.0 + 0.1 * i, grad_norm=1.0 + 0.1 * i)


def test_a31_1_a_tenth_of_the_rate_when_the_loss_was_rising() -> None:
    found = given(
        "nonfinite-loss", nan(before=lambda i: replace(rising(i), scalars={**rising(i).scalars, "lr/0": 3e-3}))
    )
    assert "A31.1" in found.ids
    finding = given("nonfinite-loss", nan(before=rising, lr__0=3e-3))
    assert finding.advice[0] == "Lower the learning rate tenfold, from 0.003 to 0.0003."
    assert "A31.1" in given("nonfinite-loss", nan(num=1, update_ratio=0.2)).ids  # the first step, and a large one
    assert "A31.1" not in given("nonfinite-loss", nan(num=1)).ids


def test_a31_1_not_when_the_run_was_calm_or_the_batch_is_bad() -> None:
    assert "A31.1" not in given("nonfinite-loss", nan()).ids
    assert "A31.1" not in given("nonfinite-loss", nan(before=rising, in_bad=1.0)).ids
    assert not any("learning rate" in point for point in given("nonfinite-loss", nan()).advice)


def test_a31_2_epsilon_unless_the_batch_is_bad() -> None:
    history = [*calm(), at(60, grad_norm=math.nan, nonfinite_grads=1.0, rejected=1.0)]
    assert "A31.2" in given("nonfinite-gradient", history).ids
    assert (
        "A31.2"
        not in given(
            "nonfinite-gradient", [*calm(), replace(history[-1], scalars={**history[-1].scalars, "in_bad": 1.0})]
        ).ids
    )


def test_a31_3_the_stable_loss_for_contrastive_and_other_losses() -> None:
    six = {"temperature": 14.3, "towers": 6.0}
    assert "A31.3" in told("nonfinite-loss", num_losses=60, loss_now=math.nan, **six)
    assert "A31.3b" in given("nonfinite-loss", nan()).ids
    assert not {"A31.3", "A31.3b"} & given("nonfinite-loss", nan(in_bad=1.0, **six)).ids
    gradient_only = [*calm(**six), at(60, grad_norm=math.nan, nonfinite_grads=1.0, **six)]
    assert "A31.3" not in given("nonfinite-gradient", gradient_only).ids
    for pair in (2.0, None):  # two towers, or nobody knows
        assert "A31.3" not in given("nonfinite-loss", nan(temperature=14.3, towers=pair)).ids


def test_a31_4_clip_only_if_norms_grew_and_nothing_clips() -> None:
    found = given("nonfinite-loss", nan(before=rising))
    assert "A31.4" in found.ids
    assert "`Guard(..., clip=5)`: it had grown from 2.5 to 6.9" in found.text("A31.4")
    assert "A31.4" not in given("nonfinite-loss", nan(before=rising), clip=1.0).ids
    assert "A31.4" not in given("nonfinite-loss", nan()).ids
    assert "A31.4" in given("nonfinite-loss", nan(before=rising), clip=1.0, mode="observe").ids  # nothing clips there


def test_a31_5_division_by_zero_leads_when_everything_was_calm() -> None:
    found = given("nonfinite-loss", nan(before=lambda i: at(i, in_rms=1.0), in_rms=1.0))
    assert found.advice[0].startswith("Look for a division by zero")
    assert "A31.5" not in given("nonfinite-loss", nan(in_bad=1.0)).ids
    assert given("nonfinite-loss", nan(in_bad=1.0)).advice[0].startswith("Repair the data: the batch of step 60")


# -- A32: no progress ------------------------------------------------------------------------------------------------


def deep(num: int = 40, **scalars: float | None) -> list[Sample]:
    """Gradients die on their way to the first layers."""
    table = np.zeros((12, len(FULL_COLUMNS)), np.float32)
    table[:, FULL_COLUMNS.index(Column.L2)] = [*(10.0 ** (2 * i - 11) for i in range(6)), *(1.0,) * 6]
    plain = at(0, **scalars).scalars
    return [Sample(step=i, layout=FULL, table=table, scalars=plain) for i in range(num)]


def test_a32_1_and_a32_2_and_a32_3_when_gradients_die_with_depth() -> None:
    found = given("vanishing-gradient", deep())
    assert {"A32.1", "A32.2", "A32.3"} <= found.ids
    assert found.advice[0].startswith("Add residual connections")
    assert "e-" in found.text("A32.2")  # how little the first layers get


def test_a11_3_and_a11_4_the_two_considerations_for_vanishing_gradients() -> None:
    assert {"A11.3", "A11.4"} <= given("vanishing-gradient", deep()).ids


def test_a32_1_to_3_withheld_without_a_trend_with_depth() -> None:
    history = [at(i, grad_norm=1.0 if i < 10 else 1e-6, loss=2.0, update_ratio=None) for i in range(60)]
    assert not {"A32.1", "A32.2", "A32.3"} & given("vanishing-gradient", history).ids


def test_a32_4_a_slightly_higher_rate_when_nothing_is_known_of_the_steps() -> None:
    found = given("not-learning", stuck(update_ratio=None))
    assert "A32.4" in found.ids
    assert found.text("A32.4") == "Raise the learning rate a little, from 5e-05 to 0.0001."
    assert "A32.4" not in given("vanishing-gradient", deep(update_ratio=None)).ids
    assert "A32.4" not in told("not-learning", loss_rises=True)


def test_a32_5_frozen_parts_are_asked_about_only_where_there_are_some() -> None:
    history = [at(i, (FROZEN, FROZEN, 1.0, 1.0, 1.0, 1.0), loss=2.3, chance=2.3, update_ratio=1e-4) for i in range(130)]
    found = given("not-learning", history)
    assert "A32.5" in found.ids
    assert "2 parameters have `requires_grad=False`" in found.text("A32.5")
    assert "A32.5" not in given("not-learning", stuck()).ids


# -- A33: explosion --------------------------------------------------------------------------------------------------


def test_a33_1_clip_now_with_the_usual_norm_and_never_where_it_is_on() -> None:
    found = given("exploding-gradient", exploded())
    assert found.advice[0].startswith("Clip the gradient norm now, `Guard(..., clip=2)`: twice the usual norm of this")
    unknown = told("exploding-gradient")
    assert "A33.1" in unknown
    for on in (1.0, {"value": 0.5}, "percentile", {"norm": 1.0, "per_group": True}):
        advice = given("exploding-gradient", exploded(), clip=on).advice
        assert not any("clip the gradient norm" in point.lower() or "clip: " in point.lower() for point in advice)


def test_a33_1_a_loop_that_clips_by_itself_counts_as_clipping() -> None:
    history = [at(i, handed=0.5 + 0.01 * (i % 5)) for i in range(60)]
    found = given("exploding-gradient", [*history, at(60, grad_norm=1e4, handed=0.5)])
    assert found.facts.clipping
    assert "A33.1" not in found.ids
    divided = [at(i, handed=0.25) for i in range(60)]  # gradients divided by 4 micro-batches: no clip
    assert "A33.1" in given("exploding-gradient", [*divided, at(60, grad_norm=1e4, handed=0.25)]).ids


def test_a33_2_a_tenth_of_the_rate_unless_the_steps_are_tiny() -> None:
    assert given("exploding-gradient", exploded()).text("A33.2") == "Lower the learning rate tenfold, from 0.1 to 0.01."
    assert "A33.2" not in given("exploding-gradient", exploded(update_ratio=1e-7)).ids


def test_a11_1_and_a11_2_the_two_considerations_for_exploding_gradients() -> None:
    assert {"A11.1", "A11.2"} <= given("exploding-gradient", exploded()).ids
    assert not {"A11.1", "A11.2"} & given("exploding-gradient", exploded(), clip=1.0).ids


def test_a33_3_layer_norm_unless_the_batch_explains_it() -> None:
    assert "A33.3" in given("exploding-gradient", exploded()).ids
    history = [*calm(in_rms=1.0), at(60, grad_norm=1e4, in_rms=50.0)]
    assert "A33.3" not in given("exploding-gradient", history).ids


def test_a33_4_the_stable_loss_where_it_is_contrastive() -> None:
    assert "A33.4" in told("exploding-gradient", temperature=20.0, towers=3.0, rates=(), clipping=True, adaptive=True)
    assert "A33.4" not in given("exploding-gradient", exploded(temperature=20.0, towers=2.0)).ids
    assert "A33.4" not in given("exploding-gradient", exploded()).ids


def test_a33_5_half_the_batch_only_for_large_ones_and_with_the_rate() -> None:
    found = given("exploding-gradient", exploded(batch_size=256.0, update_ratio=1e-7))
    assert "A33.5" in found.ids
    assert "128 instead of 256" in found.text("A33.5")
    assert "together with half the learning rate" in found.text("A33.5")
    assert "A33.5" not in given("exploding-gradient", exploded(batch_size=4.0)).ids


# -- A34: slow -------------------------------------------------------------------------------------------------------


def needless(num: int = 4, **scalars: float | None) -> list[Sample]:
    return calm(num, scale=65536.0, autocast=2.0, **scalars)


def test_a34_lost_time_is_no_matter_of_a_finding() -> None:
    found = given("needless-scaler", needless(temperature=20.0), activations=True)
    assert found.ids == frozenset()
    assert found.advice == advice_of(find_rule("needless-scaler"))
    assert found.advice[0].startswith("Remove the scaler")


# -- A35: the ten points ---------------------------------------------------------------------------------------------


def test_a35_1_which_was_first() -> None:
    assert "A35.1" in given("nonfinite-optimizer-state", [*calm(30), at(30, state_bad=1.0)]).ids
    assert "A35.1" not in given("nonfinite-optimizer-state", [*calm(30), at(30, state_bad=1.0, in_bad=1.0)]).ids


def test_a35_2_a_norm_outside_the_usual_band() -> None:
    loud = [*calm(grad_norm=40.0), at(60, grad_norm=1e5)]
    assert "A35.2" in given("exploding-gradient", loud).ids
    assert "A35.2" not in given("exploding-gradient", exploded()).ids
    assert "A35.2" in given("not-learning", stuck(grad_norm=0.01)).ids


def test_a35_3_ten_times_smaller_for_dead_units_unless_steps_are_small() -> None:
    dead = calm(20, dead_lasting=0.9, dead_units=20.0, dead_of=32.0, update_ratio=0.05)
    assert "A35.3" in given("dead-units", dead, activations=True).ids
    small = calm(20, dead_lasting=0.9, dead_units=20.0, dead_of=32.0, update_ratio=1e-4)
    assert "A35.3" not in given("dead-units", small, activations=True).ids


def test_a35_4_an_epsilon_that_is_zero_in_float16() -> None:
    found = given("nonfinite-loss", nan(autocast=1.0, scale=1024.0))
    assert "A35.4" in found.ids
    assert "A31.2" not in found.ids
    assert "A35.4" not in given("nonfinite-loss", nan(autocast=2.0)).ids


def test_a35_5_watch_activations_unless_they_are_watched() -> None:
    assert "A35.5" in given("not-learning", stuck()).ids
    found = given("not-learning", stuck(), activations=True)
    assert "A35.5" not in found.ids
    assert not any("activations = true" in point for point in found.advice)


def test_a35_6_a_loss_above_1000() -> None:
    half = {"loss": 2e4, "autocast": 1.0, "scale": 1024.0}
    found = given("nonfinite-loss", nan(before=lambda i: at(i, **half), autocast=1.0, scale=1024.0))
    assert "A35.6" in found.ids
    assert found.advice[0].startswith("Make the loss smaller: float16 ends at 65504, and a loss of 20,000 overflows")
    assert "A35.6" not in given("nonfinite-loss", nan(autocast=1.0, scale=1024.0)).ids
    full = given("nonfinite-loss", nan(before=lambda i: at(i, loss=2e4)))
    assert "A35.6" not in full.ids  # float32 does not overflow at 20,000
    assert not any("overflow" in point for point in full.advice)
    assert "A35.6b" in told("exploding-gradient", first_loss=2e4, clipping=True, rates=())
    assert "A35.6b" not in told("exploding-gradient", first_loss=2.0, loss=2e4, clipping=True, rates=())


def test_a35_7_small_batches_are_accumulated() -> None:
    found = given("exploding-gradient", exploded(batch_size=3.0))
    assert "A35.7" in found.ids
    assert "Accumulate 3 micro-batches" in found.text("A35.7")
    assert "A35.7" not in given("exploding-gradient", exploded(batch_size=32.0)).ids


def test_a35_8_the_logit_scale_between_14_and_100() -> None:
    found = given("temperature-runaway", [at(10, temperature=5000.0)])
    assert found.advice[0].startswith("Keep `logit_scale.exp()` between 14 and 100, it is 5,000:")
    assert "A35.8" in given("exploding-gradient", exploded(temperature=150.0)).ids
    assert "A35.8" not in given("exploding-gradient", exploded(temperature=50.0)).ids
    assert "A35.8" not in given("exploding-gradient", exploded(temperature=1.0)).ids  # flat logits do not explode


def test_a35_9_warm_up_early_and_not_at_step_50000() -> None:
    assert "A35.9" in given("exploding-gradient", exploded()).ids
    late = [*calm(60, start=50_000), at(50_060, grad_norm=1e4)]
    found = given("exploding-gradient", late)
    assert "A35.9" not in found.ids
    assert not any("warm" in point.lower() for point in found.advice)


def test_a35_10_mixed_precision_with_and_without_a_scaler() -> None:
    without = given("nonfinite-loss", nan(autocast=1.0))
    assert "A35.10" in without.ids
    with_one = given("nonfinite-loss", nan(autocast=1.0, scale=1024.0))
    assert "A35.10b" in with_one.ids
    assert not any("needs a GradScaler" in p or "use a GradScaler" in p for p in with_one.advice)
    none = given("nonfinite-loss", nan(before=lambda i: at(i, in_rms=1.0), in_rms=1.0))  # watched, and no autocast
    assert not any("float16" in point or "GradScaler" in point for point in none.advice)


# -- A17: activations ------------------------------------------------------------------------------------------------


def test_a17_activations_by_problem() -> None:
    assert "A17.1" in given("vanishing-gradient", deep()).ids
    dead = given("dead-units", calm(20, dead_lasting=0.9, dead_units=20.0, dead_of=32.0), activations=True)
    assert "A17.2" in dead.ids
    assert "LeakyReLU(0.01)" in dead.text("A17.2")
    assert "A17.3" in given("exploding-gradient", exploded()).ids
    full = given(
        "saturated-units", calm(20, saturated_lasting=0.9, saturated_units=9.0, saturated_of=10.0), activations=True
    )
    assert "A17.4" in full.ids
    assert "A17.2" not in full.ids
    assert "A17.1" not in dead.ids
    assert not {"A17.1", "A17.2", "A17.4"} & given("exploding-gradient", exploded()).ids


# -- B24, B25, B26 ---------------------------------------------------------------------------------------------------


def test_b24_1_lower_the_limit_to_what_this_run_needs() -> None:
    found = given("exploding-gradient", exploded(clip_coef=1.0), clip=50.0)
    assert "B24.1" in found.ids
    assert "from 50 to about 2: the usual norm is 1" in found.text("B24.1")
    assert "B24.1" not in given("exploding-gradient", exploded(clip_coef=1.0), clip=1.0).ids  # it fits this run
    assert "B24.1" not in given("exploding-gradient", exploded(clip_coef=0.1), clip=50.0).ids  # it would only hide more
    assert "B24.1" not in given("exploding-gradient", exploded()).ids


def test_b24_1_a_limit_follows_the_norm_whatever_it_is() -> None:
    for norm in (1e-3, 0.3, 7.0, 4e4):
        history = [*calm(grad_norm=norm), at(60, grad_norm=1e4 * norm)]
        point = given("exploding-gradient", history).text("A33.1")
        assert f"clip={fair_limit(norm)})" in point
        assert norm < float(fair_limit(norm)) < 3 * norm


def test_b24_2_half_the_rate_when_clipping_was_not_enough() -> None:
    found = given("exploding-gradient", exploded(clip_coef=1.0, lr__0=2.5e-4), clip=0.5)
    assert "from 0.00025 to 0.000125" in found.text("B24.2")
    assert {"B24.2", "B25.2", "B26.4"} <= found.ids
    assert "B24.2" not in given("exploding-gradient", exploded()).ids


def test_b24_3_norms_that_had_been_rising() -> None:
    history = [at(i, grad_norm=1.0 + 0.1 * i) for i in range(60)]
    assert "B24.3" in given("exploding-gradient", [*history, at(60, grad_norm=1e4)]).ids
    assert "B24.3" not in given("exploding-gradient", exploded()).ids


def test_b24_4_a_spike_comes_before_an_explosion() -> None:
    found = given("loss-spike", [*calm(80), at(80, loss=60.0)])
    assert "B24.4" in found.ids
    assert "before step 80" in found.text("B24.4")
    assert "B24.4" not in given("loss-spike", [*calm(80), at(80, loss=60.0, grad_norm=500.0)]).ids


def test_b25_1_norms_above_the_limit_are_compared() -> None:
    found = given("exploding-gradient", [*calm(grad_norm=2.0, clip_coef=0.25), at(60, grad_norm=1e4)], clip=0.5)
    assert {"B25.1", "B26.2", "D15.2"} <= found.ids
    assert "usually 2, and should lie below 0.5" in found.text("B25.1")
    assert "B25.1" not in given("exploding-gradient", exploded(clip_coef=1.0), clip=5.0).ids


def test_b25_3_and_b26_5_a_lower_limit() -> None:
    assert {"B25.3", "B26.5"} <= given("exploding-gradient", exploded(clip_coef=1.0), clip=10.0).ids
    assert not {"B25.3", "B26.5"} & given("exploding-gradient", exploded()).ids


def test_b25_4_half_the_batch_when_memory_ran_out() -> None:
    text = ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.")
    end = Sample(
        step=60,
        layout=NO_ROWS,
        table=np.zeros((0, 0), np.float32),
        scalars={"exception": 1.0},
        phase="error",
        notes={"exception": text},
    )
    found = given("step-exception", [*calm(batch_size=64.0), end])
    assert {"B25.4", "E20.8"} <= found.ids
    assert "from 64 to 32" in found.text("B25.4")
    other = replace(end, notes={"exception": ("ValueError", "shapes do not match")})
    assert not {"B25.4", "E20.8", "late-errors"} & given("step-exception", [*calm(batch_size=64.0), other]).ids
    on_host = ("RuntimeError", "DefaultCPUAllocator: not enough memory: you tried to allocate 2000 bytes.")
    found = given("step-exception", [*calm(batch_size=64.0), replace(end, notes={"exception": on_host})])
    assert "B25.4" in found.ids
    assert not any("cuda" in point.lower() for point in found.advice)
    late = replace(end, notes={"exception": ("RuntimeError", "CUDA error: device-side assert triggered")})
    assert "late-errors" in given("step-exception", [*calm(batch_size=64.0), late]).ids


def test_b25_5_outliers_by_the_size_of_the_inputs() -> None:
    found = given("exploding-gradient", [*calm(in_rms=1.0), at(60, grad_norm=1e4, in_rms=50.0)])
    assert found.advice[0].startswith("Look at the batch of step 60 first: its inputs are 50 times as large")
    usual = given("exploding-gradient", [*calm(in_rms=1.0), at(60, grad_norm=1e4, in_rms=1.0)])
    assert "B25.5" not in usual.ids
    assert "B25.5b" in usual.ids


def test_b26_1_known_settings_when_it_goes_wrong_at_once() -> None:
    history = [at(i, loss=1.0 + 5.0 * i, update_ratio=0.6, weight_norm=100.0) for i in range(8)]
    assert "B26.1" in given("update-ratio", history).ids
    assert "B26.1" not in given("diverging-loss", diverged()).ids


def test_b26_3_checkpoints_where_what_was_learned_may_be_lost() -> None:
    assert "B26.3" in given("nonfinite-optimizer-state", [*calm(90), at(90, state_bad=1.0)]).ids
    assert "B26.3" not in given("nonfinite-loss", nan()).ids  # that step was rejected: nothing is lost


def settled(**scalars: float | None) -> list[Sample]:
    """At chance although the weights move: nothing leads from the inputs to the targets."""
    usual = {"loss": 2.3, "chance": 2.3, "update_ratio": 1e-3, "grad_cos": 0.0}
    return [at(i, **{**usual, **scalars}) for i in range(400)]


# -- C8 to C12 -------------------------------------------------------------------------------------------------------


def test_c8_bands_of_the_gradient_norm() -> None:
    assert "C8.1" in given("not-learning", stuck(grad_norm=0.05)).ids
    assert "C8.2" in given("targets-do-not-predict", settled(grad_norm=0.7)).ids
    assert "C8.3" in given("chronic-clipping", chronic()).ids
    loud = given("exploding-gradient", [*calm(grad_norm=40.0), at(60, grad_norm=1e5)])
    assert "C8.4" in loud.ids
    assert "usually 40" in loud.text("C8.4")
    assert not {"C8.1", "C8.2", "C8.4"} & given("not-learning", stuck(grad_norm=3.0)).ids
    assert "C8.4" not in given("exploding-gradient", exploded()).ids
    assert "C8.3" not in given("chronic-clipping", chronic(start=400)).ids


def jumped(**scalars: float | None) -> list[Sample]:
    return [*calm(40, **scalars), at(40, **{**scalars, "update_ratio": 0.5})]


def test_c9_weights_grow_gradually_and_stay_below_the_root_of_their_number() -> None:
    found = given("weight-jump", jumped(weight_norm=300.0))
    assert "C9.2" in found.ids  # 6,144 weights: the root is 78
    assert "root mean square of 3.83" in found.text("C9.2")
    assert found.text("which-jumped").startswith('Compare "Learning rate" and "Gradient norm"')
    assert "which-jumped" in found.ids
    assert "which-jumped" not in given("weight-jump", [*calm(40), at(40, update_ratio=0.5, lr__0=3.0)]).ids
    assert "C9.1" in told("weight-jump", clipping=True, rates=())
    assert "C9.2" not in given("weight-jump", jumped(weight_norm=10.0)).ids
    assert "C9.1" not in given("exploding-gradient", exploded()).ids


def test_a33_1_weights_that_jump_are_clipped_as_well() -> None:
    assert "A33.1b" in given("weight-jump", jumped()).ids
    assert "A33.1b" not in given("weight-jump", jumped(), clip=1.0).ids


def oscillating(num: int = 120, **scalars: float | None) -> list[Sample]:
    """Falls at first, then swings; gradients flip."""
    swing = [2.0 - 0.05 * i if i < 30 else 1.5 + (0.6 if i % 2 else -0.4) for i in range(num)]
    return [at(i, **{"loss": swing[i], "grad_cos": 0.5 if i < 30 else -0.9, **scalars}) for i in range(num)]


def test_c10_1_three_fifths_or_a_fifth_of_the_rate() -> None:
    found = given("oscillating-loss", oscillating(lr__0=5e-5))
    assert found.advice[0] == "Lower the learning rate from 5e-05 to 3e-05, then to 1e-05; or lower the momentum."
    tiny = given("oscillating-loss", oscillating(update_ratio=1e-7))
    assert "C10.1" not in tiny.ids
    assert "C15.3" in tiny.ids  # a rate is no general cure


def test_c10_2_a_longer_warm_up_where_there_is_one() -> None:
    history = oscillating()
    warm = [replace(s, scalars={**s.scalars, "lr/0": 0.1 * min((s.step + 1) / 100, 1.0)}) for s in history]
    found = given("oscillating-loss", warm)
    assert "C10.2" in found.ids
    assert "300 to 500" in found.text("C10.2")
    assert "C10.2" not in given("oscillating-loss", history).ids


def test_c10_3_gradcheck_when_a_lower_rate_cannot_be_it() -> None:
    assert "C10.3" in given("oscillating-loss", oscillating()).ids
    assert "C10.3" in given("diverging-loss", diverged(update_ratio=1e-7)).ids
    assert "C10.3" not in given("diverging-loss", diverged()).ids


def test_c10_4_alignment_unless_it_has_learned() -> None:
    assert given("not-learning", stuck()).advice[0].startswith("Print a few inputs with their targets")
    assert "C10.4" in told("diverging-loss", {"best": 1.0}, clipping=True, step=900)
    assert "C10.4" not in given("diverging-loss", diverged()).ids  # it had learned: they belong together


def test_c11_1_a_higher_rate_when_steps_are_small() -> None:
    found = given("not-learning", stuck())
    assert "C11.1" in found.ids
    assert "from 5e-05 to 7e-05, then to 0.0001" in found.text("C11.1")
    assert "C11.1" not in told("not-learning", update_ratio=1e-2)


def test_c11_2_norms_always_below_0_3() -> None:
    found = given("not-learning", stuck(grad_norm=0.2))
    assert "C11.2" in found.ids
    assert "at most 0.2" in found.text("C11.2")
    assert "C11.2" not in given("not-learning", stuck(grad_norm=0.7)).ids
    assert "C11.2" not in given("not-learning", stuck(grad_norm=0.2, moment_lag=1.0)).ids  # Adam's steps do not shrink


def test_c11_3_a_shorter_warm_up_only_while_it_lasts() -> None:
    history = [at(i, loss=2.3, chance=2.3, update_ratio=1e-4, lr__0=1e-6 * (i + 1)) for i in range(220)]
    found = given("not-learning", history)
    assert found.facts.step > 100
    assert "C11.3" in found.ids
    assert "C11.3" not in given("not-learning", stuck()).ids


def test_c12_clipping_becomes_rarer() -> None:
    assert "C12.1" in given("chronic-clipping", chronic()).ids
    late = given("chronic-clipping", chronic(start=400))
    assert "C12.2" in late.ids
    assert "C12.1" not in late.ids
    assert "C12.2" not in given("chronic-clipping", chronic()).ids


# -- C15: clipping hides the disease ---------------------------------------------------------------------------------


def test_c15_1_says_when_clipping_only_hides_the_disease_and_the_rate_really_used() -> None:
    found = given("chronic-clipping", chronic(coef=1e-3, lr__0=0.1), clip=1.0)
    assert found.advice[0].startswith("Look for the cause, clipping only hides it")
    assert "LR x limit / norm = 0.0001" in found.advice[0]
    assert "1,000 times too large" in found.advice[0]
    assert "C15.1" in given("exploding-gradient", exploded(clip_coef=0.1), clip=1.0).ids
    assert "C15.1" not in given("exploding-gradient", exploded(clip_coef=1.0), clip=1.0).ids


def test_c15_2_overfit_one_batch_unless_it_has_learned() -> None:
    assert "C15.2" in given("not-learning", stuck()).ids
    assert "C15.2" not in told("chronic-clipping", first_loss=2.0, best_loss=0.1)


def test_c15_3_a_lower_rate_is_no_general_cure() -> None:
    found = given("diverging-loss", diverged(update_ratio=1e-7))
    assert "C15.3" in found.ids
    assert not any(point.lower().startswith("lower the learning rate") for point in found.advice)
    assert "C15.3" not in given("diverging-loss", diverged()).ids


# -- D15, D16 --------------------------------------------------------------------------------------------------------


def test_d15_1_a_limit_made_for_this_model() -> None:
    found = given("chronic-clipping", chronic(coef=1e-3), clip=1.0)
    assert "D16.1" in found.ids
    assert "from 1 to about 2000" in found.text("D16.1")
    assert "D16.1" not in given("chronic-clipping", chronic(), clip="percentile").ids
    assert "D15.1" in given("exploding-gradient", exploded(clip_coef=1.0), clip=50.0).ids


def test_d15_2_norms_are_watched() -> None:
    history = [at(i, grad_norm=1.0 + 0.1 * i) for i in range(60)]
    assert "D15.2" in given("exploding-gradient", [*history, at(60, grad_norm=1e4)]).ids
    assert "D15.2" not in given("exploding-gradient", exploded()).ids


def test_d15_3_a_rate_that_jumped_is_put_back() -> None:
    history = [*calm(80, lr__0=0.02), at(80, lr__0=6.0), at(81, lr__0=6.0, loss=60.0)]
    found = given("loss-spike", history)
    assert found.advice[0].startswith("Put the learning rate back to 0.02: it has just jumped to 6.")
    assert "D15.3" not in given("loss-spike", [*calm(80), at(80, loss=60.0)]).ids
    back = [*calm(80, lr__0=0.02), *calm(5, start=80, lr__0=6.0), at(85, lr__0=0.02, loss=60.0)]
    assert (
        given("loss-spike", back).advice[0].startswith("Leave the learning rate, it is back at 0.02: a few steps at 6")
    )
    assert "D15.3c" not in given("loss-spike", history).ids
    few = {"clipping": True, "update_ratio": 1e-3, "step": 900, "first_loss": 2.0, "best_loss": 0.5, "rates": (0.1,)}
    assert "D15.3b" in told("learning-rate", remedies=frozenset({"cut_lr"}), **few)
    assert "D15.3b" not in told("learning-rate", remedies=frozenset({"cut_lr"}), mode="act", **few)
    assert "D15.3b" not in told("learning-rate", **few)  # nothing is promised that the mode would not do


def test_a_learning_rate_that_jumped_is_put_back_before_anything_is_printed() -> None:
    found = given("learning-rate", [*calm(80, lr__0=0.02), at(80, lr__0=6.0, update_ratio=0.3)])
    assert found.advice[0].startswith("Put the learning rate back to 0.02: it has just jumped to 6.")
    assert found.advice[1].startswith("Find what set the learning rate")
    assert "unfrozen-trunk" not in found.ids
    two = [*calm(80, lr__0=0.02, lr__1=0.02), at(80, lr__0=6.0, lr__1=6.0, update_ratio=0.3)]
    assert "unfrozen-trunk" in given("learning-rate", two).ids


def test_d15_4_health_is_asked_before_saving() -> None:
    assert "D15.4" in given("nonfinite-ema", [*calm(30), at(30, ema_bad=1.0)]).ids
    assert "D15.4" not in given("exploding-gradient", exploded()).ids


def test_d15_5_what_was_loaded_is_validated() -> None:
    assert "D15.5" in given("optimizer-state-lost", [*calm(30), at(30, state_lost=1.0)]).ids
    assert "D15.5" in given("nonfinite-optimizer-state", [at(0), at(1, state_bad=1.0)]).ids
    assert "D15.5" not in given("nonfinite-optimizer-state", [*calm(90), at(90, state_bad=1.0)]).ids


def test_d15_6_stop_early_with_the_best_validation() -> None:
    history: list[Sample] = []
    for epoch in range(12):
        history += calm(10, start=10 * epoch, loss=1.0 - 0.05 * epoch)
        val = 1.0 - 0.1 * epoch if epoch < 5 else 0.6 + 0.2 * (epoch - 4)
        empty = np.zeros((0, 0), np.float32)
        history.append(Sample(step=10 * epoch + 9, layout=NO_ROWS, table=empty, scalars={"val_loss": val}, phase="val"))
    found = given("overfitting", history)
    assert "D15.6" in found.ids
    assert found.advice[0].startswith("Stop early: go back to the checkpoint of the best validation (0.6;")
    assert "D15.6" not in given("diverging-loss", diverged()).ids


def test_d15_7_a_way_out_of_a_run_that_is_lost() -> None:
    history = [*calm(90), at(90, state_bad=1.0)]
    assert "D15.7" in given("nonfinite-optimizer-state", history).ids
    assert "D15.7" not in given("nonfinite-optimizer-state", history, mode="raise").ids


def test_d16_1_frequent_clipping_a_higher_limit_or_a_lower_rate() -> None:
    assert "D16.1" in given("chronic-clipping", chronic(), clip=1.0).ids
    rising_loss = [replace(s, scalars={**s.scalars, "loss": 1.0 + 0.2 * s.step}) for s in chronic()]
    found = given("chronic-clipping", rising_loss, clip=1.0)
    assert "D16.1b" in found.ids
    assert "D16.1" not in found.ids
    assert not any(n.startswith("D16.1") for n in given("exploding-gradient", exploded()).ids)


def test_d16_2_nan_that_comes_back() -> None:
    history = [at(i, rejected=1.0 if i in (10, 20, 30) else 0.0) for i in range(60)]
    found = given("nonfinite-loss", [*history, at(60, loss=math.nan, rejected=1.0)])
    assert "D16.2" in found.ids
    assert "4 of the last 61 steps" in found.text("D16.2")
    assert "D16.2" not in given("nonfinite-loss", nan()).ids


def test_d16_3_frequent_corrections() -> None:
    config = Config.from_dict({"mode": "act", "select": ["loss-spike"], "policy": {"cooldown": 0, "quiet": 5}})
    brain = Brain.from_config(config, adviser_for(config))
    verdicts = []
    for i in range(200):
        loss = 60.0 * 4 ** (i // 40) if i % 40 == 39 else 1.0
        verdicts.append(brain.advance(at(i, loss=loss, update_ratio=0.5 if loss > 1 else 1e-3), seen_at=i)[0])
    assert "D16.3" in told("loss-spike", spent=3)
    told_at = [(f.step, f.advice[0]) for v in verdicts for f in v.findings if f.streak == 1]
    assert len(told_at) >= 4
    assert not told_at[0][1].startswith("Review the settings")
    assert told_at[-1][1].startswith("Review the settings and the data: the guard has corrected this run ")


# -- E20 -------------------------------------------------------------------------------------------------------------


def test_e20_hints_of_the_checklist() -> None:
    two = {"lr__0": 0.0, "lr__1": 0.0}
    found = given("learning-rate", calm(20, **two))
    assert "E20.6" in found.ids
    assert "the rates are 0, 0" in found.text("E20.6")
    assert "E20.6" not in given("learning-rate", calm(20, lr__0=0.0)).ids
    assert "E20.7" in given("exploding-gradient", exploded()).ids
    assert "E20.7" not in given("exploding-gradient", exploded(), clip=1.0).ids
    assert "E20.2" in told("scale-collapse", float16=True, scaler=True)
    assert "E20.2" not in told("scale-collapse", float16=False, scaler=True)


# -- the mechanism ---------------------------------------------------------------------------------------------------


def test_every_number_of_the_documents_is_in_the_table() -> None:
    known = {number for one in TABLE for number in one.numbers}
    assert set(ALL_NUMBERS) - known == set()
    assert set(GUIDED) <= {point.source for point in GUIDES["slow"].points}
    assert not set(GUIDED) & known
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [one.id for one in TABLE if f'"{one.id}"' not in tests.partition("# -- A31")[2]] == []


def test_the_table_names_only_rules_that_exist_and_each_id_once() -> None:
    known = {rule.name for rule in all_rules()}
    assert {one.id: bad for one in TABLE if (bad := set(one.findings) - known)} == {}
    assert len({one.id for one in TABLE}) == len(TABLE)


@pytest.mark.parametrize("one", TABLE, ids=lambda r: r.id)
def test_texts_are_sentences_and_can_be_filled(one: Recommendation) -> None:
    assert one.text.endswith((".", "?", ".)"))
    assert "{" not in one.text
    assert not one.when.endswith(".")
    everything = Facts(
        name=one.findings[0],
        step=7,
        evidence={"ratio": 1e-5, "best": 1.0, "val_loss": 2.0, "onset": 3.0, "threshold": 1.0, "num_backwards": 4.0},
        **dict.fromkeys(("limit", "kept", "norm", "usual_norm", "calm_norm", "lowest_norm", "highest_norm"), 0.5),
        **dict.fromkeys(("loss", "first_loss", "towers"), 0.5),
        **dict.fromkeys(("batch_size", "temperature", "update_ratio", "weight_norm", "input_size"), 4.0),
        **dict.fromkeys(("lr_before", "lr_jumped_to"), 4.0),
        rates=(0.1,),
        num_weights=4,
        clip_rate=0.5,
    )
    said = one.said(everything)
    assert "{" not in said
    assert not one.filled or said != one.text
    assert one.said(Facts(name=one.findings[0], step=7)).endswith((".", "?", ")"))  # nothing is known: never a KeyError


def test_advice_of_a_run_is_what_the_brain_attaches() -> None:
    brain = Brain.from_config(Config(), adviser_for(Config()))
    for sample in exploded():
        verdict, _ = brain.advance(sample, seen_at=sample.step)
    assert verdict.findings[0].advice[0].startswith("Clip the gradient norm now")


def test_without_an_adviser_the_rule_speaks_for_itself() -> None:
    brain = Brain((find_rule("GRAD002")(),), None)
    for sample in exploded():
        verdict, _ = brain.advance(sample, seen_at=sample.step)
    assert verdict.findings[0].advice == advice_of(find_rule("GRAD002"))


def test_advice_is_made_once_per_incident_and_stands_while_it_lasts() -> None:
    calls: list[int] = []

    def adviser(finding: Finding, own: tuple[str, ...], window: Window, spent: int) -> tuple[str, ...]:
        calls.append(finding.step)
        return (f"at {finding.step}",)

    brain = Brain(select_rules(Config.from_dict({"select": ["LOSS001"]})), None, adviser=adviser)
    bad = {3, 4, 5, 9}
    advice = [
        f.advice
        for i in range(12)
        for f in brain.advance(at(i, loss=math.nan if i in bad else 1.0), seen_at=i)[0].findings
    ]
    assert calls == [3, 9]  # and never in a step without a finding
    assert advice == [("at 3",)] * 3 + [("at 9",)]


def test_advice_of_an_open_incident_survives_a_saved_state() -> None:
    history = [*calm(30), *(at(i, loss=math.nan) for i in range(30, 40))]
    whole, halves = (
        Brain.from_config(Config(), adviser_for(Config())),
        Brain.from_config(Config(), adviser_for(Config())),
    )
    expected = [whole.advance(s, seen_at=s.step)[0].findings for s in history]
    for sample in history[:35]:
        halves.advance(sample, seen_at=sample.step)
    fresh = Brain.from_config(Config(), adviser_for(Config()))
    fresh.load_state_dict(halves.state_dict())
    assert [fresh.advance(s, seen_at=s.step)[0].findings for s in history[35:]] == expected[35:]
    old = {key: value for key, value in halves.state_dict().items() if key != "given"}  # from before advice was kept
    fresh.load_state_dict(old)
    assert fresh.advance(history[35], seen_at=35)[0].findings[0].advice


def test_advice_that_is_over_is_not_kept() -> None:
    brain = Brain.from_config(Config(), adviser_for(Config()))
    for sample in [*calm(30), at(30, loss=math.nan), *calm(5, start=31)]:
        brain.advance(sample, seen_at=sample.step)
    assert brain.state_dict()["given"] == []


def test_a_condition_that_breaks_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(TABLE[0], id="X1", findings=("loss-spike",), holds=lambda f: f.nothing)  # type: ignore[attr-defined]
    sound = replace(
        TABLE[0], id="X2", topic="other", findings=("loss-spike",), holds=lambda f: True, text="Do it.", filled=""
    )
    finding = Finding(code="LOSS002", name="loss-spike", step=1, severity=Severity.ERROR, message="x")
    with caplog.at_level(logging.WARNING, "trimtab"):
        assert advise(finding, (), Facts(name="loss-spike", step=1), (broken, sound)) == ("Do it.",)
    assert "X1 failed" in caplog.text


def test_an_adviser_that_breaks_leaves_the_rules_own_advice(caplog: pytest.LogCaptureFixture) -> None:
    def adviser(*_: object) -> tuple[str, ...]:
        raise ZeroDivisionError

    brain = Brain((find_rule("LOSS001")(),), None, adviser=adviser)
    verdict, _ = brain.advance(at(0, loss=math.nan), seen_at=0)
    assert verdict.findings[0].advice == advice_of(find_rule("LOSS001"))
    assert "could not be weighed" in caplog.text


def test_the_wrong_sign_is_no_matter_of_rates() -> None:
    found = given("diverging-loss", [*calm(20), at(20, loss_factor=-1.0)])
    assert found.advice[0].startswith("Check the sign of the loss")
    assert not any(w in point.lower() for point in found.advice for w in ("learning rate", "clip", "warm"))


def test_only_one_side_of_the_update_ratio_is_spoken_of() -> None:
    small = given("update-ratio", [at(i, update_ratio=1e-7) for i in range(40)])
    assert small.advice[0].startswith(
        "Raise the learning rate tenfold, from 0.1 to 1: a step changes the weights by only"
    )
    assert {"steps-too-small", "unit-of-the-schedule"} <= small.ids
    assert not any(p.startswith(("Lower", "Warm")) for p in small.advice)
    large = given("update-ratio", [at(i, update_ratio=0.5) for i in range(40)])
    assert not {"steps-too-small", "unit-of-the-schedule"} & large.ids
    assert not any(p.startswith("Raise") for p in large.advice)


def test_what_a_clipping_loop_leaves_tells_its_limit_and_the_norm_before() -> None:
    history = [at(i, grad_norm=0.5, handed=0.5 / (2.0 + 0.1 * (i % 7))) for i in range(60)]
    facts = given("exploding-gradient", [*history, at(60, grad_norm=100.0, handed=0.01)]).facts
    assert facts.clipping
    assert facts.usual_norm == pytest.approx(2.3, abs=0.2)
    assert facts.norm == pytest.approx(1e4)
    assert facts.clip_rate == 1.0


def test_rules_without_recommendations_keep_their_advice() -> None:
    found = given("eval-mode", calm(10, eval_forward=1.0))
    assert found.advice == advice_of(find_rule("eval-mode"))


def test_points_that_depend_on_the_kind_of_finding() -> None:
    """One rule may see several things: what is tried depends on which."""
    sorted_ = told("constant-batch", subject=("targets",))
    assert "sorted-data" in sorted_
    assert not {"shared-buffer", "missing-files"} & sorted_
    assert {"shared-buffer", "missing-files"} <= told("constant-batch", subject=("batch",))
    assert "targets-outside" in told("label-range", {"share": 0.1})
    assert "labels-from-zero" in told("label-range")
    assert "cleared-gradients" in told("missing-gradient", {"num_parameters": 6.0}, num_parameters=6)
    part = told("missing-gradient", {"num_parameters": 2.0}, num_parameters=6)
    assert {"cut-off", "unused-head"} <= part
    assert "cleared-gradients" not in part
    assert "sign-of-the-loss" in told("diverging-loss", {}, first_loss=2.0, best_loss=0.1)
    assert "sign-of-the-loss" not in told("diverging-loss", {"best": 0.1}, first_loss=2.0, best_loss=0.1)
    known = {"clipping": True, "step": 900, "first_loss": 2.0, "best_loss": 0.1}
    assert "which-rose-first" in told("diverging-loss", {"best": 0.1, "onset": 40.0}, **known)
    assert "which-rose-first" not in told("diverging-loss", {})
    assert "before-the-onset" in told("diverging-loss", {"best": 0.1, "onset": 40.0}, clipping=True, step=900)


def test_points_that_depend_on_precision_mode_and_optimizer() -> None:
    assert "float16-weights" in told("nonfinite-weight", float16_weights=True, mode="act")
    assert "float16-weights" not in told("nonfinite-weight")
    assert "float16-validation" in told("nonfinite-validation", float16=True)
    assert "float16-validation" not in told("nonfinite-validation")
    assert "bfloat16-rounding" in told("weights-unchanged", bfloat16_weights=True)
    assert "bfloat16-rounding" not in told("weights-unchanged")
    assert "collapsed-after-divergence" in told("scale-collapse", float16=True, scaler=True, loss_rises=True)
    assert "collapsed-after-divergence" not in told("scale-collapse", float16=True, scaler=True)
    assert "reject" in told("nonfinite-optimizer-state", mode="observe")
    assert "reject" not in told("nonfinite-optimizer-state", mode="advise")
    assert "unscale-first" in told("chronic-clipping", scaler=True)
    assert "unscale-first" not in told("chronic-clipping")
    assert "beta2" in told("weight-jump", adam=True, norm=10.0, usual_norm=1.0, clipping=True)
    assert "beta2" not in told("weight-jump", norm=10.0, usual_norm=1.0, clipping=True)
    assert "let-the-guard-clip" in told("clip-before-unscale", {"threshold": 0.5})
    assert "divide-micro-batches" in told("accumulation-not-divided", {"num_backwards": 4.0})
    assert "raise-weight-decay" in told("overfitting", remedies=frozenset({"raise_weight_decay"}))
    assert "raise-weight-decay" not in told("overfitting", remedies=frozenset({"raise_weight_decay"}), mode="act")


def test_points_that_depend_on_what_was_not_finite_first() -> None:
    finite = [*calm(), at(60, grad_norm=math.nan, nonfinite_grads=1.0, rejected=1.0)]
    found = given("nonfinite-gradient", finite)
    assert found.advice[0].startswith("Put an epsilon inside")
    assert "finite-loss" in found.ids
    assert "loss-first" not in found.ids
    both = given("nonfinite-gradient", [*calm(), at(60, loss=math.nan, grad_norm=math.nan, nonfinite_grads=1.0)])
    assert both.advice[0].startswith("Look at the loss first")
    assert "loss-first" in both.ids
    bad = [*calm(), at(60, loss=math.nan, grad_norm=math.nan, nonfinite_grads=1.0, in_bad=1.0)]
    assert "bad-batch" in given("nonfinite-gradient", bad).ids
    assert not {"finite-loss", "loss-first"} & given("nonfinite-gradient", bad).ids


def test_recommendations_for_a_finding_are_in_their_order() -> None:
    ranks = [one.rank for one in recommendations_for("exploding-gradient")]
    assert ranks == sorted(ranks)
    assert recommendations_for("eval-mode") == ()


def test_the_page_on_advice_is_up_to_date() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "advice.md").read_text(encoding="utf-8")
    table = page.partition("<!-- advice:begin -->\n")[2].partition("\n<!-- advice:end -->")[0]
    assert table == as_markdown(), "print as_markdown() into docs/how-to/advice.md, as the page says"
