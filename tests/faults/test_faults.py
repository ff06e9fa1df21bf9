"""Every fault is found, named rightly, and not before it began: one family each here, all of them in the benchmark.

Each time one fault for each name runs; `pytest -m long` runs the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tests.faults.base import Run
from tests.faults.families import FAMILIES
from tests.faults.faults import FAULTS
from tests.faults.harness import harmful, run_case, run_unguarded
from tests.faults.inject import ALL, body, head, weight
from tests.matrix import sampled

CHEAP = ("mlp", "cnn", "contrastive")
PLACE = {name: i for i, name in enumerate(FAULTS)}
CHOSEN = {  # where the fault shows best: elsewhere the optimizer or BatchNorm makes up for it
    "rate-tenfold": "cnn",
    "accumulation-not-divided": "mlp",
    "gradient-thousandfold": "cnn",
    "clipped-to-nothing": "cnn",
    "clip-before-unscale": "cnn",
    "trunk-unfrozen-too-fast": "cnn",
    "moments-scaled": "cnn",
    "outlier-sample": "cnn",
    "momentum-oscillates": "segment",
    "negative-weight-decay": "cnn",
}
CANONICAL = """
    nonfinite-gradient exploding-gradient vanishing-gradient zero-gradient missing-gradient stale-gradient
    chronic-clipping nonfinite-loss loss-spike diverging-loss not-learning oscillating-loss overfitting
    nonfinite-validation nonfinite-weight nonfinite-buffer weight-jump weight-corrupted untied-weights update-ratio
    weights-unchanged double-step dead-units saturated-units collapsed-output scale-collapse gradient-underflow
    clip-before-unscale needless-scaler learning-rate optimizer-misses-parameters stale-optimizer
    nonfinite-optimizer-state optimizer-state-lost accumulation-not-divided eval-mode no-grad nonfinite-ema
    ema-not-moving nonfinite-input outlier-batch constant-batch repeated-batch empty-batch label-range
    targets-do-not-predict data-replayed temperature-runaway modality-collapse step-exception loss-unbounded
    gradients-dropped logits-out-of-range softmax-twice wrong-output-activation dropout-too-high identical-units
    decay-too-high optimizer-settings representation-collapsed updates-lost double-backward
    gradient-reversed initial-weights inputs-out-of-range repeated-rows loss-broadcast judge-wins activation-missing
"""


def family_of(name: str) -> str:
    """One of a fault's families: most often a cheap one, now and then any."""
    families = FAULTS[name].families
    cheap = tuple(family for family in families if family in CHEAP)
    options = families if PLACE[name] % 7 == 0 or not cheap else cheap
    return CHOSEN.get(name, options[PLACE[name] % len(options)])


def one_for_each_name() -> set[str]:
    """For each name that a finding may have the first fault that it is the best name of, in a cheap family if any."""
    chosen: dict[str, str] = {}
    for name in sorted(FAULTS, key=lambda name: family_of(name) not in CHEAP):
        chosen.setdefault(FAULTS[name].names[0], name)
    return set(chosen.values())


@pytest.mark.parametrize("name", sampled(list(FAULTS), one_for_each_name()))
def test_fault_is_found_and_named(name: str) -> None:
    case, family = FAULTS[name], family_of(name)
    run = run_case(case, family, 0)
    assert run.guard is not None
    found = [(finding.step, finding.name) for finding in run.guard.findings]
    assert harmful(run), f"{name} does no harm on {family}"
    assert [one for one in found if one[0] < case.onset] == []
    assert {one for _, one in found} & set(case.names), f"{name} on {family}: found {found}"


def counts(run: Run) -> set[int]:
    """How many steps the optimizer has made, by its own count."""
    return {int(state["step"]) for state in run.optimizer.state.values()}


def moved(run: Run, tensor: torch.Tensor) -> bool:
    """Whether a parameter is another than at the start."""
    fresh = dict(FAMILIES[run.task.family](run.seed).model.named_parameters())
    name = next(name for name, param in run.model.named_parameters() if param is tensor)
    return not torch.equal(fresh[name], tensor)


EFFECTS: dict[str, tuple[str, Callable[[Run], bool]]] = {
    "nan-in-loss-only": ("mlp", lambda run: math.isnan(run.losses[60]) and math.isfinite(sum(run.losses[61:]))),
    "nan-in-batchnorm": ("cnn", lambda run: any(b.isnan().any() for b in run.model.buffers())),
    "root-of-zero-backward": ("mlp", lambda run: math.isfinite(run.losses[60]) and math.isnan(run.losses[61])),
    "where-hides-nan": ("mlp", lambda run: math.isfinite(run.losses[60]) and math.isnan(run.losses[61])),
    "fp16-gradients-underflow": ("mlp", lambda run: run.losses[-1] > 0.9 * run.losses[0]),
    "scale-collapses": ("mlp", lambda run: run.scaler is not None and run.scaler.get_scale() < 1e-9),
    "scale-collapses-quietly": ("mlp", lambda run: run.scaler is not None and run.scaler.get_scale() < 1e-9),
    "bf16-weights-swallow-updates": ("mlp", lambda run: run.losses[-1] > 0.9 * run.losses[0]),
    "schedule-ends-too-early": ("mlp", lambda run: run.optimizer.param_groups[0]["lr"] == 0),
    "loss-negated": ("mlp", lambda run: run.losses[-1] < -1000),
    "clipped-to-nothing": ("cnn", lambda run: run.losses[-1] > 1),
    "temperature-runs-away": ("contrastive", lambda run: float(run.model.get_parameter("logit_scale").detach()) > 10),
    "temperature-decays": ("contrastive", lambda run: abs(float(run.model.get_parameter("logit_scale").detach())) < 1),
    "zero-grad-forgotten": ("mlp", lambda run: weight(run).grad is not None),
    "stepped-twice": ("mlp", lambda run: counts(run) == {320}),
    "stepped-twice-from-midway": ("mlp", lambda run: counts(run) == {260}),
    "eval-mode-left-on": ("cnn", lambda run: not run.model.training),
    "trunk-under-no-grad": ("mlp", lambda run: not moved(run, weight(run))),
    "detached-in-the-middle": ("mlp", lambda run: not moved(run, weight(run))),
    "loss-detached": ("mlp", lambda run: not any(moved(run, p) for p in run.model.parameters())),
    "zero-grad-before-step": ("mlp", lambda run: not run.optimizer.state),
    "optimizer-built-too-early": ("mlp", lambda run: not mine(run, head(run))),
    "head-replaced-midway": ("mlp", lambda run: not mine(run, head(run))),
    "half-of-the-parameters": ("mlp", lambda run: not moved(run, next(run.model.parameters()))),
    "head-only-by-mistake": ("mlp", lambda run: not mine(run, body(run)) and mine(run, head(run))),
    "tied-head-broken": ("lm", lambda run: run.model.head.weight is not run.model.embed.weight),
    "ema-decay-one": ("mlp", lambda run: not any_moved(run)),
    "ema-poisoned": ("mlp", lambda run: any(p.isnan().any() for p in run.ema.parameters()) and run.losses[-1] < 1),
    "optimizer-state-cleared": ("mlp", lambda run: counts(run) == {100}),
    "same-batch-again": ("mlp", lambda run: run.losses[-1] < 0.01),
}


def mine(run: Run, module: torch.nn.Module) -> bool:
    """Whether the optimizer moves the parameters of a module."""
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    return all(id(p) in held for p in module.parameters())


def any_moved(run: Run) -> bool:
    """Whether the average is another than after the first step."""
    case = FAULTS["ema-decay-one"]
    short = run_unguarded(type(case)(**{**vars(case), "steps": 1}), run.task.family, run.seed)
    pairs = zip(short.ema.module.parameters(), run.ema.module.parameters(), strict=True)
    return any(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", sampled(list(EFFECTS), list(EFFECTS)[::4]))
def test_fault_does_what_it_says(name: str) -> None:
    family, holds = EFFECTS[name]
    assert holds(run_unguarded(FAULTS[name], family, 0))


@pytest.mark.parametrize("family", sampled(list(FAMILIES), CHEAP))
def test_family_learns_and_gives_the_same_batch_twice(family: str) -> None:
    one, two = FAMILIES[family](3), FAMILIES[family](3)
    for step, micro in ((0, 0), (7, 1), (150, 0)):
        assert all(torch.equal(a, b) for a, b in zip(one.batch(step, micro), two.batch(step, micro), strict=True))
    assert not torch.equal(one.batch(0, 0)[0], one.batch(0, 1)[0])
    assert not torch.equal(one.batch(0, 0)[0], one.batch(1, 0)[0])
    losses = run_unguarded(type(FAULTS["nan-sample"])("clean", "healthy"), family, 3).losses
    assert sum(losses[-10:]) / 10 < 0.7 * losses[0]


def test_faults_are_complete() -> None:
    assert tuple(FAMILIES) == ALL
    assert len(FAULTS) >= 60
    accepted = {name for case in FAULTS.values() for name in case.names}
    assert accepted == set(CANONICAL.split())
    best = {case.names[0] for case in FAULTS.values()}
    assert len(best) >= 40, "most names are the best one for some fault"
    for case in FAULTS.values():
        assert case.group in {"numerics", "dynamics", "wiring", "amp", "data", "state"}
        assert case.kind in {"nonfinite", "abrupt", "wiring", "drift"}
        assert case.families
        assert set(case.families) <= set(ALL)
        assert case.doc
    assert set(Counter(family for case in FAULTS.values() for family in case.families)) == set(ALL)
