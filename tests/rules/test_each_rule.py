"""Every rule on a small history that shows its trouble, and on near-misses that do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from trimtab.core.pipeline import Brain
from trimtab.core.registry import advice_of, all_rules, find_rule
from trimtab.core.types import ABSENT, FROZEN, FULL_COLUMNS, NORM_COLUMNS, Column, Finding, Kind, Layout, Sample

TESTED_ELSEWHERE = {"ACT002"}
WITHOUT_NUMBERS = {"AMP004", "LOSS010", "LOSS011"}  # says everything in its message

NAMES = ("stem.weight", "layers.0.weight", "layers.1.weight", "layers.2.weight", "layers.3.weight", "head.weight")
NUMEL = (1024,) * 6
History = list[Sample]


def layout_of(names: tuple[str, ...] = NAMES, numel: tuple[int, ...] = NUMEL, optimizer: str = "") -> Layout:
    return Layout(names=names, kinds=(Kind.GRAD,) * len(names), numel=numel, columns=NORM_COLUMNS, optimizer=optimizer)


NORMS = layout_of()
LABELLED = layout_of(optimizer="generator")
NO_ROWS = Layout(names=(), kinds=(), numel=(), columns=())
FULL = Layout(
    names=NAMES + NAMES + ("bn.running_var",),
    kinds=(Kind.GRAD,) * 6 + (Kind.WEIGHT,) * 6 + (Kind.BUFFER,),
    numel=NUMEL + NUMEL + (16,),
    columns=FULL_COLUMNS,
)


def at(
    step: int,
    norms: tuple[float, ...] = (1.0,) * 6,
    *,
    layout: Layout = NORMS,
    phase: str = "train",
    notes: dict[str, tuple[str, ...]] | None = None,
    **scalars: float | None,
) -> Sample:
    """One step as a healthy run has it, but for what is said otherwise; None takes a scalar away."""
    usual = {"loss": 1.0, "grad_norm": 1.0, "lr/0": 0.1, "update_ratio": 1e-3, "fixed": 1.0} if phase == "train" else {}
    told = {k.replace("__", "/"): v for k, v in scalars.items()}
    known = {k: float(v) for k, v in (usual | told).items() if v is not None}
    table = np.array(norms, np.float32).reshape(-1, 1)[: len(layout.names)]
    return Sample(step=step, layout=layout, table=table, scalars=known, phase=phase, notes=notes or {})


def thorough(step: int, cells: dict[tuple[int, Column], float], **scalars: float | None) -> Sample:
    """A step with all columns; rows 0 to 5 are gradients, 6 to 11 weights, 12 a buffer."""
    table = np.zeros((len(FULL.names), len(FULL_COLUMNS)), np.float32)
    table[:, FULL_COLUMNS.index(Column.L2)] = 1.0
    for (row, column), value in cells.items():
        table[row, FULL_COLUMNS.index(column)] = value
    plain = at(step, weight_norm=10.0, **scalars)  # type: ignore[arg-type]
    return Sample(step=step, layout=FULL, table=table, scalars=plain.scalars)


def steps(num: int, make: Callable[[int], Sample], start: int = 0) -> History:
    return [make(i) for i in range(start, start + num)]


def noise(seed: int, num: int, scale: float = 1.0) -> list[float]:
    return [float(v) for v in np.random.default_rng(seed).normal(0.0, scale, size=num)]


def calm(num: int = 10, **scalars: float) -> History:
    return steps(num, lambda i: at(i, **scalars))


def sure(num: int, **scalars: float) -> History:
    return steps(num, lambda i: at(i, judge_sure=i / 20 if i and i % 20 == 0 else None, **scalars))


@dataclass(frozen=True)
class Case:
    code: str
    label: str
    history: History
    begins: int | None = None
    """The step of the trouble: a finding must come there or later. None for a near-miss."""
    subject: tuple[str, ...] = field(default=())


def trouble(code: str, label: str, history: History, begins: int, *subject: str) -> Case:
    return Case(code, label, history, begins, subject)


def healthy(code: str, label: str, history: History) -> Case:
    return Case(code, label, history)


def found_by(code: str, history: History) -> list[Finding]:
    brain = Brain((find_rule(code)(),), None)
    out: list[Finding] = []
    for sample in history:
        verdict, _ = brain.advance(sample, seen_at=sample.step)
        assert all(f.step == sample.step for f in verdict.findings)
        out += verdict.findings
    assert brain._broken == set()
    return out


def collapsed(num: int, *, varied: float = 0.0, share: float = 0.4) -> History:
    """So many looks in a row, 20 steps apart, at a layer whose input is the same for all samples."""
    notes = {"same_input": ("layers.2",)}
    looks = {10 + 20 * i: float(i + 1) for i in range(num + 1)}
    return [
        at(i, same_input=looks[i], same_input_share=share, same_input_varied=varied, notes=notes)
        if looks.get(i, 0.0) >= 2.0 and looks[i] <= num
        else at(i)
        for i in range(120)
    ]


def shrinking(left: float, **settings: float) -> History:
    """Two thorough looks, 50 steps apart, with what is left of the weights at the second one."""
    first = thorough(0, {}, **settings)
    second = thorough(50, {}, **settings)
    scalars = {**second.scalars, "weight_norm": 10.0 * left}
    return [first, *steps(49, at, start=1), replace(second, scalars=scalars)]


def sized(**scalars: float) -> History:
    facts = "layer_input", "data_size", "data_least", "data_offset"
    return [*calm(), at(10, notes=dict.fromkeys(facts, ("layers.0",)), **scalars)]


ASLEEP = {"asleep": ("layers.1",)}


# -- data ----------------------------------------------------------------------------------------------------------

PARTS = {"eval_parts": ("trunk.norm", "trunk.drop")}
UNSTEPPED = {"unstepped": ("head.weight",)}
EXCEPTION = {"exception": ("IndexError", "Target 12 is out of bounds.")}
NO_GRAPH = {"exception": ("RuntimeError", "element 0 of tensors does not require grad and does not have a grad_fn")}
WIDE = [10.0**v for v in np.random.default_rng(0).uniform(-3, 3, size=60)]


def rms(values: list[float]) -> History:
    return [at(i, in_rms=v) for i, v in enumerate(values)]


def prints(values: list[float]) -> History:
    return [at(i, in_print=v) for i, v in enumerate(values)]


def few_rows(step: int, **scalars: float) -> Sample:
    return thorough(step, {}, in_print=1.0, **scalars)


USUAL_RMS = [1.0 + 0.05 * v for v in noise(1, 40)]

DATA = [
    trouble("DATA001", "a NaN in the batch", [*calm(), at(10, in_bad=1.0)], 10, "batch"),
    healthy("DATA001", "none", [*calm(), at(10, in_bad=0.0)]),
    trouble("DATA005", "an empty batch", [*calm(), at(10, in_empty=1.0)], 10, "batch"),
    healthy("DATA005", "a full one", [*calm(), at(10, in_empty=0.0)]),
    trouble("DATA006", "a mask of 255", [*calm(), at(10, targets_outside=0.5)], 10, "targets"),
    trouble(
        "DATA006",
        "a class too many",
        [*calm(), at(10, layout=NO_ROWS, phase="error", notes=EXCEPTION, exception=1.0, label_error=1.0)],
        10,
        "targets",
    ),
    healthy("DATA006", "targets of 0 and 1", [*calm(), at(10, targets_outside=0.0)]),
    trouble("DATA002", "raw pixels", rms([*USUAL_RMS, 1e4]), 40, "batch"),
    trouble("DATA002", "an infinite size", rms([*USUAL_RMS, math.inf]), 40, "batch"),
    healthy("DATA002", "twice the size", rms([*USUAL_RMS, 2.0])),
    healthy("DATA002", "too early to tell", rms([*USUAL_RMS[:3], 1e4])),
    healthy("DATA002", "sizes that differ by decades anyway", rms([*WIDE, 20.0 * max(WIDE)])),
    trouble(
        "DATA003",
        "a loader that breaks",
        [*steps(10, lambda i: at(i, in_print=i)), at(10, in_print=99.0, in_flat=1.0)],
        10,
        "batch",
    ),
    trouble("DATA003", "zeros from the start", steps(20, lambda i: at(i, in_print=7.0, in_flat=1.0)), 0, "batch"),
    trouble(
        "DATA003",
        "a loader that sorts by class",
        [*steps(10, lambda i: at(i, target_flat=0.0)), *steps(50, lambda i: at(i, target_flat=1.0), 10)],
        10,
        "targets",
    ),
    trouble(
        "DATA003",
        "one class from the start",
        steps(90, lambda i: at(i, labels_flat=None if i % 20 else 1.0, answer_ratio=None if i % 20 else 1 / (1 + i))),
        40,
        "targets",
    ),
    healthy(
        "DATA003",
        "the positive comes first, as in contrastive losses",
        steps(90, lambda i: at(i, labels_flat=None if i % 20 else 1.0, answer_ratio=None if i % 20 else 0.6)),
    ),
    healthy(
        "DATA003",
        "one batch of one class, late",
        steps(90, lambda i: at(i, labels_flat=1.0 if i == 80 else None, answer_ratio=None if i % 20 else 0.01)),
    ),
    healthy("DATA003", "a few batches of one class", [at(i, target_flat=float(i % 9 < 3)) for i in range(60)]),
    trouble(
        "DATA003",
        "sorted by class",
        steps(100, lambda i: at(i, one_class=i / 20 if i and i % 20 == 0 else None)),
        80,
        "targets",
    ),
    healthy("DATA003", "three looks at one class", [at(i, one_class=None if i % 20 else 3.0) for i in range(60)]),
    healthy("DATA003", "one such batch at the start", [at(0, in_print=1.0, in_flat=1.0), at(1, in_flat=0.0), *calm()]),
    trouble("DATA004", "stuck after batches that differed", prints([*range(20), *[99.0] * 20]), 20, "batch"),
    trouble("DATA004", "a loader that has others", steps(60, lambda i: at(i, in_print=5.0, stuck=i + 1.0)), 2, "batch"),
    trouble(
        "DATA004",
        "three batches again and again",
        [*prints([float(i % 3) for i in range(70)]), thorough(70, {}, in_print=1.0)],
        70,
        "batch",
    ),
    healthy(
        "DATA004",
        "a small set of batches",
        [*prints([float(i % 9) for i in range(70)]), thorough(70, {}, in_print=1.0)],
    ),
    trouble(
        "DATA004",
        "three slices of a much larger tensor",
        [*prints([float(i % 3) for i in range(70)]), few_rows(70, data_rows=96.0, data_covered=0.1)],
        70,
        "batch",
    ),
    trouble(
        "DATA004",
        "three batches that a large model learns by heart",
        [*prints([float(i % 3) for i in range(70)]), few_rows(70, data_rows=1.0)],
        70,
        "batch",
    ),
    healthy(
        "DATA004",
        "a small data set in three slices",
        [*prints([float(i % 3) for i in range(70)]), few_rows(70, data_rows=96.0, data_covered=1.0)],
    ),
    healthy(
        "DATA004",
        "a small data set and a small model",
        [*prints([float(i % 3) for i in range(70)]), few_rows(70, data_rows=1e5)],
    ),
    healthy("DATA004", "one full batch, looked at", [*prints([5.0] * 70), thorough(70, {}, in_print=5.0)]),
    healthy("DATA004", "one full batch from the start", prints([5.0] * 60)),
    healthy("DATA004", "three steps on each batch", prints([float(i // 3) for i in range(60)])),
    healthy("DATA004", "the same batch twice", steps(30, lambda i: at(i, stuck=1.0 + i % 2))),
    trouble("DATA008", "an epoch from its beginning", [*calm(), at(10, replayed=20.0)], 10, "batch"),
    healthy("DATA008", "one batch again", [*calm(), at(10, replayed=1.0)]),
]

CHANCE = 2.3


def at_chance(num: int, *, moving: float, turn: float = 0.0, fall: float = 0.0, floor: float = 0.0) -> History:
    """A loss at the level of guessing, which the levels of a series may fall away from."""
    wobble, turns = noise(3, num, 0.003), noise(4, num, 0.05)
    return [
        at(
            i,
            loss=CHANCE + wobble[i] + 0.01 - fall * i - floor,
            chance=CHANCE,
            update_ratio=moving,
            grad_cos=turn + turns[i],
        )
        for i in range(num)
    ]


LEARNING = [
    trouble("LOSS004", "nothing moves", at_chance(400, moving=1e-8), 20, "loss"),
    healthy("LOSS004", "weights that move", at_chance(400, moving=1e-2)),
    healthy("LOSS004", "below chance", at_chance(400, moving=1e-8, floor=1.0)),
    healthy("LOSS004", "the first steps", at_chance(20, moving=1e-8)),
    healthy("LOSS004", "it learned and forgot", at_chance(100, moving=1e-8, floor=2.0) + at_chance(0, moving=0.0)),
    trouble("DATA007", "shuffled labels", at_chance(600, moving=1e-2), 20, "targets"),
    healthy("DATA007", "gradients that agree", at_chance(600, moving=1e-2, turn=0.7)),
    healthy("DATA007", "weights that stand still", at_chance(600, moving=1e-9)),
    healthy("DATA007", "tokens at the level of guessing, not for long", at_chance(340, moving=1e-2)),
    trouble(
        "DATA007",
        "the same steps of a model that is given no tokens",
        [replace(s, scalars={**s.scalars, "in_rms": 1.0}) for s in at_chance(340, moving=1e-2)],
        20,
        "targets",
    ),
    healthy("DATA007", "far below chance", at_chance(600, moving=1e-2, floor=1.0)),
    healthy("DATA007", "the first steps", at_chance(30, moving=1e-2)),
    healthy(
        "DATA007",
        "still falling towards chance",
        [at(i, loss=9.0 - 0.01 * i, chance=CHANCE, update_ratio=1e-2, grad_cos=0.0) for i in range(500)],
    ),
    healthy(
        "DATA007",
        "it was far below chance once",
        [at(i, loss=CHANCE if i > 60 else 0.5, chance=CHANCE, update_ratio=1e-2, grad_cos=0.0) for i in range(500)],
    ),
    healthy("DATA007", "no chance known", [at(i, chance=0.0, update_ratio=1e-2) for i in range(300)]),
]

# -- wiring --------------------------------------------------------------------------------------------------------

OUTSIDE = {"outside": ("head.weight",), "state_outside": ("head.weight: exp_avg",)}


def changed(num: int, **scalars: float) -> Sample:
    return at(num, notes=OUTSIDE, **scalars)


NONE = (ABSENT,) * 6

WIRING = [
    trouble("WGT004", "a layer re-initialised", [*calm(30), changed(30, outside=2.0)], 30, "head.weight"),
    trouble("WGT004", "moments written", [*calm(30), changed(30, state_outside=9.0)], 30, "head.weight: exp_avg"),
    healthy("WGT004", "a tiny change", [*calm(30), changed(30, outside=1e-5, state_outside=1e-5)]),
    healthy("WGT004", "moments that were lost", [*calm(30), changed(30, state_outside=1.0, state_lost=4.0)]),
    healthy(
        "WGT004",
        "a constraint that acts all the time",
        [changed(i, outside=1e-3 if i < 20 else 0.2, state_outside=1e-3 if i < 20 else 0.5) for i in range(30)],
    ),
    trouble("OPT005", "state cleared", [*calm(), at(10, state_lost=4.0)], 10),
    healthy("OPT005", "state there", [*calm(), at(10, state_lost=0.0)]),
    trouble(
        "OPT004",
        "a NaN moment",
        [*calm(), at(10, state_bad=3.0, notes={"state_bad": ("a: exp_avg",)})],
        10,
        "a: exp_avg",
    ),
    healthy("OPT004", "sound moments", [*calm(), at(10, state_bad=0.0)]),
    trouble("WGT005", "a tie broken", [*calm(), at(10, untied=1.0, notes={"untied": ("a and b",)})], 10, "a and b"),
    healthy("WGT005", "tied", [*calm(), at(10, untied=0.0)]),
    trouble(
        "OPT003",
        "a head replaced",
        [*calm(), at(10, idle=2.0, unheld=2.0, unheld_share=0.1, notes={"unheld": ("head.weight",)})],
        10,
        "head.weight",
    ),
    healthy("OPT003", "old parameters alone", [*calm(), at(10, idle=2.0)]),
    trouble(
        "OPT002",
        "a layer forgotten",
        [*calm(), at(10, unheld=9.0, unheld_share=0.4, notes={"unheld": ("a", "b", "c", "d")})],
        10,
        "a",
        "b",
    ),
    trouble("OPT002", "never stepped", [*calm(), at(10, unstepped=1.0, notes=UNSTEPPED)], 10, "head.weight"),
    healthy("OPT002", "next to nothing", [*calm(), at(10, unheld=1.0, unheld_share=1e-9)]),
    healthy("OPT002", "another rule's business", [*calm(), at(10, unheld=1.0, unheld_share=0.4, idle=1.0)]),
    trouble(
        "MODE002", "a forward under no_grad", steps(6, lambda i: at(i, NONE, no_grad_forward=1, grad_norm=0)), 0, "loss"
    ),
    trouble("MODE002", "a detached loss", steps(6, lambda i: at(i, NONE, loss_detached=1, grad_norm=0)), 0, "loss"),
    trouble(
        "MODE002",
        "an exception that says so",
        [*calm(), at(10, layout=NO_ROWS, phase="error", notes=NO_GRAPH, exception=1.0, no_grad_error=1.0)],
        10,
        "loss",
    ),
    healthy("MODE002", "gradients come from elsewhere", steps(6, lambda i: at(i, loss_detached=1.0))),
    healthy("MODE002", "one step", [*calm(), at(10, NONE, loss_detached=1.0), *steps(5, lambda i: at(i), 11)]),
    trouble(
        "MODE001",
        "after a validation",
        [*calm(), *steps(10, lambda i: at(i, eval_forward=1), 10)],
        10,
        "model.training",
    ),
    trouble(
        "MODE001",
        "a part of the model",
        [*calm(), *steps(60, lambda i: at(i, eval_parts=2.0 if i % 10 == 0 else None, notes=PARTS), 10)],
        10,
        "trunk.norm",
    ),
    healthy("MODE001", "a part in one look", [*calm(), at(10, eval_parts=2.0, notes=PARTS), *calm(5)]),
    healthy("MODE001", "a single look", [*calm(), at(10, eval_forward=1.0), *steps(5, lambda i: at(i), 11)]),
    trouble("GRAD008", "all but the last", steps(12, lambda i: at(i, dropped=3.0)), 2),
    healthy("GRAD008", "now and then", steps(12, lambda i: at(i, dropped=3.0 if i % 3 else None))),
    trouble("GRAD006", "never zeroed", steps(12, lambda i: at(i, carried=1.0)), 0),
    healthy("GRAD006", "always zeroed", steps(12, lambda i: at(i, carried=0.0))),
    healthy("GRAD006", "forgotten once", steps(12, lambda i: at(i, carried=float(i == 5)))),
    healthy("GRAD006", "stepped twice instead", steps(12, lambda i: at(i, carried=1.0, same_gradients=1.0))),
    trouble("UPD003", "every other step", steps(40, lambda i: at(i, same_gradients=float(i % 2))), 1),
    healthy("UPD003", "once in a run", steps(60, lambda i: at(i, same_gradients=float(i == 30)))),
    healthy("UPD003", "rejected ones", steps(40, lambda i: at(i, same_gradients=float(i % 2), rejected=1.0))),
    trouble("OPT006", "four full losses", [at(0, backwards=4, loss_factor=1.0, handed=1.0)], 0),
    trouble("OPT006", "scaled ones", [at(0, backwards=4, loss_factor=1024.0, handed=1.0, scale=1024.0)], 0),
    healthy("OPT006", "divided losses", [at(0, backwards=4, loss_factor=0.25, handed=1.0)]),
    healthy("OPT006", "gradients divided afterwards", [at(0, backwards=4, loss_factor=1.0, handed=0.25)]),
    healthy("OPT006", "one backward", [at(0, backwards=1, loss_factor=1.0, handed=1.0)]),
    trouble(
        "EMA001",
        "a NaN in the average",
        [*calm(), at(10, ema_bad=1.0, notes={"ema_bad": ("head.weight",)})],
        10,
        "head.weight",
    ),
    trouble("EMA001", "seen by its sum alone", [*calm(), at(10, ema_sum=math.nan)], 10),
    healthy("EMA001", "sound", [*calm(), at(10, ema_bad=0.0, ema_sum=3.0)]),
    trouble("EMA002", "never updated", steps(80, lambda i: at(i, ema_still=i + 1.0)), 4, "ema"),
    trouble("EMA002", "a sum that stands still", steps(63, lambda i: at(i, ema_sum=3.0)), 4, "ema"),
    healthy("EMA002", "updated now and then", steps(80, lambda i: at(i, ema_still=float(i % 5)))),
    healthy("EMA002", "a sum that moves", steps(80, lambda i: at(i, ema_sum=3.0 + i % 2))),
    healthy("EMA002", "the model stands still as well", steps(80, lambda i: at(i, ema_still=i, update_ratio=0.0))),
    trouble(
        "STEP001",
        "an exception",
        [*calm(), at(10, layout=NO_ROWS, phase="error", exception=1.0, notes={"exception": ("KeyError", "x")})],
        10,
        "KeyError",
    ),
    healthy("STEP001", "one that has a name", [at(0, layout=NO_ROWS, phase="error", exception=1.0, label_error=1.0)]),
]

# -- mixed precision -----------------------------------------------------------------------------------------------

SCALE = 65536.0


def lost_share(share: float, **scalars: float) -> History:
    cells = {(row, Column.ZERO_FRAC): share for row in range(6)}
    return [thorough(0, cells, autocast=1.0, **scalars)]


PRECISION = [
    trouble("AMP003", "clipped while scaled", steps(20, lambda i: at(i, scale=SCALE, grad_norm=1.0 / SCALE)), 0),
    healthy(
        "AMP003",
        "small gradients that differ",
        steps(20, lambda i: at(i, scale=SCALE, grad_norm=(1.0 + 0.5 * (i % 3)) / SCALE)),
    ),
    healthy("AMP003", "a usual norm", steps(20, lambda i: at(i, scale=SCALE, grad_norm=1.0))),
    healthy("AMP003", "clipped to nothing twice", steps(2, lambda i: at(i, scale=SCALE, grad_norm=1e-5))),
    trouble("AMP004", "no autocast", steps(1001, lambda i: at(i, scale=SCALE, autocast=0.0)), 0),
    trouble("AMP004", "bfloat16", steps(12, lambda i: at(i, scale=SCALE, autocast=2.0)), 0),
    healthy("AMP004", "float16 autocast", steps(12, lambda i: at(i, scale=SCALE, autocast=1.0))),
    healthy("AMP004", "float16 weights", steps(12, lambda i: at(i, scale=SCALE, autocast=0.0, float16=1.0))),
    healthy("AMP004", "one step", [at(0, scale=SCALE, autocast=0.0)]),
    trouble("AMP002", "gradients lost to float16", lost_share(0.95), 0),
    healthy("AMP002", "some zeros", lost_share(0.02)),
    healthy("AMP002", "with a scaler", lost_share(0.95, scale=SCALE)),
    healthy("AMP002", "not measured", [at(0, autocast=1.0)]),
    trouble(
        "AMP001",
        "no scale is small enough",
        [*calm(), *steps(30, lambda i: at(i, scale=2.0 ** (16 - (i - 10)), nonfinite_grads=1, routine_overflow=1), 10)],
        12,
    ),
    healthy(
        "AMP001",
        "a scaler that looks for its scale",
        [at(i, scale=SCALE / 2**i, nonfinite_grads=float(i < 3), routine_overflow=float(i < 3)) for i in range(5)],
    ),
    healthy("AMP001", "without a scaler", steps(30, lambda i: at(i, nonfinite_grads=1.0))),
]

# -- learning rate and updates -------------------------------------------------------------------------------------


def lr(*rates: float, **more: float) -> History:
    return [at(i, **{"lr__0": r, **more}) for i, r in enumerate(rates)]


def held(
    grow: Callable[[int], float],
    *,
    climb: float = 0.0,
    ratio: float = 2e-3,
    before: Callable[[int], float] = lambda i: 1.0,
) -> History:
    """A rate that is held for 100 steps, or what `before` makes of it, and then changes; so does the loss."""
    return [
        at(i, lr__0=1e-3 * by, update_ratio=ratio * by, loss=1.0 + climb * max(i - 120, 0))
        for i in range(220)
        for by in [before(i) if i < 100 else grow(i - 100)]
    ]


RATES = [
    trouble("OPT001", "not a number", [*calm(), at(10, lr__0=math.nan)], 10, "lr"),
    trouble("OPT001", "negative", [*calm(), at(10, lr__0=-0.1)], 10, "lr"),
    trouble("OPT001", "zero from the start", lr(*[0.0] * 60), 2, "lr"),
    trouble("OPT001", "a jump", [*lr(*[0.001] * 30), at(30, lr__0=1.0, update_ratio=0.5)], 30, "lr"),
    trouble(
        "OPT001",
        "a rate that is multiplied at every step",
        [at(i, lr__0=1e-3 * 1.05**i, update_ratio=1e-3 * 1.05**i) for i in range(100)],
        16,
        "lr",
    ),
    trouble(
        "OPT001",
        "the same, seen by the loss",
        [at(i, lr__0=1e-3 * 1.03**i, update_ratio=None, loss=1.0 + 0.001 * max(i - 70, 0) ** 2) for i in range(130)],
        60,
        "lr",
    ),
    healthy(
        "OPT001",
        "a linear warm-up of a large step",
        [at(i, lr__0=1e-3 * (i + 1), update_ratio=1e-3 * (i + 1)) for i in range(200)],
    ),
    healthy(
        "OPT001",
        "one cycle",
        [
            at(i, lr__0=r, update_ratio=r)
            for i in range(200)
            for r in [0.1 * (1.0 - 0.96 * (0.5 + 0.5 * math.cos(math.pi * min(i / 60, (200 - i) / 140))))]
        ],
    ),
    trouble("OPT001", "1 % a step from a rate that was held", held(lambda i: 1.01**i), 100, "lr"),
    trouble("OPT001", "5 % a step from a rate that was held", held(lambda i: 1.05**i), 100, "lr"),
    trouble("OPT001", "a tenth more each step, seen by the loss", held(lambda i: 1 + 0.1 * i, climb=0.02), 120, "lr"),
    trouble("OPT001", "stairs, seen by the loss", held(lambda i: 1.3 ** (i // 5), climb=0.02), 120, "lr"),
    trouble("OPT001", "after a decay", held(lambda i: 1.03**i, before=lambda i: 2.0 - i / 100), 124, "lr"),
    trouble("OPT001", "a tenth more each step without end", held(lambda i: 1 + 0.1 * i), 190, "lr"),
    trouble(
        "OPT001",
        "2 % a step from the start",
        [at(i, lr__0=1.02**i, update_ratio=5e-3 * 1.02**i) for i in range(90)],
        64,
    ),
    healthy("OPT001", "a warm-up by a factor", [at(i, lr__0=1.06**i, update_ratio=2e-5 * 1.06**i) for i in range(118)]),
    healthy("OPT001", "growth to half as much again", held(lambda i: min(1.02**i, 1.45))),
    healthy("OPT001", "growth from a rate that moved nothing", held(lambda i: min(1.05**i, 100.0), ratio=2e-6)),
    healthy("OPT001", "a ramp from a rate that was held", held(lambda i: min(1 + 0.1 * i, 10.0))),
    healthy("OPT001", "a ramp from a rate that moved little", held(lambda i: 1 + 0.4 * i, ratio=5e-4)),
    healthy(
        "OPT001",
        "a cosine ramp from a rate that was held",
        held(lambda i: 13 - 12 * math.cos(min(i / 30, 3.1)), ratio=5e-4),
    ),
    healthy("OPT001", "back to a rate used before", held(lambda i: min(1.05**i, 8.0), before=lambda i: 8.0 - 0.07 * i)),
    healthy("OPT001", "the end of a constant warm-up", lr(*[0.001] * 30, *[0.1] * 9)),
    healthy("OPT001", "a warm-up", lr(*[1e-4 * 1.2**i for i in range(60)])),
    healthy("OPT001", "a restart", lr(*[0.1 * 0.8 ** (i % 30) for i in range(90)])),
    healthy("OPT001", "a schedule that ends at zero", lr(*[0.1] * 50, *[0.0] * 3)),
    healthy("OPT001", "a jump at the very start", lr(1e-6, 1e-6, 0.1)),
    healthy(
        "OPT001",
        "a batch that grew with it",
        [at(i, lr__0=0.001 if i < 30 else 0.1, batch_size=8 if i < 30 else 800) for i in range(60)],
    ),
    healthy("OPT001", "no rates", [at(i, lr__0=None) for i in range(20)]),
    trouble("UPD002", "nothing moves", steps(20, lambda i: at(i, update_ratio=0.0)), 0),
    trouble("UPD002", "looked at now and then", steps(40, lambda i: at(i, update_ratio=None if i % 4 else 0.0)), 8),
    healthy("UPD002", "too few looks", steps(20, lambda i: at(i, update_ratio=None if i % 10 else 0.0))),
    healthy("UPD002", "some looks moved", steps(60, lambda i: at(i, update_ratio=None if i % 4 else i % 3 * 1e-3))),
    healthy("UPD002", "a rate of zero", steps(20, lambda i: at(i, update_ratio=0.0, lr__0=0.0))),
    healthy("UPD002", "rejected steps", steps(20, lambda i: at(i, update_ratio=0.0, rejected=1.0))),
    healthy("UPD002", "once", [*calm(), at(10, update_ratio=0.0), *steps(5, lambda i: at(i), 11)]),
    healthy("UPD002", "a rate that is warmed up", steps(20, lambda i: at(i, update_ratio=0.0, lr__0=1e-9 * 2.0**i))),
    healthy("UPD002", "converged", steps(40, lambda i: at(i, update_ratio=0.0 if i > 20 else 1e-3, grad_norm=0.1**i))),
    healthy(
        "UPD002",
        "put back for a while",
        steps(90, lambda i: at(i, put_back=i % 40 if i % 20 == 0 and i % 40 else None)),
    ),
    trouble("WGT003", "one huge step", [*calm(40), at(40, update_ratio=5.0)], 40),
    healthy("WGT003", "a somewhat larger step", [*calm(40), at(40, update_ratio=3e-3)]),
    healthy("WGT003", "large ones all the time", [*calm(40, update_ratio=0.4), at(40, update_ratio=0.5)]),
    healthy("WGT003", "the first steps", [*calm(3), at(3, update_ratio=5.0)]),
    trouble("UPD001", "far too large", steps(60, lambda i: at(i, update_ratio=20.0)), 4),
    trouble(
        "UPD001",
        "thrown in the first steps",
        steps(8, lambda i: at(i, update_ratio=30.0 if i < 4 else 1e-3, loss=1.0 + 4.0 * i, weight_norm=100.0)),
        2,
    ),
    healthy(
        "UPD001",
        "weights that begin at zero",
        steps(8, lambda i: at(i, update_ratio=30.0 if i < 2 else 1e-3, loss=1.0 + 4.0 * i, weight_norm=0.0)),
    ),
    healthy(
        "UPD001",
        "a first step that helped",
        steps(8, lambda i: at(i, update_ratio=30.0 if i < 2 else 1e-3, loss=0.5**i, weight_norm=100.0)),
    ),
    healthy(
        "UPD001",
        "large, and it helps after a dozen steps",
        steps(60, lambda i: at(i, update_ratio=0.39, loss=3.5 * 0.95 ** max(i - 11, 0))),
    ),
    healthy("UPD001", "large and it helps", steps(60, lambda i: at(i, update_ratio=0.3, loss=5.0 * 0.9**i))),
    trouble("UPD001", "far too small", steps(200, lambda i: at(i, update_ratio=1e-11)), 4),
    healthy("UPD001", "small while warming up", steps(200, lambda i: at(i, update_ratio=1e-11, lr__0=1e-9 * 1.05**i))),
    healthy("UPD001", "small at the end", steps(200, lambda i: at(i, update_ratio=1e-2 if i < 100 else 1e-11))),
    healthy("UPD001", "usual", steps(60, lambda i: at(i, update_ratio=1e-3))),
    healthy("UPD001", "rejected", steps(60, lambda i: at(i, update_ratio=20.0, rejected=1.0))),
    trouble("GRAD007", "clipped to a thousandth", steps(100, lambda i: at(i, clip_coef=1e-3)), 5),
    trouble("GRAD007", "by the loop itself", steps(100, lambda i: at(i, handed=1e-3, lr__0=None)), 5),
    healthy("GRAD007", "a loss scale that nobody told", steps(100, lambda i: at(i, handed=2.0**-16, lr__0=None))),
    healthy("GRAD007", "gently", steps(100, lambda i: at(i, clip_coef=0.5))),
    healthy("GRAD007", "now and then", steps(100, lambda i: at(i, clip_coef=1e-3 if i % 10 == 0 else 1.0))),
    healthy("GRAD007", "rejected steps say nothing", steps(100, lambda i: at(i, clip_coef=1e-3, rejected=1.0))),
    trouble("GRAD007", "measured now and then", steps(100, lambda i: at(i, handed=1e-3 if i % 20 < 4 else None)), 19),
    healthy("GRAD007", "hardly ever measured", steps(100, lambda i: at(i, clip_coef=1e-3 if i % 7 == 0 else None))),
]

# -- gradients -----------------------------------------------------------------------------------------------------

SOME = (ABSENT, ABSENT, 1.0, 1.0, 1.0, 1.0)
ZEROS = (0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
TINY_PART = layout_of(numel=(1, 1, 10**6, 10**6, 10**6, 10**6))
NUMBERED = tuple(f"{i}.weight" for i in range(6))
EXPERTS = tuple(f"experts.{i}.weight" for i in range(6))
ROUTED = layout_of(names=EXPERTS)


def depth(first: float, last: float, names: tuple[str, ...] = NAMES, **more: float) -> History:
    """Weights of one size, and gradients that grow from the first layer to the last."""
    norms = tuple(float(v) for v in np.geomspace(first, last, 6))
    both = Layout(
        names=names + names, kinds=(Kind.GRAD,) * 6 + (Kind.WEIGHT,) * 6, numel=NUMEL * 2, columns=NORM_COLUMNS
    )
    look = at(0, (*norms, *(1.0,) * 6), layout=both, grad_norm=last, **more)
    return [look, *steps(80, lambda i: at(i, norms, layout=layout_of(names), grad_norm=last, **more), 1)]


def noise_in_a_bias() -> History:
    """What a bias before a normalisation adds is taken away again: its gradient is rounding."""
    names = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
    sizes = (4096, 64, 4096, 64, 4096, 64)
    norms = (0.1, 1e-9, 0.1, 1e-9, 0.1, 0.1)
    both = Layout(
        names=names + names, kinds=(Kind.GRAD,) * 6 + (Kind.WEIGHT,) * 6, numel=sizes * 2, columns=NORM_COLUMNS
    )
    look = at(0, (*norms, *(5.0, 0.6) * 3), layout=both, grad_norm=0.2)
    return [look, *steps(80, lambda i: at(i, norms, layout=layout_of(names, sizes), grad_norm=0.2), 1)]


STAGES = layout_of(("parts.0.weight", *(f"parts.1.heads.{k}.weight" for k in range(3))), (512, 256, 256, 256))

GRADIENTS = [
    trouble("GRAD001", "a NaN", [thorough(0, {(2, Column.NAN): 7.0}, nonfinite_grads=1, rejected=1)], 0, NAMES[2]),
    trouble(
        "GRAD001",
        "known by its norm",
        [*calm(), at(10, (1.0, 1.0, 1.0, 1.0, 1.0, math.inf), nonfinite_grads=1.0)],
        10,
        "head.weight",
    ),
    healthy("GRAD001", "a scaler looks for its scale", [at(0, nonfinite_grads=1.0, routine_overflow=1.0)]),
    trouble("GRAD002", "a jump", [*calm(60), at(60, (1.0,) * 5 + (1e4,), grad_norm=1e4)], 60, "head.weight"),
    healthy("GRAD002", "three times the usual", [*calm(60), at(60, grad_norm=3.0)]),
    healthy("GRAD002", "the first steps", [*calm(3), at(3, grad_norm=1e4)]),
    healthy("GRAD002", "norms that differ by decades", [at(i, grad_norm=v) for i, v in enumerate([*WIDE, 3e4])]),
    trouble("GRAD005", "the trunk is cut off", steps(40, lambda i: at(i, SOME)), 1, "stem.weight", "layers.0.weight"),
    trouble(
        "GRAD005",
        "a head that lost its gradient",
        steps(150, lambda i: at(i, (1.0,) * 5 + (1.0 if i < 60 else ABSENT,))),
        60,
        "head.weight",
    ),
    trouble(
        "GRAD005",
        "a branch that is never called",
        steps(200, lambda i: at(i, (1.0,) * 5 + (ABSENT,))),
        1,
        "head.weight",
    ),
    healthy("GRAD005", "frozen on purpose", steps(100, lambda i: at(i, (FROZEN, FROZEN, 1.0, 1.0, 1.0, 1.0)))),
    healthy(
        "GRAD005",
        "heads that take turns",
        steps(200, lambda i: at(i, (1.0,) * 4 + ((1.0, ABSENT) if i % 2 else (ABSENT, 1.0)))),
    ),
    healthy("GRAD005", "experts not chosen yet", steps(10, lambda i: at(i, (1.0,) * 5 + (ABSENT,), layout=ROUTED))),
    healthy(
        "GRAD005",
        "heads used one after the other, deep in the model",
        steps(
            90,
            lambda i: at(i, (1.0, *(1.0 if k == min(i // 30, 2) else ABSENT for k in range(3))), layout=STAGES),
        ),
    ),
    trouble(
        "GRAD005",
        "an expert that lost its gradient beside others that keep theirs",
        steps(90, lambda i: at(i, (1.0, 1.0, 1.0, 1.0 if i < 30 else ABSENT), layout=STAGES)),
        30,
        "parts.1.heads.2.weight",
    ),
    healthy("GRAD005", "next to nothing", steps(100, lambda i: at(i, SOME, layout=TINY_PART))),
    healthy("GRAD005", "no gradient at all is told elsewhere", steps(40, lambda i: at(i, NONE, loss_detached=1.0))),
    healthy("GRAD005", "other rows in every step", [at(i, layout=layout_of((f"p{i}", *NAMES[1:]))) for i in range(9)]),
    trouble("GRAD004", "dead units", steps(80, lambda i: at(i, ZEROS)), 1, "stem.weight", "layers.0.weight"),
    healthy("GRAD004", "a layer that begins at zero", steps(80, lambda i: at(i, ZEROS if i == 0 else (1.0,) * 6))),
    healthy("GRAD004", "next to nothing", steps(80, lambda i: at(i, ZEROS, layout=TINY_PART))),
    healthy("GRAD004", "rows that come and go", steps(80, lambda i: at(i, (float(i % 2),) * 2 + (1.0,) * 4))),
    healthy(
        "GRAD004",
        "a hinge loss that is satisfied",
        [
            *steps(20, lambda i: at(i, loss=0.5**i)),
            *steps(40, lambda i: at(i, (0.0,) * 6, grad_norm=0.0, loss=0.0), 20),
        ],
    ),
    healthy(
        "GRAD004",
        "a policy whose rewards are all the same",
        [
            *steps(17, lambda i: at(i, loss=0.02 * (-1) ** i)),
            *steps(100, lambda i: at(i, (0.0,) * 6, grad_norm=0.0, loss=0.0), 17),
        ],
    ),
    trouble(
        "GRAD004",
        "a loss that is multiplied by 0 from some step on",
        [*calm(20), *steps(40, lambda i: at(i, (0.0,) * 6, grad_norm=0.0, loss=0.0), 20)],
        20,
        "loss",
    ),
    healthy("GRAD004", "no gradients to be zero", steps(40, lambda i: at(i, NONE, grad_norm=0.0))),
    healthy("GRAD004", "not measured", steps(40, lambda i: at(i, grad_norm=None))),
    trouble(
        "GRAD003",
        "in time",
        steps(120, lambda i: at(i, grad_norm=1.0 if i < 30 else 1e-12, loss=1.0)),
        30,
        "grad_norm",
    ),
    healthy("GRAD003", "it was learned", steps(120, lambda i: at(i, grad_norm=0.5**i, loss=0.5**i))),
    trouble("GRAD003", "by depth", depth(1e-14, 1.0), 5, "stem.weight"),
    trouble("GRAD003", "by depth in two groups", depth(1e-14, 1.0, NUMBERED, lr__1=0.1), 5, "0.weight"),
    healthy("GRAD003", "a little by depth", depth(0.2, 1.0)),
    healthy("GRAD003", "a bias before a normalisation", noise_in_a_bias()),
    healthy("GRAD003", "few layers", [at(i, (1.0,) * 2, layout=layout_of(NAMES[:2], NUMEL[:2])) for i in range(60)]),
    trouble("WGT001", "an Inf", [*calm(), thorough(10, {(8, Column.INF): 1.0})], 10, NAMES[2]),
    trouble(
        "WGT001",
        "seen after the step",
        [*calm(), at(10, weights_bad=2.0, notes={"weights_bad": ("head.weight",)})],
        10,
        "head.weight",
    ),
    healthy("WGT001", "sound after the step", [*calm(), at(10, weights_bad=0.0)]),
    healthy("WGT001", "sound weights", [*calm(), thorough(10, {})]),
    trouble("WGT002", "an Inf", [thorough(0, {(12, Column.INF): 1.0}, bad_buffers=1.0)], 0, "bn.running_var"),
    healthy(
        "WGT002",
        "part of a rejected step",
        [thorough(0, {(12, Column.INF): 1.0}, bad_buffers=1.0, rejected=1.0, nonfinite_grads=1.0)],
    ),
]

# -- loss and output -----------------------------------------------------------------------------------------------

FALL = [2.0 * math.exp(-i / 20) + 0.1 + 0.01 * v for i, v in enumerate(noise(5, 100))]
FLAT = [1.0 + 0.02 * v for v in noise(6, 100)]


def losses(*values: float, layout: Layout = NORMS, **more: float | None) -> History:
    return [at(i, layout=layout, loss=v, **more) for i, v in enumerate(values)]


def burst(step: int, **scalars: float | None) -> Sample:
    return at(step, grad_norm=100.0, **scalars)


def converged() -> History:
    """Loss and gradients fall to next to nothing; one gradient there is a hundred times the others."""
    fell = [at(i, loss=0.9**i + 1e-9, grad_norm=0.9**i + 1e-6) for i in range(300)]
    return [*fell, at(300, loss=2e-9, grad_norm=1e-4)]


def clipped_to(coef: float, *, num: int = 80, **scalars: float | None) -> History:
    return [at(i, loss=2.0, clip_coef=coef, grad_norm=1.0 / coef, **scalars) for i in range(num)]


def climbing(*before: float, norm: float, **scalars: Any) -> History:
    """The loss falls, then climbs for 100 steps; gradients, at 1 before, are `norm` from then on."""
    fell = losses(*before, grad_norm=1.0, **scalars)
    climb = [0.2 * i for i in range(100)]
    return fell + losses(*before, *climb, grad_norm=norm, **scalars)[len(fell) :]


def swings(cosine: float, num_swings: int = 60) -> History:
    """First the loss falls, then it swings up and down."""
    first = losses(*FALL, grad_cos=0.3)
    num = len(first)
    return first + [at(num + i, loss=2.0 + (-1.0) ** i, grad_cos=cosine) for i in range(num_swings)]


def heard(history: History, run: int) -> History:
    """Somebody listens only in a few of every twenty steps."""
    for sample in history:
        if sample.step % 20 >= run:
            del sample.scalars["grad_cos"]  # type: ignore[attr-defined]
    return history


def validated(val: list[float], train: list[float]) -> History:
    """Ten training steps before each validation."""
    out: History = []
    for i, (loss, val_loss) in enumerate(zip(train, val, strict=True)):
        out += [at(10 * i + k, loss=loss) for k in range(10)]
        out.append(at(10 * i + 9, layout=NO_ROWS, phase="val", val_loss=val_loss))
    return out


DOWN = [2.0 - 0.1 * i for i in range(10)]
UP = [1.1 + 0.4 * i for i in range(10)]
TRAIN = [2.0 * 0.85**i for i in range(20)]


def looks(*spreads: float, **more: float) -> History:
    """The output is looked at in every fifth step."""
    return [at(i, out_spread=spreads[i // 5] if i % 5 == 0 else None, **more) for i in range(5 * len(spreads))]


def towers(*spreads: tuple[float, float]) -> History:
    return [
        at(i, towers_spread=spreads[i // 5][0], towers_widest=spreads[i // 5][1], tower=1.0) if i % 5 == 0 else at(i)
        for i in range(5 * len(spreads))
    ]


LOSS = [
    trouble("LOSS009", "far above guessing", steps(4, lambda i: at(i, answer_ratio=9.0)), 1, "output"),
    healthy("LOSS009", "a little above", steps(4, lambda i: at(i, answer_ratio=2.0))),
    healthy("LOSS009", "gone at once", [at(0), at(1, answer_ratio=9.0), at(2, answer_ratio=1.5)]),
    healthy("LOSS009", "not in the first steps", [*calm(20), *steps(9, lambda i: at(i, answer_ratio=9.0), 20)]),
    trouble(
        "LOSS010", "probabilities", steps(30, lambda i: at(i, normalised_twice=None if i % 5 else 1.0)), 5, "output"
    ),
    healthy("LOSS010", "once", [*calm(), at(10, normalised_twice=1.0), *calm()]),
    trouble(
        "LOSS004", "worse than guesses", steps(200, lambda i: at(i, answer_ratio=None if i % 20 else 2.0)), 80, "output"
    ),
    healthy(
        "LOSS004", "ever better guesses", steps(200, lambda i: at(i, answer_ratio=None if i % 20 else 200.0 / (i + 1)))
    ),
    trouble("LOSS008", "falls endlessly", losses(*[1.0 - 0.5 * i for i in range(200)]), 40, "loss"),
    trouble("LOSS008", "falls ever faster", losses(*[1.0 - 1.06**i for i in range(150)]), 40, "loss"),
    healthy("LOSS008", "a likelihood that settles", losses(*[2.0 - 90.0 * (1 - 0.97**i) for i in range(300)])),
    healthy("LOSS008", "falls to zero", losses(*[200.0 - i for i in range(200)])),
    healthy("LOSS008", "noise around a large negative level", losses(*[-500.0 + 3.0 * v for v in noise(4, 200)])),
    trouble("LOSS001", "NaN", [*calm(), at(10, loss=math.nan, rejected=1.0)], 10, "loss"),
    trouble("LOSS001", "minus infinity at once", [at(0, loss=-math.inf)], 0, "loss"),
    healthy("LOSS001", "huge", [*calm(), at(10, loss=1e30)]),
    healthy("LOSS001", "not told", [at(i, loss=None) for i in range(5)]),
    trouble("LOSS002", "a jump", losses(*FLAT, 500.0), 100, "loss"),
    healthy("LOSS002", "within reach", losses(*FLAT, 1.1)),
    healthy("LOSS002", "not above the first level", losses(*FALL, 1.0)),
    healthy("LOSS002", "the first steps", losses(*FLAT[:5], 500.0)),
    healthy("LOSS002", "a heavy tail", losses(*[math.exp(3.0 * v) for v in noise(8, 100)], 5e3)),
    trouble("LOSS003", "a climb", losses(*FALL, *[0.2 * i for i in range(100)]), 95, "loss"),
    trouble("LOSS003", "upwards from the start", losses(*[2.0**i for i in range(18)]), 3, "loss"),
    trouble(
        "LOSS003",
        "weights thrown away from the start",
        losses(*[2.0**i for i in range(18)], update_ratio=0.5, fixed=None),
        3,
        "loss",
    ),
    trouble(
        "LOSS003", "a climb with gradients that left their range", climbing(*FALL, norm=40.0, fixed=None), 95, "loss"
    ),
    trouble(
        "LOSS003",
        "the same beside another optimizer",
        climbing(*FALL, norm=40.0, layout=LABELLED, fixed=None),
        95,
        "loss",
    ),
    healthy("LOSS002", "a rare event where the objective may move", losses(*FLAT, 500.0, fixed=None)),
    trouble(
        "LOSS002",
        "one that throws the weights, whatever the objective",
        [*losses(*FLAT, fixed=None), at(len(FLAT), loss=500.0, update_ratio=0.5, fixed=None)],
        len(FLAT),
        "loss",
    ),
    healthy("GRAD002", "a rare event where the objective may move", [*calm(60, fixed=None), burst(60, fixed=None)]),
    healthy("GRAD002", "next to nothing in a run that has converged", converged()),
    healthy("GRAD007", "a clip that is the recipe", clipped_to(0.001, fixed=None)),
    healthy(
        "GRAD007",
        "a clip that is the recipe, at the end of a schedule",
        steps(400, lambda i: at(i, clip_coef=0.01, grad_norm=100.0, update_ratio=1e-3 * 0.98**i, fixed=None)),
    ),
    trouble("GRAD007", "a clip that stops the run", clipped_to(0.001, fixed=None, update_ratio=1e-7), 19),
    healthy("DATA007", "clearly below chance, if only by little", at_chance(200, moving=1e-3, floor=0.02)),
    healthy(
        "LOSS003", "a climb of an objective that may move", losses(*FALL, *[0.2 * i for i in range(100)], fixed=None)
    ),
    healthy("LOSS003", "returns that grow from nothing", losses(*[2.0**i for i in range(18)], fixed=None)),
    healthy("LOSS003", "gradients that grow with the returns", climbing(*FALL, norm=3.0, fixed=None)),
    healthy(
        "LOSS003",
        "a cross-entropy that another model works against",
        losses(*FALL, *[0.2 * i for i in range(100)], moving=1.0),
    ),
    healthy(
        "LOSS003",
        "two players, a thousandfold climb",
        losses(*FALL, *[30.0 * i for i in range(100)], layout=LABELLED),
    ),
    trouble("LOSS003", "a gradient with the wrong sign", [*calm(), at(10, loss_factor=-1.0)], 10, "loss"),
    trouble(
        "LOSS003",
        "a cross-entropy far below zero",
        losses(*[2.3 - 2.0 * i for i in range(40)], chance=2.3, bounded=1.0),
        2,
        "loss",
    ),
    healthy("LOSS003", "a loss that may be negative", losses(*[2.3 - 2.0 * i for i in range(40)], chance=2.3)),
    healthy("LOSS003", "it settles", losses(*FALL, *[0.1 + 0.01 * v for v in noise(7, 200)])),
    healthy("LOSS003", "two players", losses(*FALL, *[0.3 + 0.002 * i for i in range(100)], layout=LABELLED)),
    healthy("LOSS003", "a noisy level", losses(*FLAT, *[1.0 + 0.02 * v for v in noise(9, 2000)])),
    healthy("LOSS003", "one bad batch", losses(*FALL, 50.0, *FALL[-20:])),
    trouble("LOSS005", "up and down", swings(-0.95), 100, "loss"),
    trouble("LOSS005", "heard now and then", heard(swings(-0.95, 120), 4), 140, "loss"),
    healthy("LOSS005", "hardly ever heard", heard(swings(-0.95, 120), 2)),
    healthy("LOSS005", "gradients that agree", swings(0.2)),
    healthy(
        "LOSS005",
        "it still gets better",
        [at(i, loss=60.0 - 0.7 * i + (-1.0) ** i, grad_cos=-0.95) for i in range(80)],
    ),
    healthy("LOSS005", "by design in two players", [at(i, layout=LABELLED, grad_cos=-0.95) for i in range(60)]),
    healthy("LOSS005", "too short to tell", swings(-0.95)[:104]),
    trouble("LOSS006", "validation turns", validated([*DOWN, *UP], TRAIN), 99, "val_loss"),
    healthy("LOSS006", "both fall", validated([*DOWN, *[1.0] * 10], TRAIN)),
    healthy("LOSS006", "both rise", validated([*DOWN, *UP], [*TRAIN[:10], *[0.5 + 0.5 * i for i in range(10)]])),
    healthy("LOSS006", "few validations", validated([1.0, 2.0, 3.0], TRAIN[:3])),
    trouble("LOSS007", "NaN", [*calm(), at(9, layout=NO_ROWS, phase="val", val_loss=math.nan)], 9, "val_loss"),
    healthy("LOSS007", "a number", [*calm(), at(9, layout=NO_ROWS, phase="val", val_loss=9.0)]),
    trouble("ACT003", "a collapse", looks(*[0.5] * 6, *[1e-14] * 6), 30, "output"),
    healthy("ACT003", "outputs differ", looks(*[0.5] * 12)),
    healthy("ACT003", "one look", looks(*[0.5] * 6, 1e-14, *[0.5] * 5)),
    healthy("ACT003", "inputs are all the same", looks(*[0.5] * 6, *[1e-14] * 6, in_flat=1.0)),
    healthy("ACT003", "a head of zeros at first", looks(*[0.0] * 3)),
    trouble("ACT005", "three layers in a row", [*calm(), at(10, linear_chain=3.0)], 10, "layers"),
    healthy("ACT005", "none", calm()),
    trouble("ACT004", "an input that became one point", collapsed(4, varied=5.0), 70, "layers.2"),
    trouble("ACT004", "half of the layers from the start", collapsed(4, share=0.6), 70, "layers.2"),
    healthy("ACT004", "a branch that is given a constant", collapsed(6, share=0.2)),
    healthy("ACT004", "all layers: the data are", collapsed(6, share=1.0)),
    healthy("ACT004", "for two looks", collapsed(2, varied=5.0)),
    trouble("ACT001", "no gradient", [*calm(), at(10, asleep_share=0.9, asleep_of=64.0, notes=ASLEEP)], 10, "layers.1"),
    healthy("ACT001", "most have one", [*calm(), at(10, asleep_share=0.6, asleep_of=64.0, notes=ASLEEP)]),
    trouble(
        "WGT006", "one weight for all", [*calm(), at(10, twin_units=1.0, notes={"twin_units": ("stem",)})], 10, "stem"
    ),
    healthy("WGT006", "none", [*calm(), at(10, twin_units=0.0)]),
    trouble("GRAD009", "turned round midway", [*calm(handed=1.0), *steps(4, lambda i: at(i, handed=-1.0), 10)], 11),
    trouble("GRAD009", "from the start, of a fixed loss", calm(4, handed=-1.0), 1),
    healthy("GRAD009", "from the start, of any loss", steps(9, lambda i: at(i, handed=-1.0, fixed=None))),
    healthy("GRAD009", "once", [*calm(handed=1.0), at(10, handed=-1.0), at(11, handed=1.0)]),
    healthy("GRAD009", "clipped", calm(handed=1e-4)),
    trouble("GRAD010", "the same again", steps(6, lambda i: at(i, doubled=1.0, backwards=2.0)), 2, "backward"),
    healthy("GRAD010", "once", [*calm(), at(10, doubled=1.0, backwards=2.0)]),
    trouble("WGT007", "thirty times too large", sized(start_gain=17.0, layer_input=40.0, layer_input_least=0.5), 10),
    trouble("WGT007", "far too small", sized(start_gain=5e-4, layer_input=0.5, layer_input_least=2e-4), 10, "weights"),
    healthy("WGT007", "rescaled when used", sized(start_gain=22.0, layer_input=1.2, layer_input_least=0.5)),
    healthy("WGT007", "usual", sized(start_gain=0.57, layer_input=1.2, layer_input_least=0.1)),
    trouble("LOSS013", "ten looks", sure(250, moving=1.0), 200, "loss"),
    healthy("LOSS013", "one optimizer alone", sure(250)),
    healthy("LOSS013", "for a while", sure(190, moving=1.0)),
    trouble(
        "DATA010",
        "three of four",
        steps(90, lambda i: at(i, rows_repeated=None if i % 20 else 0.75, rows_repeated_looks=i / 20 + 1)),
        40,
        "batch",
    ),
    healthy("DATA010", "once", [*calm(), at(10, rows_repeated=0.75, rows_repeated_looks=1.0)]),
    trouble(
        "WIRE019", "[n, 1] and [n]", steps(90, lambda i: at(i, one_target=None if i % 20 else 0.1 * i)), 40, "loss"
    ),
    healthy("WIRE019", "always 1", steps(90, lambda i: at(i, one_target=None if i % 20 else 1.0))),
    healthy("WIRE019", "twice", steps(30, lambda i: at(i, one_target=None if i % 20 else 0.1 * i))),
    trouble("WGT007", "seen at work", sized(first_gain=17.0, first_size=40.0, first_least=0.5), 10, "weights"),
    healthy("WGT007", "usual, seen at work", sized(first_gain=0.2, first_size=1.0, first_least=0.006)),
    trouble("DATA009", "prices", sized(data_size=200.0, data_least=200.0, data_offset=2.0), 10, "layers.0"),
    trouble("DATA009", "scaled twice", sized(data_size=2e-4, data_least=2e-4, data_offset=1.0), 10, "layers.0"),
    trouble("DATA009", "years", sized(data_size=20.0, data_least=20.0, data_offset=300.0), 10, "layers.0"),
    healthy("DATA009", "images of 0 to 1", sized(data_size=0.4, data_least=0.4, data_offset=3.0)),
    healthy("DATA009", "a constant", sized(data_size=1.0, data_least=1.0, data_offset=1e6)),
    trouble("DATA009", "0 to 255", sized(start_gain=0.57, layer_input=120.0, layer_input_least=9.0), 10, "layers.0"),
    healthy("DATA009", "normalised", sized(start_gain=0.57, layer_input=1.7, layer_input_least=0.3)),
    healthy("DATA009", "a loss of differences", sized(start_gain=0.57, layer_input=2e6, layer_input_least=0.3)),
    healthy("DATA009", "made so by the weights", sized(start_gain=17.0, layer_input=400.0, layer_input_least=0.5)),
    trouble(
        "OPT001", "a schedule for epochs, stepped per batch", steps(200, lambda i: at(i, lr__0=0.1 * 0.9**i)), 120, "lr"
    ),
    healthy("OPT001", "a cosine", steps(300, lambda i: at(i, lr__0=0.1 * (1 + math.cos(math.pi * i / 300))))),
    healthy("OPT001", "a line to zero", steps(300, lambda i: at(i, lr__0=0.1 * (300 - i)))),
    healthy("OPT001", "the end of a long run", steps(2000, lambda i: at(i, lr__0=0.1 if i < 1800 else 1e-6))),
    healthy("OPT001", "a long warm-up", steps(200, lambda i: at(i, lr__0=1e-6 * (i + 1)))),
    trouble("MODE003", "nine of ten", [*calm(), at(10, dropout=0.9, notes={"dropout": ("drop",)})], 10, "drop"),
    healthy("MODE003", "four of five", [*calm(), at(10, dropout=0.8, notes={"dropout": ("drop",)})]),
    trouble(
        "LOSS011", "over the batch", steps(30, lambda i: at(i, batch_softmax=None if i % 10 else 1.0)), 20, "output"
    ),
    healthy("LOSS011", "once", [*calm(), at(10, batch_softmax=1.0)]),
    trouble("LOSS011", "by the graph", steps(30, lambda i: at(i, logits_relu=None if i % 5 else 1.0)), 10, "output"),
    trouble("LOSS011", "a ReLU", steps(90, lambda i: at(i, rectified_logits=None if i % 20 else 0.4)), 40, "output"),
    trouble("AMP005", "nearly all", steps(90, lambda i: at(i, rounded_away=None if i % 20 else 0.99)), 40, "weights"),
    trouble("AMP005", "rounded", steps(90, lambda i: at(i, coarse_weights=None if i % 20 else 1.0)), 40, "weights"),
    healthy(
        "AMP005",
        "loaded, and at rest",
        steps(90, lambda i: at(i, update_ratio=0.0, coarse_weights=None if i % 20 else 1.0)),
    ),
    healthy("AMP005", "half of them", steps(90, lambda i: at(i, rounded_away=None if i % 20 else 0.5))),
    healthy("AMP005", "rejected", steps(90, lambda i: at(i, rejected=1.0, rounded_away=None if i % 20 else 0.99))),
    trouble("WIRE016", "momentum 0.999", [*calm(), thorough(10, {}, momentum_kept=0.999)], 10, "momentum"),
    healthy("WIRE016", "momentum 0.99", [*calm(), thorough(10, {}, momentum_kept=0.99)]),
    trouble("WIRE016", "betas in the wrong order", [*calm(), thorough(10, {}, moments_crossed=0.08)], 10, "betas"),
    trouble("WIRE016", "eps 0.1", [*calm(update_ratio=1e-6), thorough(10, {}, eps=1.0, update_ratio=1e-6)], 10, "eps"),
    healthy("WIRE016", "eps 1e-8", [*calm(update_ratio=1e-6), thorough(10, {}, eps=1e-8, update_ratio=1e-6)]),
    healthy("WIRE016", "a large eps that moves", [*calm(), thorough(10, {}, eps=1.0)]),
    trouble("OPT008", "one percent per step", shrinking(0.6, decay_rate=0.01), 50, "weight_decay"),
    trouble("OPT008", "far above the gradient", shrinking(0.6, decay_pull=1.0), 50, "weight_decay"),
    trouble("OPT008", "so far above it that little is left", shrinking(0.05, decay_pull=1.0), 50, "weight_decay"),
    healthy("OPT008", "weights stay", shrinking(0.95, decay_rate=0.01)),
    healthy("OPT008", "usual decay", shrinking(0.6, decay_rate=1e-4)),
    healthy("OPT008", "below the gradient", shrinking(0.6, decay_pull=1e-3)),
    trouble("CON001", "far too sharp", [*calm(), at(10, temperature=1e6, notes={"temperature": ("tau",)})], 10, "tau"),
    trouble("CON001", "far too flat", [*calm(), at(10, temperature=1e-6, notes={"temperature": ("tau",)})], 10, "tau"),
    healthy("CON001", "as CLIP has it", [*calm(), at(10, temperature=14.3)]),
    trouble("CON002", "one tower", towers(*[(1e-9, 0.5)] * 6), 0, "output 1"),
    healthy("CON002", "both differ", towers(*[(0.3, 0.5)] * 6)),
    healthy("CON002", "both are constant", towers(*[(1e-9, 1e-9)] * 6)),
    healthy("CON002", "one look", towers((1e-9, 0.5), (0.4, 0.5))),
]


def driven(
    climb: float = 1.0,
    growth: float = 1.05,
    most: float = 1e9,
    *,
    known: float = 0.1,
    size: float = 32.0,
    **more: float,
) -> History:
    """A run that learned from 2.3 to 0.2; from step 100 on its rate grows, and from 130 on its loss."""
    out = []
    for i, off in enumerate(noise(3, 190, 0.04)):
        rate = 0.1 * min(growth ** max(i - 100, 0), most) if i > 20 else known
        loss = 0.2 + 2.1 * math.exp(-i / 20) + off + climb * 0.012 * max(i - 130, 0)
        batch = size if i >= 140 else 32.0
        out.append(at(i, loss=loss, lr__0=rate, batch_size=batch, **more if i >= 100 else {}))
    return out


LOSS += [
    trouble("LOSS003", "driven up by a rate that grows", driven(), 140, "loss"),
    healthy("LOSS003", "a rate that grows and does no harm", driven(climb=0.0)),
    healthy("LOSS003", "a loss that climbs as little at a steady rate", driven(growth=1.0)),
    healthy("LOSS003", "a rate that doubles", driven(most=2.0)),
    healthy("LOSS003", "back to a rate that was used before", driven(most=10.0, known=1.0)),
    healthy("LOSS003", "set in one go", driven(growth=8.0, most=8.0)),
    healthy("LOSS003", "with a batch of another size", driven(size=256.0)[:172]),
    healthy("LOSS003", "held by the guard", driven(most=10.0, lr_multiplier=0.1)),
]


def test_a_rate_that_grows_is_found_long_before_all_is_lost() -> None:
    first = found_by("LOSS003", driven())[0]
    assert first.step <= 170
    assert first.evidence["loss"] < 1.0
    assert 110 < first.evidence["onset"] < first.step


def test_an_outlier_batch_says_what_it_did() -> None:
    hidden, rows = rms([*USUAL_RMS, 1e4]), (1.0, 1.0, 1.0, 80.0, 1.0, 1.0)
    assert found_by("DATA002", hidden)[0].evidence["harm"] <= 1.0
    for harmful in (
        at(40, in_rms=1e4, grad_norm=50.0),
        at(40, in_rms=1e4, loss=3.0),
        at(40, in_rms=1e4, update_ratio=2e-3),
        at(40, rows, in_rms=1e4),
        at(40, in_rms=1e4, grad_norm=math.inf),
        at(40, in_rms=1e4, grad_norm=None),
    ):
        (finding,) = found_by("DATA002", [*hidden[:-1], harmful])
        assert finding.evidence.get("harm", math.inf) > 1.0


TWO = {"same_data": ("rank 0", "rank 1")}


def families(loss: float, usual: float, score: float) -> History:
    notes = {"rank_loss": ("rank 2",)}
    told = {"rank_loss": loss, "rank_loss_usual": usual, "rank_loss_score": score}
    return [*calm(40), at(40, notes=notes, **told)]


def paces(late: float, share: float) -> History:
    return [*calm(40), at(40, notes={"rank_late": ("rank 1",)}, rank_late=late, rank_late_share=share)]


RANKS = [
    trouble("DIST001", "one of four", [*calm(), at(10, diverged=1.0, notes={"diverged": ("rank 3",)})], 10, "rank 3"),
    healthy("DIST001", "all the same", [*calm(), at(10, diverged=0.0)]),
    trouble("DIST002", "wrong labels on one rank", families(2.3, 0.4, 30.0), 40, "rank 2"),
    trouble("DIST002", "a rank that has nothing to learn", families(0.01, 0.4, 30.0), 40, "rank 2"),
    healthy("DIST002", "a harder shard", families(0.5, 0.4, 30.0)),
    healthy("DIST002", "batches that vary as much", families(1.0, 0.4, 1.5)),
    trouble("DIST003", "half of a step", paces(0.5, 0.5), 40, "rank 1"),
    healthy("DIST003", "a hundredth of it", paces(0.5, 0.01)),
    healthy("DIST003", "half of a step of a millisecond", paces(0.0005, 0.5)),
    trouble("DIST004", "no sampler", steps(20, lambda i: at(i, same_data=2.0, notes=TWO)), 7, "rank 0", "rank 1"),
    healthy("DIST004", "the last batch of every epoch", steps(60, lambda i: at(i, same_data=None if i % 6 else 2.0))),
]


CASES = [*DATA, *LEARNING, *WIRING, *PRECISION, *RATES, *GRADIENTS, *LOSS, *RANKS]
TROUBLES = [case for case in CASES if case.begins is not None]
NEAR_MISSES = [case for case in CASES if case.begins is None]


def named(case: Case) -> str:
    return f"{case.code} {case.label}"


def test_every_rule_is_shown_its_trouble_and_a_near_miss() -> None:
    codes = {rule.code for rule in all_rules() if rule.__module__.startswith("trimtab.rules")} - TESTED_ELSEWHERE
    assert codes == {case.code for case in TROUBLES}
    assert codes == {case.code for case in NEAR_MISSES}
    assert len({named(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", TROUBLES, ids=named)
def test_trouble_is_found(case: Case) -> None:
    findings = found_by(case.code, case.history)
    assert findings, "nothing was found"
    first, rule = findings[0], find_rule(case.code)
    assert case.begins is not None
    assert first.step >= case.begins
    assert (first.code, first.name, first.streak) == (rule.code, rule.name, 1)
    assert first.severity <= rule().severity  # less where a rule knows a mild form
    assert first.message
    assert "  " not in first.message
    assert first.subject or first.evidence or case.code in WITHOUT_NUMBERS
    assert set(case.subject) <= set(first.subject)
    assert all(isinstance(v, float) for v in first.evidence.values())
    assert first.advice == advice_of(rule)
    assert first.advice
    assert str(first).startswith(f"step {first.step}: {rule.code} {rule.name}: ") or first.optimizer


@pytest.mark.parametrize("case", NEAR_MISSES, ids=named)
def test_near_miss_is_silent(case: Case) -> None:
    assert [str(f) for f in found_by(case.code, case.history)] == []


def test_every_gradient_zero() -> None:
    history = [*calm(), *steps(20, lambda i: at(i, (0.0,) * 6, grad_norm=0.0), 10)]
    findings = found_by("GRAD004", history)
    assert findings
    assert findings[0].step > 10
    assert "every gradient" in findings[0].message


def test_an_explosion_without_rows_names_nobody() -> None:
    history = [at(i, layout=NO_ROWS, grad_norm=1.0 if i < 60 else 1e5) for i in range(61)]
    assert [f.subject for f in found_by("GRAD002", history)] == [()]


def test_a_clipped_explosion_says_so() -> None:
    findings = found_by("GRAD002", [*calm(60), at(60, grad_norm=1e4, clip_coef=1e-4)])
    assert "clipped" in findings[0].message


def test_a_buffer_put_back_says_so() -> None:
    cells = {(12, Column.NAN): 1.0}
    findings = found_by("WGT002", [thorough(0, cells, bad_buffers=1.0, buffers_restored=1.0)])
    assert "put back" in findings[0].message


def test_a_hinge_loss_may_stay_satisfied() -> None:
    falling = steps(20, lambda i: at(i, loss=0.5**i))
    assert found_by("GRAD004", [*falling, *steps(300, lambda i: at(i, (0.0,) * 6, grad_norm=0.0, loss=0.0), 20)]) == []
