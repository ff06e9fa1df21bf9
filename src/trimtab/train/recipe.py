"""A recipe is a whole training under one name: data, model, settings, faults to inject, and a score.

How to write one: a folder `recipes/NAME/` whose `__init__.py` has

- `RECIPE = Recipe(name=..., summary=..., options=(Option(...), ...), quick={...}, score="r2", build=build, faults=...)`
  where each `Option` becomes a flag `--the-name` and an entry `settings["the_name"]`, `quick` holds what `--quick`
  changes (a run under 20 s), and `score` names the metric that `--compare` compares (`-mae`: less is better);
- `build(settings) -> Parts`: everything seeded by `settings["seed"]` alone (torch's generator is seeded before it);
- `faults`: each `Fault` gets the finished `Parts` and returns them changed (`dataclasses.replace`): other data, other
  settings, or `before_step`/`after_step` that do something to the run;
- `target() -> dict`, that is `return doctor_target(RECIPE)`, for `trimtab doctor trimtab.train.recipes.NAME:target`;

and one line in `recipes/__init__.py`. `Parts.begin(parts)` is called once everything, a fault included, is in place;
`Parts.within(trainer)` is a context around the training, left whatever happens; `Parts.finish(trainer)` may return
facts for the result (samples of text, a diagnosis). Lines for people go through the `say` in `settings` (None if nobody
reads them). `settings["device"]` is the device of every recipe: the trainer moves models and batches there.
`settings["resume"]` and `["checkpoint_dir"]` are what was given; a recipe that resumes by itself sets `Parts.resume` to
what is left for the trainer (None: nothing). `settings["arm"]` names which of the compared runs this is (None: the only
one), for files that each run writes. With an option `use_ddp` the recipe can run in several processes:
`settings["process"]` is then this one of them (None: the only one), and its loader reads a share. `Parts.score`
replaces the recipe's score if it depends on the settings. `Parts.guard` are further settings of the guard, as for
`Config`.

A recipe that reads data of the user's own has the option `data`, the documented name of it as an alias. What is wrong
with the data is a `DataError` (see `data_problems.py`), as early as it can be known; `Parts.problems` reads everything
once and yields what it finds, with file and row, for `trimtab doctor NAME`. `presets` are further settings
by name, chosen by an option `preset`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.core.config import PolicyConfig
from trimtab.core.errors import InputError, TrainingStopped
from trimtab.core.suggest_name import instead_of
from trimtab.train.device import AUTO, choose_device
from trimtab.train.evaluation import Evaluate, LossFn, Metrics, StepFn
from trimtab.train.processes import Process, joined, newest_common
from trimtab.train.progress import Progress
from trimtab.train.resuming import checked_resume, usual_checkpoint_every
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import RunDir, Stage, Surroundings, freeze, make_optimizer
from trimtab.train.trainer import Hook, Trainer, num_batches

Settings = Mapping[str, Any]
SEED = 42
AS_GIVEN = "as given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting of a recipe. `kind` is needed if the default is None; a number is `least` or more.

    `aliases` are further names of it: flags, and keys of the settings that are given.
    """

    name: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    kind: type | None = None
    least: float | None = None
    aliases: tuple[str, ...] = ()

    @property
    def type(self) -> type:
        """The type of its values."""
        return self.kind or type(self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a recipe builds: the arguments of a `Trainer` and its loaders."""

    model: nn.Module
    train_loader: Any
    val_loader: Any
    config: TrainConfig
    loss_fn: LossFn | None = None
    step_fn: StepFn | None = None
    metrics: Metrics | None = None
    evaluate: Evaluate | None = None
    score: str | None = None
    stages: tuple[Stage, ...] = ()
    sinks: tuple[Any, ...] = ()
    tags: Any = None
    policy: PolicyConfig | None = None
    guard: Settings = field(default_factory=dict)
    resume: str | os.PathLike[str] | None = AS_GIVEN
    before_step: Hook | None = None
    after_step: Hook | None = None
    begin: Callable[[Parts], None] | None = None
    within: Callable[[Trainer], AbstractContextManager[object]] | None = None
    finish: Callable[[Trainer], Mapping[str, object]] | None = None
    problems: Callable[[], Iterable[str]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A documented incident, to be injected on purpose."""

    name: str
    summary: str
    inject: Callable[[Parts, Settings], Parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole training under one name; see the head of this file."""

    name: str
    summary: str
    build: Callable[[Settings], Parts]
    score: str
    options: tuple[Option, ...] = ()
    quick: Settings = field(default_factory=dict)
    presets: Mapping[str, Settings] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    def fault(self, name: str) -> Fault:
        """The fault of that name; InputError with the known ones for any other."""
        known = {fault.name: fault for fault in self.faults}
        wanted = name.replace("_", "-")
        if wanted not in known:
            raise InputError(f"{self.name} has no fault {name!r}; {instead_of(wanted, known)}")
        return known[wanted]


def settings_of(recipe: Recipe, given: Settings, *, quick: bool = False) -> dict[str, Any]:
    """All settings in force: what is given, over the quick ones if asked for, over a preset, over the defaults.

    Example:
        >>> rate = Option(name="lr", default=0.1, help="The rate.")
        >>> recipe = Recipe(name="r", summary="", build=None, score="r2", options=(rate,))
        >>> settings_of(recipe, {"lr": 0.5})["lr"]
        0.5
        >>> settings_of(recipe, {"lrr": 0.5})
        Traceback (most recent call last):
            ...
        trimtab.core.errors.InputError: r has no setting 'lrr'; did you mean 'lr'? There are lr
    """
    options = {option.name: option for option in recipe.options}
    settings: dict[str, Any] = {"seed": SEED, "device": AUTO, "say": None, "resume": None, "checkpoint_dir": None}
    settings |= {"arm": None, "process": None}
    settings |= {name: option.default for name, option in options.items()}
    settings |= recipe.presets.get(given.get("preset") or "", {})
    settings |= dict(recipe.quick) if quick else {}
    called = {alias: option.name for option in recipe.options for alias in option.aliases}
    for name, value in given.items():
        if called.get(name, name) not in settings:
            raise InputError(f"{recipe.name} has no setting {name!r}; {instead_of(name, options)}")
        settings[called.get(name, name)] = value
    for name, option in options.items():
        value = settings[name]
        if option.choices and value not in option.choices:
            raise InputError(f"{name} is {value!r}; {instead_of(value, option.choices)}")
        if option.least is not None and value is not None and not value >= option.least:
            raise InputError(f"{name} is {value!r}; expected at least {option.least:g}")
    return settings


def build_parts(recipe: Recipe, settings: Settings, fault: str | None = None) -> Parts:
    """Build a recipe, seeded, and inject the fault that is named, if any."""
    chosen = None if fault is None else recipe.fault(fault)  # a wrong name is reported before anything is built
    torch.manual_seed(settings["seed"])
    parts = recipe.build(settings)
    return parts if chosen is None else chosen.inject(parts, settings)


def run_recipe(
    recipe: Recipe,
    given: Settings | None = None,
    *,
    quick: bool = False,
    guarded: bool = True,
    fault: str | None = None,
    run_dir: RunDir = None,
    checkpoint_dir: Path | None = None,
    checkpoint_every: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    say: Callable[[str], object] | None = None,
    show: Callable[[str], object] | None = None,
) -> Result:
    """Run a recipe once and return how it ended; a training that its guard stopped is a result, too.

    `run_dir=False` records nothing. `say` gets finished lines, `show` the one that is still growing. Checkpoints come
    at the end of each epoch and every `checkpoint_every` steps; None: where an epoch is long.
    """
    resume = checked_resume(resume, checkpoint_dir, guarded=guarded)
    if checkpoint_every and checkpoint_dir is None:
        raise InputError(
            f"checkpoint_every is {checkpoint_every}, but there is no folder for checkpoints; give --checkpoint-dir"
        )
    around_it = {"say": say, "resume": resume, "checkpoint_dir": checkpoint_dir}
    settings = settings_of(recipe, {**(given or {}), **around_it}, quick=quick)
    began, stopped = time.perf_counter(), None
    device = choose_device(settings["device"])  # a wrong one is reported before anything is built
    apart = joined(device, wanted=bool(settings.get("use_ddp")))
    with torch.random.fork_rng(devices=[] if device.type != "cuda" else [device]), apart as process:
        if process.num > 1:
            settings |= {"process": process, "say": say if process.first else None}
            settings["checkpoint_dir"] = process.folder(checkpoint_dir)
            if resume == AUTO:
                resume = settings["resume"] = newest_common(settings["checkpoint_dir"])
        parts = build_parts(recipe, settings, fault)
        if parts.begin is not None:
            parts.begin(parts)
        around = surroundings(parts, settings, process, guarded=guarded, run_dir=run_dir, show=show)
        trainer = trainer_of(parts, around, process, checkpoint_every)
        try:
            left = resume if parts.resume == AS_GIVEN else parts.resume
            with nullcontext() if parts.within is None else parts.within(trainer):
                trainer.train(parts.train_loader, parts.val_loader, resume=left)
        except TrainingStopped as stop:
            stopped = str(stop)
        facts = {} if parts.finish is None else parts.finish(trainer)
    arm = ("guarded" if guarded else "unguarded") if fault else ("clean" if guarded else "clean, unguarded")
    return result_of(
        recipe.name, parts.score or recipe.score, trainer, arm, fault, stopped, facts, time.perf_counter() - began
    )


def surroundings(
    parts: Parts,
    settings: Settings,
    process: Process,
    *,
    guarded: bool,
    run_dir: RunDir,
    show: Callable[[str], object] | None,
) -> Surroundings:
    """Where one process records and saves, and what it prints; only the first one of several records and prints."""
    say = settings["say"]
    return Surroundings(
        guarded=guarded,
        sinks=parts.sinks,
        run_dir=run_dir if process.first else False,
        checkpoint_dir=settings["checkpoint_dir"],
        say=say,
        progress=Progress(say, show) if say is not None else None,
        policy=parts.policy,
        guard=parts.guard,
        tags=parts.tags if process.first else None,
        distributed=process.num > 1,
    )


def trainer_of(parts: Parts, around: Surroundings, process: Process, checkpoint_every: int | None) -> Trainer:
    """The trainer of a recipe's parts."""
    config = replace(parts.config, device=str(process.device), lines=parts.config.lines if process.first else None)
    if checkpoint_every is None and not config.checkpoint_every:
        checkpoint_every = usual_checkpoint_every(config, num_batches(parts.train_loader))
    if checkpoint_every is not None:
        config = replace(config, checkpoint_every=checkpoint_every)
    return Trainer(
        parts.model,
        parts.loss_fn,
        config,
        step_fn=parts.step_fn,
        metrics=parts.metrics,
        evaluate=parts.evaluate,
        stages=parts.stages,
        around=around,
        before_step=parts.before_step,
        after_step=parts.after_step,
    )


def compare(
    recipe: Recipe,
    given: Settings | None = None,
    *,
    fault: str | None = None,
    say: Callable[[str], object] | None = None,
    **how: Any,
) -> list[Result]:
    """The same training three times: clean, with a fault under a guard, with the fault and no guard.

    Without a name the first fault of the recipe is used. `say` gets a line before each run. `how` are the other
    arguments of `run_recipe`.
    """
    if not recipe.faults:
        raise InputError(f"{recipe.name} has no faults to compare with; run it without --compare")
    name = recipe.fault(fault).name if fault is not None else recipe.faults[0].name
    folder, runs = how.pop("checkpoint_dir", None), how.pop("run_dir", None)
    arms: tuple[tuple[str, str | None, bool], ...] = (
        ("clean", None, True),
        ("guarded", name, True),
        ("unguarded", name, False),
    )
    results = []
    for number, (arm, injected, guarded) in enumerate(arms, start=1):
        if say is not None:
            say(f"run {number} of {len(arms)}: {arm}" + (f", {injected}" if injected else ""))
        results.append(
            run_recipe(
                recipe,
                {**(given or {}), "arm": arm},
                fault=injected,
                guarded=guarded,
                checkpoint_dir=None if folder is None else Path(folder) / arm,
                run_dir=runs if runs is None or runs is False else Path(runs) / arm,
                **how,
            )
        )
    return results


def doctor_target(recipe: Recipe, given: Settings | None = None, *, quick: bool = False) -> dict[str, object]:
    """A recipe as a target of `trimtab doctor`, in its first stage."""
    return target_of(build_parts(recipe, settings_of(recipe, given or {}, quick=quick)))


def target_of(parts: Parts) -> dict[str, object]:
    """What `trimtab doctor` examines of a recipe: its first stage."""
    stage = parts.stages[0] if parts.stages else Stage()
    freeze(parts.model, stage)
    target: dict[str, object] = {"model": parts.model, "optimizer": make_optimizer(parts.model, stage, parts.config)}
    target |= {"loader": parts.train_loader, "val_loader": parts.val_loader}
    return target | ({"loss_fn": parts.loss_fn} if parts.step_fn is None else {"step_fn": parts.step_fn})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one run of a recipe ended."""

    recipe: str
    arm: str
    fault: str | None
    score_name: str
    score: float
    metrics: Mapping[str, float]
    num_steps: int
    seconds: float
    rejected: int
    weights_finite: bool
    findings: tuple[str, ...]
    actions: tuple[str, ...]
    stopped: str | None
    run_dirs: tuple[str, ...]
    facts: Mapping[str, object]
    history: tuple[Mapping[str, Any], ...] = field(repr=False)


def result_of(
    recipe: str,
    score: str,
    trainer: Trainer,
    arm: str,
    fault: str | None,
    stopped: str | None,
    facts: Mapping[str, object],
    seconds: float,
) -> Result:
    """The result of a finished trainer; `score` names the metric that counts (`-mae`: less is better)."""
    history: Sequence[Mapping[str, Any]] = trainer.history.epochs
    final = trainer.final_row or (history[-1] if history else {})
    last = {name: value for name, value in final.items() if isinstance(value, float)}
    last.pop("seconds", None)
    state = [t for t in trainer.model.state_dict().values() if t.is_floating_point()]
    name = score.removeprefix("-")
    return Result(
        recipe=recipe,
        arm=arm,
        fault=fault,
        score_name=name,
        score=last.get(name, math.nan),
        metrics=last,
        num_steps=trainer.course.steps_done,
        seconds=round(seconds, 2),
        rejected=trainer.rejected,
        weights_finite=all(bool(t.isfinite().all()) for t in state),
        findings=tuple(dict.fromkeys(finding.name for finding in trainer.findings)),
        actions=tuple(f"step {o.at}: {o.action} ({o.detail})" for o in trainer.outcomes),
        stopped=stopped,
        run_dirs=tuple(str(folder) for folder in trainer.run_dirs),
        facts=dict(facts),
        history=tuple(history),
    )


FACTOR = 1000.0


def rate_spike(parts: Parts, now: Callable[[Trainer], bool]) -> Parts:
    """Multiply the rate by 1000 while `now(trainer)`: in the optimizer before a step, and undone after it."""

    def scale(trainer: Trainer, factor: float) -> None:
        rig = trainer.rig
        for group in rig.optimizer.param_groups if rig is not None and now(trainer) else ():
            group["lr"] *= factor

    return replace(
        parts,
        before_step=lambda trainer: scale(trainer, FACTOR),
        after_step=lambda trainer: scale(trainer, 1.0 / FACTOR),
    )
