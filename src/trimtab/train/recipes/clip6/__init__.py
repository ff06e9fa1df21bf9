"""System 000: six modalities of the same things, brought together by one loss; each is then found by the others.

The user's own samples (`--data PATH`) have two to six modalities, some of which may be missing: see `own_views.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.compat.line_sink import LineSink
from trimtab.core.config import PolicyConfig
from trimtab.core.errors import InputError
from trimtab.losses import NWayLoss, nway_cost
from trimtab.losses.similarity import SIMILARITIES as KNOWN
from trimtab.train.evaluation import Evaluate, StepFn
from trimtab.train.recipe import Fault, Option, Parts, Recipe, Settings, doctor_target, rate_spike
from trimtab.train.recipes.clip6.metrics import MetricsFile, Retrieval, retrieval
from trimtab.train.recipes.clip6.model import (
    LARGEST_BATCH,
    OriginalLoss,
    SixTowers,
    contrastive_loss,
    image_tower,
    own_loss,
    text_tower,
    vector_tower,
)
from trimtab.train.recipes.clip6.own_towers import make_towers
from trimtab.train.recipes.clip6.own_views import PRESENT, How, OwnViews, collate_views, read_views
from trimtab.train.recipes.clip6.views import NUM_VIEWS, emoji_views, generated_views, make_loader
from trimtab.train.settings import SCHEDULES, TrainConfig
from trimtab.train.trainer import Trainer

LOST_FRAC = 0.05
SPIKE_STEPS = 10


def _with_views(parts: Parts, settings: Settings, views: list[Tensor]) -> Parts:
    return replace(parts, train_loader=make_loader(views, parts.config.batch_size, settings["seed"]))


def _views(parts: Parts) -> list[Tensor]:
    rows = parts.train_loader.dataset
    if not isinstance(rows, TensorDataset):
        raise InputError("this fault is put into the data that ship with trimtab; leave --data out, or try lr-x1000")
    return [view.clone() for view in rows.tensors]


def _nan_image(parts: Parts, settings: Settings) -> Parts:
    views = _views(parts)
    views[0].flatten(1)[0, 7] = math.nan
    # The samples of that batch are left out from then on: as many steps take more epochs.
    config = replace(parts.config, num_epochs=2 * parts.config.num_epochs)
    return replace(_with_views(parts, settings, views), config=config)


def _zero_rows(parts: Parts, settings: Settings) -> Parts:
    views = _views(parts)
    draw = torch.Generator().manual_seed(settings["seed"])
    for view in views[1:]:
        view[torch.rand(len(view), generator=draw) < LOST_FRAC] = 0.0
    return _with_views(parts, settings, views)


def _lr_spike(parts: Parts, settings: Settings) -> Parts:
    """A bug multiplies the rate by 1000 for some steps: written into the optimizer, and taken out again."""
    first = settings["steps"] // 2
    return rate_spike(parts, lambda trainer: first <= trainer.course.step < first + SPIKE_STEPS)


FAULTS = (
    Fault(name="nan-image", summary="one training picture holds a NaN", inject=_nan_image),
    Fault(
        name="lr-x1000",
        summary=f"the rate is 1000 times too high for {SPIKE_STEPS} steps in the middle",
        inject=_lr_spike,
    ),
    Fault(
        name="zero-rows",
        summary=f"{LOST_FRAC:.0%} of the names are lost, and their rows zero: --loss original makes NaN of them",
        inject=_zero_rows,
    ),
)


OBJECTIVES = ("axis", "joint", "full", "pairwise")
SIMILARITIES = {0: "mip", 1: "norm", 2: "cosmean", 3: "dist"}
"""The similarity that is meant by each documented version of the stable loss."""
RATE, JOINT_RATE = 2e-3, 1e-3
BATCHES = {"emoji": 128, "views": 64}
OWN_BATCH = 64
TEXT_DROPOUT, OWN_TEXT_DROPOUT = 0.85, 0.5
BATCHES_OF_ALL = (16, 12, 8, 6, 4)
STEP_S = 0.1
"""The most estimated seconds for a step of the objective `full`, if the batch is not given."""
NUM_LOSSES = 8
"""Batches of the held-out part whose loss is measured; all of it takes part in the retrieval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a run learns from: the names of its modalities, its loaders, a tower for each, and what belongs to them."""

    names: tuple[str, ...]
    train: DataLoader[Any]
    held: DataLoader[Any]
    towers: list[nn.Module]
    step_fn: StepFn
    test: DataLoader[Any] | None = None
    lines: tuple[str, ...] = ()
    problems: Callable[[], Iterator[str]] | None = None


def build(settings: Settings) -> Parts:
    """The views, a tower for each, and the chosen loss."""
    own = None if settings["data"] in BATCHES else read_views(settings["data"], _how(settings))
    settings = _resolved(settings, own)
    size, line = batch_size(settings, own)
    sources = _bundled(settings, size) if own is None else _own(own, settings, size)
    steps = settings["epochs"] * len(sources.train) if settings["epochs"] else settings["steps"]
    config = TrainConfig(
        learning_rate=_rate(settings),
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["gradient_clip_value"] or None,
        use_amp=settings["amp_dtype"] != "none",
        amp_dtype=settings["amp_dtype"] if settings["amp_dtype"] != "none" else "auto",
        batch_size=size,
        num_epochs=math.ceil(steps / len(sources.train)),
        max_steps=steps,
        scheduler_type=settings["scheduler"],
        warmup_steps=settings["warmup_steps"],
        ema_decay=settings["ema_decay"] or None,
        monitor="r1",
        mode="act",
        full_every=10,
        seed=settings["seed"],
    )
    examined: list[Retrieval] = []
    say = settings["say"]
    evaluate = _examination(sources.names, sources.held.batch_size or size, examined, product=_product(settings))
    return Parts(
        model=SixTowers(sources.towers, _criterion(settings, len(sources.names))),
        train_loader=sources.train,
        val_loader=sources.held,
        config=config,
        step_fn=sources.step_fn,
        evaluate=evaluate,
        sinks=_sinks(settings),
        policy=PolicyConfig(quiet=5, ring_every=5),
        begin=None if say is None else partial(_begin, say, (*sources.lines, line)),
        finish=lambda trainer: {"batch_size": size, **_found(trainer, examined, evaluate, sources.test)},
        problems=sources.problems,
    )


def _begin(say: Callable[[str], object], lines: Sequence[str], parts: Parts) -> None:
    for line in lines:
        say(line)


def _resolved(settings: Settings, own: OwnViews | None) -> dict[str, Any]:
    """The settings with what is right for these data where nothing was given."""
    found = dict(settings)
    if found["objective"] == "auto":
        found["objective"] = "axis" if own is None or own.whole else "pairwise"
    if found["text_dropout"] is None:
        found["text_dropout"] = TEXT_DROPOUT if own is None else OWN_TEXT_DROPOUT
    if own is not None and not own.whole and _is_original(found):
        raise InputError("some samples lack a modality, which the original loss cannot leave out; use --loss stable")
    return found


def _how(settings: Settings) -> How:
    return How(
        side=settings["image_size"],
        width=settings["text_features"],
        seed=settings["seed"],
        modalities=settings["modalities"],
    )


def _bundled(settings: Settings, size: int) -> Sources:
    width, seed = settings["width"], settings["seed"]
    if settings["data"] == "views":
        views = generated_views(seed)
        towers = [vector_tower(view.shape[1], width) for view in views.train]
    else:
        views = emoji_views(settings["text_features"])
        towers = [image_tower(width, channels=settings["channels"], dropout=settings["dropout"])]
        towers += [text_tower(view.shape[1], width, dropout=settings["text_dropout"]) for view in views.train[1:]]
    return Sources(
        names=views.names,
        train=make_loader(views.train, size, seed),
        held=make_loader(views.held, size),
        towers=towers,
        step_fn=contrastive_loss,
    )


def _own(own: OwnViews, settings: Settings, size: int) -> Sources:
    workers = settings["workers"]

    def measured(part: str) -> DataLoader[Any]:
        rows = own.parts[part]
        return DataLoader(rows, batch_size=min(size, len(rows)), num_workers=workers, collate_fn=collate_views)

    order = torch.Generator().manual_seed(settings["seed"])
    return Sources(
        names=tuple(one.name for one in own.modalities),
        train=DataLoader(
            own.parts["train"],
            batch_size=size,
            shuffle=True,
            drop_last=True,
            generator=order,
            num_workers=workers,
            collate_fn=collate_views,
        ),
        held=measured("val"),
        test=measured("test") if "test" in own.parts else None,
        towers=make_towers(own.modalities, settings),
        step_fn=own_loss,
        lines=own.lines,
        problems=own.problems,
    )


def _found(
    trainer: Trainer, examined: list[Retrieval], evaluate: Evaluate, test: DataLoader[Any] | None
) -> dict[str, object]:
    """The last retrieval, and that of the test samples if there are any."""
    found: dict[str, object] = {"retrieval": examined[-1]} if examined else {}
    if test is not None:
        evaluate(trainer.model, test)
        found["test_retrieval"] = examined[-1]
    return found


def batch_size(settings: Settings, own: OwnViews | None = None) -> tuple[int, str]:
    """The batch in force and a line about it; InputError if the given one is too large to compute."""
    name, objective, given = _similarity(settings), settings["objective"], settings["batch_size"]
    num = NUM_VIEWS if own is None else len(own.columns)
    if own is not None and given > (most := len(own.parts["train"])):
        raise InputError(f"batch_size is {given}, but there are {most} samples to train on; give a smaller one")
    if _is_original(settings):
        largest = int(LARGEST_BATCH ** (NUM_VIEWS / num))
        if given > largest:
            raise InputError(
                f"the original loss keeps every one of the B^{num} logits: a batch of {given} does not fit; "
                f"expected at most {largest}, or --loss stable"
            )
        size = _at_most(given or 8, own)
        return size, f"the original loss, version 0: {size}^{num} = {size**num:,} logits a step"
    if objective != "full":
        size = given or _at_most(BATCHES.get(settings["data"], OWN_BATCH), own)
        return size, f"objective {'axis' if objective == 'auto' else objective}, similarity {name}: batch {size}"
    times = {b: _cost(b, num, settings) for b in ((given,) if given else BATCHES_OF_ALL)}
    fitting = [b for b, seconds in times.items() if seconds <= (60.0 if given else STEP_S)]
    if not fitting and given:
        raise InputError(
            f"the objective full looks at {given}^{num} tuples, about {times[given]:.0f} s a step; give a "
            f"smaller --batch-size (without it one is chosen that fits) or --objective axis"
        )
    size = _at_most(max(fitting, default=min(times)), own)
    return size, f"objective full, similarity {name}: batch {size} fits, {size}^{num} = {size**num:,} tuples"


def _at_most(size: int, own: OwnViews | None) -> int:
    return size if own is None else max(min(size, len(own.parts["train"])), 2)


def _rate(settings: Settings) -> float:
    """Emoji under `joint` diverge for a while at the rate that is right for the others."""
    given: float | None = settings["learning_rate"]
    joint = settings["objective"] == "joint" and settings["data"] == "emoji" and not _is_original(settings)
    return given if given is not None else JOINT_RATE if joint else RATE


def target() -> dict[str, object]:
    """For `trimtab doctor trimtab.train.recipes.clip6:target`."""
    return doctor_target(RECIPE, quick=True)  # small, so that checks which train a little have the time to


def _cost(size: int, num: int, settings: Settings) -> float:
    cost = nway_cost(num, size, settings["width"], similarity=_similarity(settings), objective="full")
    return cost.time_s


def _is_original(settings: Settings) -> bool:
    return settings["loss"] == "original" or not settings["use_stable_loss"]


def _similarity(settings: Settings) -> str:
    version = settings["stable_loss_version"]
    if version not in SIMILARITIES:
        raise InputError(f"stable_loss_version is {version}; expected 0 (einsum), 1 (norm), 2 (cosine) or 3 (distance)")
    return SIMILARITIES[version] if settings["similarity"] == "auto" else str(settings["similarity"])


def _product(settings: Settings) -> bool:
    return _is_original(settings) or _similarity(settings) == "mip"


def _criterion(settings: Settings, num: int) -> nn.Module:
    if _is_original(settings):
        return OriginalLoss()
    return NWayLoss(_similarity(settings), settings["objective"], modalities=num, label_smoothing=settings["smoothing"])


def _sinks(settings: Settings) -> tuple[LineSink | MetricsFile, ...]:
    sinks: list[LineSink | MetricsFile] = []
    if settings["enable_gradient_monitoring"]:
        sinks.append(LineSink("a11", every=settings["log_frequency"], write=settings["say"]))
    if settings["metrics_file"]:
        sinks.append(MetricsFile(settings["metrics_file"]))
    return tuple(sinks)


def _examination(names: tuple[str, ...], size: int, examined: list[Retrieval], *, product: bool) -> Evaluate:
    @torch.no_grad()
    def evaluate(model: nn.Module, loader: Iterable[Sequence[Tensor] | Mapping[str, Tensor]]) -> Mapping[str, float]:
        assert isinstance(model, SixTowers)
        device = next(model.parameters()).device
        was = model.training
        encoded: list[list[Tensor]] = []
        present: list[Tensor] = []
        losses: list[Tensor] = []
        model.eval()
        try:
            for batch in loader:
                views, there = _taken_apart(batch, device)
                encoded.append(model(views, there))
                present.append(
                    torch.ones(len(views[0]), len(views), dtype=torch.bool) if there is None else there.cpu()
                )
                if len(losses) < NUM_LOSSES and len(encoded[-1][0]) == size:
                    masked = {} if there is None else {"mask": there.T}
                    losses.append(model.criterion(encoded[-1], **masked))
        finally:
            model.train(was)
        rows = [torch.cat(rows) for rows in zip(*encoded, strict=True)]
        examined.append(retrieval(rows, names, product=product, present=torch.cat(present)))
        loss = float(torch.stack(losses).mean()) if losses else math.nan
        return {"loss": loss, **examined[-1].metrics()}

    return evaluate


def _taken_apart(
    batch: Sequence[Tensor] | Mapping[str, Tensor], device: torch.device
) -> tuple[list[Tensor], Tensor | None]:
    """The views of a batch on a device, and which of them are there if some may be missing."""
    if not isinstance(batch, Mapping):
        return [view.to(device) for view in batch], None
    there = batch.get(PRESENT)
    views = [view.to(device) for name, view in batch.items() if name != PRESENT]
    return views, None if there is None else there.to(device)


RECIPE = Recipe(
    name="clip6",
    summary="six modalities, emoji and their names in five languages, in one space by a stable N-way loss",
    score="r1",
    build=build,
    options=(
        Option(
            name="data",
            default="emoji",
            aliases=("dataset_path", "data_dir"),
            help="Your samples: pictures with captions_*.json, a .csv or .jsonl with a column per modality, an .npz or "
            "a folder of .npy; or emoji, or six generated views.",
        ),
        Option(
            name="modalities",
            default="",
            help="Which of your columns or arrays, with commas; NAME=KIND says what one is: image, depth, text, "
            "series, vector.",
        ),
        Option(name="towers", default=None, kind=str, help="module:function that makes encoders of your own."),
        Option(name="image_size", default=64, help="The side your pictures are brought to.", least=8),
        Option(name="workers", default=0, help="Processes that read your samples.", least=0),
        Option(name="loss", default="stable", help="What it is trained with.", choices=("stable", "original")),
        Option(
            name="objective",
            default="auto",
            help="Which tuples compete; auto: axis, or pairwise where samples lack modalities.",
            choices=("auto", *OBJECTIVES),
        ),
        Option(
            name="similarity",
            default="auto",
            help="Of a tuple, as nway_loss knows it; auto: by the version.",
            choices=("auto", *KNOWN),
        ),
        Option(name="stable_loss_version", default=1, help="0 einsum, 1 norm, 2 cosine, 3 distance."),
        Option(name="use_stable_loss", default=True, help="false is --loss original."),
        Option(name="steps", default=360, help="Optimizer steps."),
        Option(name="epochs", default=None, kind=int, help="Passes over the samples, instead of steps.", least=1),
        Option(name="batch_size", default=0, help="Samples per step; 0: what fits the objective.", least=0),
        Option(
            name="learning_rate",
            default=None,
            kind=float,
            help=f"The base rate; {RATE:g}, or {JOINT_RATE:g} for joint.",
        ),
        Option(name="weight_decay", default=0.05, help="Weight decay."),
        Option(name="gradient_clip_value", default=1.0, help="The largest gradient norm; 0: no clipping."),
        Option(name="enable_gradient_monitoring", default=True, help="The documented line about gradients."),
        Option(name="log_frequency", default=100, help="After how many steps that line comes."),
        Option(name="metrics_file", default=None, kind=str, help="A file for one JSON object a step, grad/* in it."),
        Option(name="scheduler", default="cosine", help="How the rate changes.", choices=SCHEDULES),
        Option(name="warmup_steps", default=50, help="Steps of linear warm-up."),
        Option(name="ema_decay", default=0.0, help="Decay of an average of the weights; 0: none."),
        Option(name="amp_dtype", default="none", help="Mixed precision.", choices=("none", "bf16", "fp16")),
        Option(name="width", default=256, help="Numbers in an encoding."),
        Option(name="text_features", default=4096, help="Numbers that stand for a name."),
        Option(name="channels", default=16, help="Channels of the first convolution."),
        Option(name="dropout", default=0.2, help="Before the last layer of the picture's tower."),
        Option(
            name="text_dropout",
            default=None,
            kind=float,
            help=f"Of the features of a text; {TEXT_DROPOUT:g} for emoji, {OWN_TEXT_DROPOUT:g} for yours.",
        ),
        Option(name="smoothing", default=0.0, help="Label smoothing."),
    ),
    quick={
        "steps": 66,
        "warmup_steps": 10,
        "learning_rate": 5e-3,
        "width": 128,
        "channels": 8,
        "text_features": 1024,
        "text_dropout": 0.6,
    },
    faults=FAULTS,
)
