"""The tables: every fault under every schedule, guarded, unguarded, and with the documented factors after an epoch."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from recipes_claims import Claim, Found, Judged, Table, at_least, by_seed, claim, equal, span, told
from recipes_jobs import Job

SCHEDULES = ("none", "onecycle", "cosine", "cosine_restart", "step", "exponential", "plateau", "lambda")
FAULTS = {  # what the guard does about each, and the documented issue and factor
    "nan-features": (r"\(LR multiplier 1 -> 0\.5\b", "train_loss_nan_inf", 0.5),
    "label-1e9": (r"\(LR multiplier 1 -> 0\.5\b", "loss_explosion", 0.1),
    "lr-x1000": (r"rewind \(|roll the weights back", "loss_explosion", 0.1),
    "nan-validation": (r"\(LR multiplier 1 -> 0\.5\b", "val_loss_nan_inf", 0.5),
    "tiny-data": (r"raise_weight_decay \(weight decay 0\.0001 -> 0\.00015\)", "overfitting", 1.5),
}
HARMFUL = {"nan-features": "features of NaN", "label-1e9": "a label of 1e9", "lr-x1000": "a rate 1000 times too high"}
SHORT = 16
"""Epochs of the runs that show a documented factor: no schedule has slowed down much by the fifth, when faults come."""
NUM_SEEDS = 2
"""Every fault under every schedule is many runs: so many seeds, the default one among them."""
KEPT = 2
"""So many epochs later no schedule may have undone it."""


def jobs(seeds: Sequence[int], *, quick: bool) -> Iterator[Job]:
    """One job for each schedule and seed."""
    for seed in seeds[:NUM_SEEDS]:
        for schedule in SCHEDULES:
            base = {"recipe": "tabular", "seed": seed, "quick": quick, "scheduler": schedule}
            short = {**base, "epochs": SHORT, "actions": "documented"}
            runs: dict[str, Any] = {"clean": base, "short clean": short}
            for fault in FAULTS:
                runs[f"{fault} guarded"] = {**base, "fault": fault}
                runs[f"{fault} unguarded"] = {**base, "fault": fault, "guarded": False}
                if fault != "tiny-data":
                    runs[f"{fault} documented"] = {**short, "fault": fault}
            yield Job(section="tabular", name=f"{schedule}/{seed}", kind="several", spec={"runs": runs})


def judge(found: Found, seeds: Sequence[int], *, quick: bool) -> Judged:
    """What must be shown of it."""
    seeds = seeds[:NUM_SEEDS]

    def each(fault: str, seed: int, value: Any) -> list[Any]:
        return [value(fault, found.get(f"{schedule}/{seed}", default={})) for schedule in SCHEDULES]

    def scores(arm: str) -> str:
        return span(found.get(f"{schedule}/{seed}", arm, "score") for schedule in SCHEDULES for seed in seeds)

    every, most = equal(len(SCHEDULES)), ("more than half", lambda num: num > len(SCHEDULES) / 2)
    claims: list[Claim] = [
        claim(
            "R2 of the clean run, lowest of the schedules",
            by_seed(seeds, lambda seed: min(each("", seed, lambda _, runs: _score(runs, "clean")))),
        ),
        claim(
            "findings on the clean runs",
            by_seed(seeds, lambda seed: sum(each("", seed, lambda _, runs: _num_findings(runs, "clean")))),
            equal(0),
        ),
    ]
    rows = []
    for fault, (_, issue, factor) in FAULTS.items():

        def count(test: Callable[[str, Any], Any], fault: str = fault) -> dict[str, Any]:
            return by_seed(seeds, lambda seed: sum(each(fault, seed, test)))

        claims.append(claim(f"{fault}: answered by the guard, of 8 schedules", count(_answered), every))
        if fault == "tiny-data":
            gap = by_seed(seeds, lambda seed: statistics.median(each("tiny-data", seed, _gain)))
            claims.append(claim("tiny-data: R2 guarded minus unguarded, median of the schedules", gap))
            continue
        lowest = by_seed(seeds, lambda seed, fault=fault: min(each(fault, seed, _ratio)))  # type: ignore[misc]
        claims.append(claim(f"{fault}: guarded R2 / clean R2, lowest of the schedules", lowest, at_least(0.95)))
        if fault in HARMFUL:
            claims.append(claim(f"{fault}: unguarded fails, of 8 schedules", count(_fails), most))
        what = f"{fault}: `--actions documented` sees `{issue}`, rate x{factor:g} and kept, of 8 schedules"
        claims.append(claim(what, count(_documented), every))
        rows.append([fault, *(_cell(fault, found, seeds, schedule) for schedule in SCHEDULES)])
    return Judged(
        title="tabular: an MLP on the raw diabetes table",
        about=f"{'12' if quick else '40'} epochs, eight schedules, five faults, 88 rows held out; one thread.",
        claims=claims,
        summary=[
            ["R2, eight schedules", scores("clean"), words, scores(f"{fault} guarded"), scores(f"{fault} unguarded")]
            for fault, words in HARMFUL.items()
        ],
        tables=[
            Table(
                title="Guarded and unguarded R2 as shares of the clean run's, median of all seeds",
                head=["fault", *SCHEDULES],
                rows=rows,
            )
        ],
        notes=[
            "Answered by the guard: the rate halved (nan-features, label-1e9, nan-validation), back to before the "
            "trouble (lr-x1000), weight decay times 1.5 (tiny-data). An unguarded run has failed when its R2 is below "
            "half of the clean one's, or NaN. No control has to fail for one validation of NaN, which harms nobody who "
            "does not look at it, nor for 48 rows, which teach no more under a guard than without one.",
        ],
    )


def _score(runs: Any, name: str) -> float:
    score = runs.get(name, {}).get("score", math.nan)
    return score if math.isfinite(score) else -math.inf


def _num_findings(runs: Any, name: str) -> int:
    return len(runs.get(name, {}).get("findings", ("not run",)))


def _answered(fault: str, runs: Any) -> bool:
    return any(re.search(FAULTS[fault][0], line) for line in runs.get(f"{fault} guarded", {}).get("actions", ()))


def _ratio(fault: str, runs: Any, arm: str = "guarded") -> float:
    return _score(runs, f"{fault} {arm}") / _score(runs, "clean")


def _gain(fault: str, runs: Any) -> float:
    return _score(runs, f"{fault} guarded") - _score(runs, f"{fault} unguarded")


def _fails(fault: str, runs: Any) -> bool:
    run = runs.get(f"{fault} unguarded")
    return run is not None and (not run["finite"] or not _ratio(fault, runs, "unguarded") >= 0.5)


def _documented(fault: str, runs: Any) -> bool:
    """The issue was seen, and for two more epochs the rate is at most the clean one times the factor."""
    run, clean = runs.get(f"{fault} documented"), runs.get("short clean")
    if run is None or clean is None:
        return False
    _, name, factor = FAULTS[fault]
    epochs = [epoch for epoch, issues in enumerate(run["issues"]) if name in issues]
    answered = [line for line in run["actions"] if f"LR multiplier 1 -> {factor:g}," in line]
    if not epochs or not answered or len(run["rates"]) <= epochs[0]:
        return False
    kept = zip(run["rates"][epochs[0] :], clean["rates"][epochs[0] :], strict=True)
    return all(rate <= factor * other * (1 + 1e-6) for rate, other in list(kept)[: KEPT + 1])


def _cell(fault: str, found: Found, seeds: Sequence[int], schedule: str) -> str:
    all_runs = [found.get(f"{schedule}/{seed}", default={}) for seed in seeds]
    held = statistics.median(_ratio(fault, runs) for runs in all_runs)
    bare = statistics.median(_ratio(fault, runs, "unguarded") for runs in all_runs)
    dead = sum(not runs.get(f"{fault} unguarded", {"finite": True})["finite"] for runs in all_runs)
    return f"{told(held)} / {'NaN' if dead > len(all_runs) / 2 else told(bare)}"
