"""System 000: six modalities of the same things, brought together by one loss; each is then found by the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trimtab.compat.line_sink import LineSink
from trimtab.core.config import PolicyConfig
from trimtab.core.errors import InputError
from trimtab.losses import NWayLoss, nway_cost
from trimtab.losses.similarity import SIMILARITIES as KNOWN
from trimtab.train.evaluation import Evaluate
from trimtab.train.recipe import Fault, Option, Parts, Recipe, Settings, doctor_target, rate_spike
from trimtab.train.recipes.clip6.metrics import MetricsFile, Retrieval, retrieval
from trimtab.train.recipes.clip6.model import (
    LARGEST_BATCH,
    OriginalLoss,
    SixTowers,
    contrastive_loss,
    image_tower,
    text_tower,
    vector_tower,
)
from trimtab.train.recipes.clip6.views import NUM_VIEWS, SixViews, emoji_views, generated_views, make_loader
from trimtab.train.settings import SCHEDULES, TrainConfig

LOST_FRAC = 0.05
SPIKE_STEPS = 10


def _with_views(parts: Parts, settings: Settings, views: list[Tensor]) -> Parts:
    return replace(parts, train_loader=make_loader(views, parts.config.batch_size, settings["seed"]))


def _views(parts: Parts) -> list[Tensor]:
    return [view.clone() for view in parts.train_loader.dataset.tensors]


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
BATCHES_OF_ALL = (16, 12, 8, 6, 4)
STEP_S = 0.1
"""The most estimated seconds for a step of the objective `full`, if the batch is not given."""
NUM_LOSSES = 8
"""Batches of the held-out part whose loss is measured; all of it takes part in the retrieval."""


def build(settings: Settings) -> Parts:
    """The six views, a tower for each, and the chosen loss."""
    size, line = batch_size(settings)
    views = emoji_views(settings["text_features"]) if settings["data"] == "emoji" else generated_views(settings["seed"])
    loader = make_loader(views.train, size, settings["seed"])
    config = TrainConfig(
        learning_rate=_rate(settings),
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["gradient_clip_value"] or None,
        use_amp=settings["amp_dtype"] != "none",
        amp_dtype=settings["amp_dtype"] if settings["amp_dtype"] != "none" else "auto",
        batch_size=size,
        num_epochs=math.ceil(settings["steps"] / len(loader)),
        max_steps=settings["steps"],
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
    return Parts(
        model=_model(views, settings),
        train_loader=loader,
        val_loader=make_loader(views.held, size),
        config=config,
        step_fn=contrastive_loss,
        evaluate=_examination(views.names, size, examined, product=_product(settings)),
        sinks=_sinks(settings),
        policy=PolicyConfig(quiet=5, ring_every=5),
        begin=None if say is None else lambda parts: say(line),
        finish=lambda trainer: {"batch_size": size, "retrieval": examined[-1]} if examined else {"batch_size": size},
    )


def batch_size(settings: Settings) -> tuple[int, str]:
    """The batch in force and a line about it; InputError if the given one is too large to compute."""
    name, objective, given = _similarity(settings), settings["objective"], settings["batch_size"]
    if _is_original(settings):
        if given > LARGEST_BATCH:
            raise InputError(
                f"the original loss keeps every one of the B^{NUM_VIEWS} logits: a batch of {given} does not fit; "
                f"expected at most {LARGEST_BATCH}, or --loss stable"
            )
        size = given or 8
        return size, f"the original loss, version 0: {size}^{NUM_VIEWS} = {size**NUM_VIEWS:,} logits a step"
    if objective != "full":
        size = given or BATCHES[settings["data"]]
        return size, f"objective {objective}, similarity {name}: batch {size}"
    times = {b: _cost(b, settings) for b in ((given,) if given else BATCHES_OF_ALL)}
    fitting = [b for b, seconds in times.items() if seconds <= (60.0 if given else STEP_S)]
    if not fitting and given:
        raise InputError(
            f"the objective full looks at {given}^{NUM_VIEWS} tuples, about {times[given]:.0f} s a step; give a "
            f"smaller --batch-size (without it one is chosen that fits) or --objective axis"
        )
    size = max(fitting, default=min(times))
    return (
        size,
        f"objective full, similarity {name}: batch {size} fits, {size}^{NUM_VIEWS} = {size**NUM_VIEWS:,} tuples",
    )


def _rate(settings: Settings) -> float:
    """Emoji under `joint` diverge for a while at the rate that is right for the others."""
    given: float | None = settings["learning_rate"]
    joint = settings["objective"] == "joint" and settings["data"] == "emoji" and not _is_original(settings)
    return given if given is not None else JOINT_RATE if joint else RATE


def target() -> dict[str, object]:
    """For `trimtab doctor trimtab.train.recipes.clip6:target`."""
    return doctor_target(RECIPE, quick=True)  # small, so that checks which train a little have the time to


def _cost(size: int, settings: Settings) -> float:
    cost = nway_cost(NUM_VIEWS, size, settings["width"], similarity=_similarity(settings), objective="full")
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


def _model(views: SixViews, settings: Settings) -> SixTowers:
    width = settings["width"]
    if _is_original(settings):
        criterion: nn.Module = OriginalLoss()
    else:
        criterion = NWayLoss(
            _similarity(settings), settings["objective"], modalities=NUM_VIEWS, label_smoothing=settings["smoothing"]
        )
    if settings["data"] == "views":
        return SixTowers([vector_tower(view.shape[1], width) for view in views.train], criterion)
    image = image_tower(width, channels=settings["channels"], dropout=settings["dropout"])
    texts = [text_tower(view.shape[1], width, dropout=settings["text_dropout"]) for view in views.train[1:]]
    return SixTowers([image, *texts], criterion)


def _sinks(settings: Settings) -> tuple[LineSink | MetricsFile, ...]:
    sinks: list[LineSink | MetricsFile] = []
    if settings["enable_gradient_monitoring"]:
        sinks.append(LineSink("a11", every=settings["log_frequency"], write=settings["say"]))
    if settings["metrics_file"]:
        sinks.append(MetricsFile(settings["metrics_file"]))
    return tuple(sinks)


def _examination(names: tuple[str, ...], size: int, examined: list[Retrieval], *, product: bool) -> Evaluate:
    @torch.no_grad()
    def evaluate(model: nn.Module, loader: Iterable[Sequence[Tensor]]) -> Mapping[str, float]:
        assert isinstance(model, SixTowers)
        device = next(model.parameters()).device
        was = model.training
        encoded: list[list[Tensor]] = []
        losses: list[Tensor] = []
        model.eval()
        try:
            for views in loader:
                encoded.append(model([view.to(device) for view in views]))
                if len(losses) < NUM_LOSSES and len(encoded[-1][0]) == size:
                    losses.append(model.criterion(encoded[-1]))
        finally:
            model.train(was)
        examined.append(retrieval([torch.cat(rows) for rows in zip(*encoded, strict=True)], names, product=product))
        loss = float(torch.stack(losses).mean()) if losses else math.nan
        return {"loss": loss, **examined[-1].metrics()}

    return evaluate


RECIPE = Recipe(
    name="clip6",
    summary="six modalities, emoji and their names in five languages, in one space by a stable N-way loss",
    score="r1",
    build=build,
    options=(
        Option(name="data", default="emoji", help="Emoji and names, or six generated views.", choices=tuple(BATCHES)),
        Option(name="loss", default="stable", help="What it is trained with.", choices=("stable", "original")),
        Option(name="objective", default="axis", help="Which tuples compete.", choices=OBJECTIVES),
        Option(
            name="similarity",
            default="auto",
            help="Of a tuple, as nway_loss knows it; auto: by the version.",
            choices=("auto", *KNOWN),
        ),
        Option(name="stable_loss_version", default=1, help="0 einsum, 1 norm, 2 cosine, 3 distance."),
        Option(name="use_stable_loss", default=True, help="false is --loss original."),
        Option(name="steps", default=360, help="Optimizer steps."),
        Option(name="batch_size", default=0, help="Tuples of six per step; 0: what fits the objective."),
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
        Option(name="text_dropout", default=0.85, help="Of the features of a name."),
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
