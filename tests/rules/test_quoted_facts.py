"""What a finding says of the past is what the record shows: recomputed here from nothing but the samples."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.test_each_rule import CASES, TROUBLES, Case, at, named
from trimtab.core.config import Config
from trimtab.core.pipeline import Brain
from trimtab.core.registry import all_rules, find_rule
from trimtab.core.types import Finding, Sample

QUOTED = ("loss", "grad_norm", "in_rms", "update_ratio")
RANGE = re.compile(r"\(usually (\S+), at most (\S+) in (?:the last (\d+)|(\d+) of the last (\d+)) steps")


def stormy(seed: int) -> list[Sample]:
    """A run with jumps, bursts and non-finite values in every scalar, and validations in between."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(30, 200))
    columns: dict[str, list[float]] = {}
    for name, usual in zip(QUOTED, (2.0, 0.5, 1.0, 1e-3), strict=True):
        values = usual * np.exp(rng.normal(0, 0.1, num)) * np.exp(-rng.uniform(0, 2) * np.arange(num) / num)
        for _ in range(int(rng.integers(1, 5))):
            start, length = int(rng.integers(15, num)), int(rng.integers(1, 20))
            bad = rng.choice([math.nan, math.inf, 30.0, 300.0, 1e4])
            values[start : start + length] = bad if not math.isfinite(bad) else values[start : start + length] * bad
        columns[name] = [float(v) for v in values]
    history: list[Sample] = []
    for step in range(num):
        scalars: dict[str, float | None] = {name: values[step] for name, values in columns.items()}
        if rng.random() < 0.1:
            scalars[str(rng.choice(QUOTED))] = None
        history.append(at(step, **scalars))
        if step % 7 == 6:
            worth = float(rng.choice([1.0, 1.0, 1.0, math.nan])) * (1.0 + 0.02 * step)
            history.append(at(step, phase="val", val_loss=worth))
    return history


def findings_in(history: list[Sample], *codes: str) -> list[tuple[Finding, list[Sample]]]:
    """Every finding, with the samples before the one that it is about."""
    brain = Brain(tuple(find_rule(code)() for code in codes), None)
    return [
        (finding, history[:place])
        for place, sample in enumerate(history)
        for finding in brain.advance(sample, seen_at=sample.step)[0].findings
    ]


def finite(samples: list[Sample], name: str) -> list[tuple[float, int]]:
    return [(v, s.step) for s in samples if (v := s.scalars.get(name)) is not None and math.isfinite(v)]


@pytest.mark.parametrize(
    ("code", "name"),
    [("LOSS002", "loss"), ("GRAD002", "grad_norm"), ("DATA002", "in_rms"), ("WGT003", "update_ratio")],
)
def test_usual_and_highest_are_those_of_the_steps_before(code: str, name: str) -> None:
    num = 0
    for seed in range(60):
        for finding, before in findings_in(stormy(seed), code):
            past = [s for s in before if s.phase == "train"][-64:]
            values = [v for v, _ in finite(past, name)]
            quoted = RANGE.search(finding.message)
            assert quoted, finding.message
            assert quoted[1] == f"{median(values):.4g}"
            assert quoted[2] == f"{max(values):.4g}"
            assert int(quoted[3] or quoted[4]) == len(values)
            assert int(quoted[3] or quoted[5]) == len(past)
            assert finding.evidence["usual"] == median(values)
            assert finding.evidence["highest"] == max(values)
            num += 1
    assert num > 20


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_last_finite_loss_is_the_last_finite_loss(seed: int) -> None:
    # Other rules alarm as well: what a detector leaves out of its history must not be left out of the facts.
    for finding, before in findings_in(stormy(seed), "LOSS001", "LOSS002", "GRAD002", "LOSS007"):
        losses, validations = finite(before, "loss"), finite(before, "val_loss")
        if finding.name == "nonfinite-loss":
            last = f"; the last finite loss was {losses[-1][0]:.4g}, at step {losses[-1][1]}." if losses else "."
            assert finding.message.partition(" The update")[0].endswith(last)
        if finding.name == "nonfinite-validation":
            for text, known in (
                ("the last finite one was", validations),
                ("the last finite training loss", losses),
            ):
                told = f"{text} {known[-1][0]:.4g}, at step {known[-1][1]}" if known else ""
                assert told in finding.message
                assert (text in finding.message) is bool(known)


def test_the_first_loss_is_that_of_the_first_step() -> None:
    for seed in range(40):
        for finding, before in findings_in(stormy(seed), "LOSS002"):
            value, step = finite(before, "loss")[0]
            assert f"; {value:.4g} at step {step})" in finding.message


def test_the_best_validation_is_named_with_its_step_although_others_failed() -> None:
    worth = [3.0, 2.0, 1.0, math.nan, 1.4, math.nan, 1.6, 1.8, 2.0, 2.2]
    history = [
        one
        for i, v in enumerate(worth)
        for one in (*(at(10 * i + k, loss=3.0 - 0.2 * i) for k in range(10)), at(10 * i + 9, phase="val", val_loss=v))
    ]
    (first, _), *_ = findings_in(history, "LOSS006")
    assert "its best was 1, at step 29." in first.message
    assert first.evidence["best_step"] == 29


def test_clipped_steps_are_counted() -> None:
    coefs = [1e-3] * 19 + [1.0]
    (first, _), *_ = findings_in([at(i, clip_coef=coefs[i % 20], grad_norm=1e3) for i in range(60)], "GRAD007")
    assert "clipped in 19 of the last 20 steps" in first.message


def test_a_detector_that_leaves_alarms_out_still_quotes_them() -> None:
    history = [at(i) for i in range(60)]
    history += [at(60, grad_norm=5e4), *(at(i) for i in range(61, 64)), at(64, grad_norm=2e4)]
    (_, _), (second, _) = findings_in(history, "GRAD002")
    assert "usually 1, at most 5e+04 in the last 64 steps" in second.message


def test_what_is_known_survives_a_saved_state() -> None:
    history = [*(at(i, loss=2.0 - 0.01 * i) for i in range(40)), at(40, loss=math.nan)]
    brain = Brain((find_rule("LOSS001")(),), None)
    for sample in history[:-1]:
        brain.advance(sample, seen_at=sample.step)
    other = Brain((find_rule("LOSS001")(),), None)
    other.load_state_dict(brain.state_dict())
    verdict, _ = other.advance(history[-1], seen_at=40)
    assert "the last finite loss was 1.61, at step 39" in verdict.findings[0].message


# -- nothing that is not known is quoted -------------------------------------------------------------------------------


def without(sample: Sample, *names: str) -> Sample:
    return replace(sample, scalars={k: v for k, v in sample.scalars.items() if k.partition("/")[0] not in names})


@pytest.mark.parametrize("left_out", [(), ("lr",), ("update_ratio",), ("loss",), ("grad_norm",)], ids="".join)
def test_no_message_quotes_a_number_that_is_not_known(left_out: tuple[str, ...]) -> None:
    """A value that was not measured is left out of the sentence, not written as nan."""
    for case in CASES:
        brain = Brain(tuple(rule() for rule in all_rules()), None)
        for full in case.history:
            sample = without(full, *left_out)
            for finding in brain.advance(sample, seen_at=sample.step)[0].findings:
                told = [str(v) for v in sample.scalars.values() if not math.isfinite(v)]
                said = re.findall(r"(?<![\w.])(?:nan|-?inf)\b", finding.message)
                assert set(said) <= set(told), f"{named(case)}: {finding}"


@pytest.mark.parametrize("case", TROUBLES, ids=named)
def test_every_number_in_a_message_is_evidence_or_was_sampled(case: Case) -> None:
    """Each number with a decimal point or an exponent is one of the finding's own, or one that a sample holds."""
    brain = Brain.from_config(Config.from_dict({"select": [case.code]}))
    seen: list[Sample] = []
    for sample in case.history:
        seen.append(sample)
        for finding in brain.advance(sample, seen_at=sample.step)[0].findings:
            known = {*finding.evidence.values(), *(v for s in seen for v in s.scalars.values())}
            known |= {v * w for v in finding.evidence.values() for w in (100.0, -1.0)}  # shares are shown in per cent
            known |= {1.0 / v for v in finding.evidence.values() if v}
            known |= {median([v for v, _ in finite(seen[:n], "loss")][-9:]) for n in range(1, len(seen))}
            text = re.sub(r"^.*Error: .*$", "", finding.message)
            for number in re.findall(r"(?<![\w.])\d+\.\d+(?:e[+-]?\d+)?", text):
                value, digits = float(number), len(re.sub(r"e.*", "", number).replace(".", "").lstrip("0"))
                close = 0.51 * 10.0 ** (math.floor(math.log10(abs(value) or 1.0)) - digits + 1)
                assert any(abs(value - v) <= close for v in known if math.isfinite(v)), (
                    f"{number} in: {finding.message}"
                )
