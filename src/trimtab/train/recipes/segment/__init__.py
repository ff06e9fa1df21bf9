"""System 001: two-stage segmentation of camouflaged objects; a frozen backbone first, then everything, gently.

The flags are the documented ones. Defaults that are others here, to fit two cores and the shipped pictures: batches of
8 (documented: 2), composed pictures of 48 pixels (384), 12 epochs with 3 in stage 1 (120, 30), a rate of 0.02
(0.00025), two worker processes or none (4), an average with a decay of 0.98 (0.999), a small backbone of our own
(edgenext_base), the device that is there (cuda), and checkpoints only where --checkpoint-dir is given (./checkpoints).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, TensorDataset

from trimtab.compat import checkpoint_pair as documented
from trimtab.compat.nn.gradient_checkpointing import add_gradient_checkpointing
from trimtab.core.config import MODES
from trimtab.core.errors import InputError
from trimtab.train.device import choose_device
from trimtab.train.evaluation import evaluate_model
from trimtab.train.recipe import AS_GIVEN, Option, Parts, Recipe, Settings, doctor_target
from trimtab.train.recipes.segment.data import MAX_SIDE, MIN_SIDE, compose
from trimtab.train.recipes.segment.faults import FAULTS, kill_at
from trimtab.train.recipes.segment.metrics import (
    mean_measures,
    measures_of_samples,
    overlaps_of_samples,
    segmentation_loss,
)
from trimtab.train.recipes.segment.model import BACKBONES, ConvBlock, Segmenter
from trimtab.train.recipes.segment.pictures import Pictures, find_pictures
from trimtab.train.recipes.segment.stages import ALL, LR, Plan, Rates, Wanted, plan_of, pretrain
from trimtab.train.settings import SCHEDULES, TrainConfig
from trimtab.train.stages import averaged_or
from trimtab.train.trainer import Trainer

HELD_OUT = 0.2
VAL_BATCH, SIDE, OWN_SIDE, OWN_WORKERS = 48, 48, 384, 2
DIV_FACTOR = 100.0
"""A cycle is documented as 0, peak, 0: it begins at a hundredth."""
GUARD = {"rules": {"update-ratio": {"shake": 0.1, "large": 0.1}}}
"""For a pre-trained network an update of a tenth of its weights is too much already."""
PREFETCHED = 4
"""Batches that each worker makes ahead: a picture that takes long to decode does not hold up a step."""
GOAL = 0.72
"""The IoU that the document aims at."""


def build(settings: Settings) -> Parts:
    """The scenes, the network, the stages, and the documented settings."""
    plan, rates = plan_of(settings), Rates(say=settings["say"])
    rows = _rows(settings)
    model = Segmenter(BACKBONES[settings["backbone"]], settings["num_experts"], deep=settings["deep_supervision"])
    if settings["gradient_checkpointing"]:
        add_gradient_checkpointing(model, ConvBlock.__name__)
    order, process = torch.Generator().manual_seed(settings["seed"]), settings["process"]
    sampler: Sampler[int] = RandomSampler(rows.train, generator=order)
    if process is not None:
        sampler = DistributedSampler(rows.train, process.num, process.rank, seed=settings["seed"])
    loader = DataLoader(
        rows.train,
        batch_size=settings["batch_size"],
        sampler=sampler,
        drop_last=len(rows.train) % settings["batch_size"] == 1,  # of one alone no spread can be measured
        num_workers=rows.num_workers,
        persistent_workers=rows.num_workers > 0,
        prefetch_factor=PREFETCHED if rows.num_workers else None,
        generator=order,
    )
    held, test = (_to_measure(one, rows) for one in (rows.val, rows.test))
    return Parts(
        model=model,
        train_loader=loader,
        val_loader=held,
        config=_config(settings, plan, len(loader)),
        loss_fn=segmentation_loss,
        evaluate=evaluate,
        stages=plan.stages,
        guard=GUARD,
        before_step=kill_at(settings["kill_at_step"]) if settings["kill_at_step"] else None,
        after_step=rates.note,
        begin=lambda parts: _begin(parts, plan, settings),
        finish=lambda trainer: _finish(trainer, held, test, rates),
        resume=AS_GIVEN if plan.weights is None else None,
        problems=rows.problems,
    )


def target() -> dict[str, object]:
    """For `trimtab doctor trimtab.train.recipes.segment:target`."""
    return doctor_target(RECIPE)


def evaluate(model: nn.Module, loader: Iterable[object]) -> dict[str, float]:
    """The loss, and the two measures that every epoch is judged by."""
    loss, rows = _measured(model, loader, overlaps_of_samples)
    return {"loss": loss, **mean_measures(rows)}


def _config(settings: Settings, plan: Plan, num_batches: int) -> TrainConfig:
    amp = "none" if settings["no_amp"] else settings["amp_dtype"]
    if amp == "auto" and choose_device(settings["device"]).type == "cpu":
        amp = "none"  # half precision takes longer on a CPU: 1.9 times in bfloat16, 10 times in float16
    steps_per_epoch = math.ceil(num_batches / settings["accumulation_steps"])
    return TrainConfig(
        learning_rate=plan.rate,
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["grad_clip"] or None,
        use_amp=amp != "none",
        amp_dtype="auto" if amp == "none" else amp,
        batch_size=settings["batch_size"],
        num_epochs=settings["epochs"],
        accumulation_steps=settings["accumulation_steps"],
        monitor="IoU",
        scheduler_type=settings["scheduler"],
        warmup_steps=settings["warmup_epochs"] * steps_per_epoch,
        div_factor=DIV_FACTOR,
        min_lr=settings["min_lr"],
        t_mult=settings["t_mult"],
        ema_decay=settings["ema_decay"] if settings["use_ema"] else None,
        mode=settings["mode"],
        full_every=10,
        lines="camoxpert",
        seed=settings["seed"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is trained and measured on, and how it is read; `test` is None where no split of that name is given."""

    train: Any
    val: Any
    test: Any = None
    side: int
    num_workers: int = 0
    problems: Callable[[], Iterable[str]] | None = None


def _rows(settings: Settings) -> Rows:
    """Composed from parts of pictures, others to measure on; or the user's own, with a share held out if none is."""
    seed, path, workers = settings["seed"], settings["data"], settings["num_workers"]
    if path is None:
        num, side = settings["num_images"], settings["img_size"] or SIDE
        scenes = compose(num, side, seed), compose(max(round(num * HELD_OUT), 2), side, seed, held_out=True)
        train, val = (TensorDataset(torch.from_numpy(one.images), torch.from_numpy(one.masks)) for one in scenes)
        return Rows(train=train, val=val, side=side, num_workers=workers or 0)
    found, side = find_pictures(Path(path)), settings["img_size"] or OWN_SIDE
    pairs, held = found.train, found.val
    if not held:
        order = np.random.default_rng(seed).permutation(len(pairs))
        num = max(round(len(order) * HELD_OUT), 1)
        held, pairs = tuple(pairs[i] for i in order[:num]), tuple(pairs[i] for i in order[num:])
    if len(pairs) < 2:
        raise InputError(f"{path} holds {len(found.train)} pictures; expected at least 3, of which one is held out")
    if settings["say"] is not None:
        where = "as given" if found.val else "held out"
        given = f", {len(found.test)} to test (as given)" if found.test else ""
        settings["say"](f"{path}: {len(pairs)} pictures to train, {len(held)} to validate ({where}){given}")
    kept = settings["cache_mb"] * 1_000_000
    shares = [kept * len(one) // (len(pairs) + len(held)) for one in (pairs, held)]
    sets = [Pictures(some, side, cache_bytes=share) for some, share in zip((pairs, held), shares, strict=True)]
    test = Pictures(found.test, side) if found.test else None
    return Rows(
        train=sets[0],
        val=sets[1],
        test=test,
        side=side,
        num_workers=OWN_WORKERS if workers is None else workers,
        problems=lambda: (one for some in (*sets, test) if some is not None for one in some.problems()),
    )


def _to_measure(rows: Any, of: Rows) -> DataLoader[tuple[Tensor, ...]] | None:
    """A loader to measure with; large pictures come in small batches, as all of them are in memory at once."""
    if rows is None:
        return None
    size = min(VAL_BATCH, max(VAL_BATCH * SIDE * SIDE // (of.side * of.side), 4))
    return DataLoader(rows, batch_size=size, num_workers=of.num_workers, persistent_workers=of.num_workers > 0)


def _measured(
    model: nn.Module, loader: Iterable[object], measure: Callable[[Tensor, Tensor], list[Mapping[str, float]]]
) -> tuple[float, list[Mapping[str, float]]]:
    """The loss over all samples, and the measures of each; no more than a batch is in memory."""
    rows: list[Mapping[str, float]] = []

    def step(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        predicted = model(batch[0])
        rows.extend(measure(predicted.logits.float().cpu(), batch[1].cpu()))
        return segmentation_loss(predicted, batch[1])

    return evaluate_model(model, loader, step_fn=step)["loss"], rows


def _begin(parts: Parts, plan: Plan, settings: Settings) -> None:
    """Weights of a checkpoint, or a backbone that has seen textures."""
    model = parts.model
    assert isinstance(model, Segmenter)
    if plan.weights is not None:
        if not documented.load_checkpoint(plan.weights, model, load_optimizer=False):
            raise InputError(f"there is no sound checkpoint at {plan.weights}; the log says why. Give another path")
        if settings["say"] is not None:
            settings["say"](f"weights of {plan.weights}")
    elif settings["pretrain_epochs"]:
        side = settings["img_size"] or (SIDE if settings["data"] is None else OWN_SIDE)
        wanted = Wanted(
            channels=BACKBONES[settings["backbone"]],
            side=min(max(side // 4 * 4, MIN_SIDE), MAX_SIDE),
            epochs=settings["pretrain_epochs"],
            seed=settings["seed"],
            device=settings["device"],
        )
        pretrain(model.backbone, wanted, settings["say"])


def _finish(trainer: Trainer, held: Any, test: Any, rates: Rates) -> dict[str, object]:
    """All measures of the final weights, the rates that were used, and how to continue after a stop."""
    rig = trainer.last_rig
    model = averaged_or(trainer.model, None if rig is None else rig.ema)
    measured = mean_measures(_measured(model, held if test is None else test, measures_of_samples)[1])
    facts: dict[str, object] = {**measured, "peak_lr": rates.rounded()}
    if test is not None:
        facts["measured on"] = f"the given test split, {len(test.dataset)} pictures"
    facts[f"goal: IoU of at least {GOAL}"] = "reached" if measured["IoU"] >= GOAL else "missed"
    if trainer.around.guarded and len(trainer.history.epochs) < sum(stage.epochs for stage in trainer.stages):
        slower = max(rates.peaks.get(ALL, {}).get("head", LR) / 2.0, 0.0)
        facts["to go on"] = f"trimtab train segment --resume best --lr {slower:g} --grad-clip 0.3"
    return facts


RECIPE = Recipe(
    name="segment",
    summary="two-stage segmentation of camouflaged objects: a frozen backbone first, then everything",
    score="IoU",
    build=build,
    options=(
        Option(
            name="data",
            default=None,
            kind=str,
            help="A folder with your pictures and masks; without it scenes are composed.",
            aliases=("dataset_path", "data_dir"),
        ),
        Option(name="resume_from", default=None, kind=str, help="Begin with the weights of this checkpoint, or best."),
        Option(name="backbone", default="conv-small", help="The backbone.", choices=tuple(BACKBONES)),
        Option(name="pretrain_epochs", default=8, help="Epochs on textures before stage 1; 0: from nothing.", least=0),
        Option(name="num_experts", default=7, help="Experts in the head.", least=1),
        Option(name="num_images", default=1024, help="Scenes to compose, and a fifth as many held out.", least=2),
        Option(name="batch_size", default=8, help="Pictures per batch (documented: 2).", least=1),
        Option(
            name="stage2_batch_size",
            default=None,
            kind=int,
            help="Pictures per batch in stage 2.",
            least=1,
        ),
        Option(name="accumulation_steps", default=4, help="Batches per step.", least=1),
        Option(
            name="img_size",
            default=None,
            kind=int,
            help=f"Side of a picture in pixels; {OWN_SIDE} for your own data, else {SIDE}.",
            least=16,
        ),
        Option(name="epochs", default=12, help="Epochs of both stages together (documented: 120).", least=1),
        Option(name="stage1_epochs", default=3, help="Epochs with a frozen backbone (documented: 30).", least=0),
        Option(name="skip_stage1", default=False, help="Begin with stage 2."),
        Option(
            name="lr",
            default=None,
            kind=float,
            help=f"The rate of stage 1, else {LR:g} (documented: 0.00025); after --resume best the head's in stage 2.",
        ),
        Option(name="stage2_lr", default=None, kind=float, help="The head's rate in stage 2; else half of --lr."),
        Option(name="weight_decay", default=1e-4, help="Weight decay.", least=0),
        Option(name="grad_clip", default=0.5, help="The largest gradient norm; 0: no clipping.", least=0),
        Option(name="scheduler", default="onecycle", help="How the rate changes.", choices=SCHEDULES),
        Option(name="min_lr", default=0.0, help="The lowest rate of the cosine schedules.", least=0),
        Option(name="warmup_epochs", default=0, help="Epochs of linear warm-up in each stage.", least=0),
        Option(name="t_mult", default=1, help="How much longer each cycle of cosine_restart is.", least=1),
        Option(name="progressive_unfreeze", default=False, help="Unfreeze the top of the backbone first."),
        Option(name="deep_supervision", default=False, help="Let coarser levels learn the mask, too."),
        Option(name="gradient_checkpointing", default=False, help="Less memory for more time."),
        Option(name="use_ema", default=False, help="Measure and keep an average of the weights."),
        Option(name="ema_decay", default=0.98, help="Decay of that average (documented: 0.999)."),
        Option(
            name="amp_dtype",
            default="auto",
            help="Mixed precision; auto is fp16 on a GPU and none on a CPU, where it takes longer.",
            choices=("auto", "none", "bf16", "fp16"),
        ),
        Option(name="no_amp", default=False, help="No mixed precision."),
        Option(
            name="num_workers",
            default=None,
            kind=int,
            help=f"Processes that read pictures (documented: 4); {OWN_WORKERS} for your own data, else 0.",
            least=0,
        ),
        Option(name="cache_mb", default=512, help="Decoded pictures of your own to keep, in MB at most.", least=0),
        Option(name="use_ddp", default=False, help="Several processes, started by torchrun; each reads a share."),
        Option(name="mode", default="act", help="Of the guard; raise stops at the first NaN or Inf.", choices=MODES),
        Option(
            name="kill_at_step",
            default=0,
            help="End as in a power cut before this step, to try --resume auto.",
            least=0,
        ),
    ),
    quick={"num_images": 192, "epochs": 6, "stage1_epochs": 2, "pretrain_epochs": 3, "img_size": 32},
    faults=FAULTS,
)
