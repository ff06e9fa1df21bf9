"""System 004: two images and a question, answered First, Second or Similar, alike whichever image comes first.

The documented rates are those for a model that was trained before. This one is small and begins from nothing, so the
first stage trains it, and the second does what the document does, with its constants. `--pretrain-epochs 0` leaves the
first one out: the documented rates alone then answer 0.66 of the unseen pairs, instead of 0.92.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trimtab.compat.line_sink import LineSink
from trimtab.compat.monitors.training_health import TrainingHealthMonitor
from trimtab.core.errors import InputError
from trimtab.core.types import Sink
from trimtab.train.own_data.picture_files import PictureFiles
from trimtab.train.recipe import Fault, Option, Parts, Recipe, Settings, doctor_target
from trimtab.train.recipes.pairs import data as pairs_data
from trimtab.train.recipes.pairs import reporting
from trimtab.train.recipes.pairs.data import own_pairs
from trimtab.train.recipes.pairs.model import W_SIM, PairFusion, PairLoss, evaluate_pairs
from trimtab.train.recipes.pairs.own_pictures import pairs_file, read_pairs
from trimtab.train.recipes.pairs.reporting import dry_run
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import Stage, num_steps
from trimtab.train.trainer import Trainer

ADAPTER_LR, PROJECTOR_LR, WEIGHT_DECAY = 2e-4, 2e-5, 0.1
BATCH_SIZE, EPOCHS, PATIENCE = 32, 3, 5
WARMUP_RATIO, MIN_LR_RATIO = 0.05, 0.01
GRADIENT_CLIP_NORM = 1.0
BUNDLED = ("digits", "emoji")
PRETRAIN, TUNE = "pretrain", "tune"
SHARE_HELD = 0.1
"""Held-out pairs as a share of the training pairs."""
HIGH_RATE = 10.0
FLIPPED = 1e30
FLIP_AT = 0.5
"""How much of the last stage is over when a bit flips."""


def build(settings: Settings) -> Parts:
    """The pairs, the model, the two stages and the documented settings."""
    sets = _sets(settings)
    train, words = sets.train, sets.words
    loader = _loader(train, settings)
    size = tuple(train.images.shape[1:])
    model = PairFusion(
        size=(size[0], size[1], size[2]),
        num_words=len(words),
        max_words=train.asked.prompts.shape[1],
        width=settings["width"],
        depth=settings["layers"],
        heads=settings["heads"],
    )
    if settings["compile"]:
        reporting.compile_blocks(model.blocks, settings["width"], settings["say"])
    loss, monitor = PairLoss(settings["w_sim"]), TrainingHealthMonitor(patience=settings["patience"] or PATIENCE)
    stages = _stages(settings)
    return Parts(
        model=model,
        train_loader=loader,
        val_loader=DataLoader(sets.held, batch_size=256, num_workers=settings["workers"]),
        config=_config(settings, stages[-1].epochs * len(loader)),
        step_fn=loss,
        evaluate=partial(evaluate_pairs, loss),
        stages=stages,
        sinks=_sinks(settings, monitor),
        # The swap term grows fourfold by design: a loss that climbs within the first 30 steps is normal.
        guard={"rules": {"diverging-loss": {"early": 30}}},
        before_step=partial(reporting.explain, settings),
        after_step=partial(reporting.log_memory, settings),
        begin=partial(_begin, settings, sets.line),
        within=partial(_within, settings, loss, len(loader)),
        finish=partial(_finish, settings, monitor, sets.test, loss),
        problems=partial(_problems, sets),
    )


def target() -> dict[str, object]:
    """For `trimtab doctor trimtab.train.recipes.pairs:target`."""
    return doctor_target(RECIPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets:
    """Pairs to train on, to validate on, and perhaps to test with; the words of the questions; a line for people."""

    train: pairs_data.PairSet
    held: pairs_data.PairSet
    words: tuple[str, ...]
    test: pairs_data.PairSet | None = None
    line: str = ""


def _sets(settings: Settings) -> Sets:
    found = _bundled(settings) if settings["data"] in BUNDLED else _own(settings)
    if len(found.train) < settings["batch_size"]:
        raise InputError(
            f"there are {len(found.train)} pairs to train on, too few for one batch of {settings['batch_size']}; give "
            "more pairs or a smaller --batch-size"
        )
    return found


def _bundled(settings: Settings) -> Sets:
    seed, num = settings["seed"], settings["num_pairs"]
    questions = pairs_data.DIGIT_QUESTIONS if settings["data"] == "digits" else pairs_data.EMOJI_QUESTIONS
    shown, levels = pairs_data.digits(seed) if settings["data"] == "digits" else pairs_data.emoji()
    rows = [(~shown.held_out).nonzero().flatten(), shown.held_out.nonzero().flatten()]
    train = pairs_data.ask(questions, levels, rows[0], num, seed)
    held = pairs_data.ask(questions, levels, rows[1], max(round(SHARE_HELD * num), 600), seed + 1)
    words = pairs_data.vocabulary([text for text, _, _ in questions])
    sets = [pairs_data.PairSet(shown.images, asked) for asked in (train, held)]
    return Sets(train=sets[0], held=sets[1], words=words)


def _own(settings: Settings) -> Sets:
    """The user's own: `pairs.csv` with pictures, or `pairs.npz`."""
    data, seed = settings["data"], settings["seed"]
    if not Path(data).exists():
        raise InputError(
            f"there is no {data!r}; expected a folder with pairs.csv and pictures, or with pairs.npz, or one of "
            f"{', '.join(BUNDLED)}"
        )
    if (file := pairs_file(data)) is not None:
        own = read_pairs(file, seed, settings["image_size"])
        sets = {part: pairs_data.PairSet(own.images, asked) for part, asked in own.parts.items()}
        return Sets(train=sets["train"], held=sets["val"], test=sets.get("test"), words=own.words, line=own.line)
    shown, train, held, words = own_pairs(data, seed)
    made = [pairs_data.PairSet(shown.images, asked) for asked in (train, held)]
    return Sets(train=made[0], held=made[1], words=words)


def _problems(sets: Sets) -> Iterator[str]:
    """Every picture that cannot be read, with file and row."""
    if isinstance(sets.train.images, PictureFiles):
        yield from sets.train.images.problems()


def _loader(data: pairs_data.PairSet, settings: Settings) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(
        data,
        batch_size=settings["batch_size"],
        shuffle=True,
        drop_last=True,
        num_workers=settings["workers"],
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(settings["seed"]),
    )


def _stages(settings: Settings) -> tuple[Stage, ...]:
    """First everything learns at one rate; then words and fusion are tuned, the projector slowly, vision is frozen."""
    factors = {"projector": settings["projector_lr"] / settings["learning_rate"]}
    before = settings["pretrain_epochs"]
    tune = Stage(name=TUNE, epochs=settings["epochs"], lr_factors=factors, frozen=("vision",) if before else ())
    if settings["dry_run"]:
        return (replace(tune, epochs=0),)
    if not before:
        return (tune,)
    return Stage(name=PRETRAIN, epochs=before, learning_rate=settings["pretrain_lr"]), tune


def _config(settings: Settings, tune_steps: int) -> TrainConfig:
    half = settings["amp_dtype"] != "none"
    return TrainConfig(
        learning_rate=settings["learning_rate"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["clip_grad_norm"] or None,
        use_amp=half,
        amp_dtype=settings["amp_dtype"] if half else "auto",
        batch_size=settings["batch_size"],
        num_epochs=settings["epochs"],
        max_steps=settings["max_steps"],
        patience=settings["patience"],
        scheduler_type="cosine",
        warmup_steps=round(WARMUP_RATIO * min(tune_steps, settings["max_steps"] or tune_steps)),
        warmup_init_lr=MIN_LR_RATIO
        * settings["learning_rate"],  # not from 0: a first step that is none looks like a fault
        min_lr_ratio=MIN_LR_RATIO,
        mode="act",
        seed=settings["seed"],
    )


# -- around the training ---------------------------------------------------------------------------------------------


def _sinks(settings: Settings, monitor: TrainingHealthMonitor) -> tuple[Sink, ...]:
    norms, every = reporting.NormSink(monitor), 1 if settings["debug"] else settings["grad_log_interval"]
    if settings["say"] is None or not every:
        return (norms,)
    return norms, LineSink("e13", every, write=settings["say"])


def _begin(settings: Settings, line: str, parts: Parts) -> None:
    say = settings["say"]
    if say is None:
        return
    if line:
        say(line)
    num = len(parts.train_loader.dataset), len(parts.val_loader.dataset)
    for line in reporting.banner(settings, parts.model, *num):
        say(line)


@contextmanager
def _within(settings: Settings, loss: PairLoss, num_batches: int, trainer: Trainer) -> Iterator[None]:
    def done_frac() -> float | None:
        stage = trainer.stages[-1] if trainer.rig is None else trainer.rig.stage
        if stage.name == PRETRAIN:
            return None
        return trainer.course.step / max(num_steps(stage, trainer.config, num_batches) or 1, 1)

    if settings["output_dir"] is not None and trainer.around.checkpoint_dir is None:
        trainer.around = replace(trainer.around, checkpoint_dir=_folder(settings) / "checkpoints")
    with reporting.switched(settings, settings["say"]):
        if settings["dry_run"]:
            dry_run(partial(doctor_target, RECIPE, {**settings, "dry_run": False, "say": None}), settings["say"])
        loss.done_frac = done_frac
        yield


def _finish(
    settings: Settings,
    monitor: TrainingHealthMonitor,
    test: pairs_data.PairSet | None,
    loss: PairLoss,
    trainer: Trainer,
) -> dict[str, object]:
    if settings["dry_run"]:
        return {"dry_run": "everything was built and checked; nothing was trained"}
    report = reporting.report_health(trainer, monitor, settings["say"])
    if settings["output_dir"] is not None:
        reporting.write_files(_folder(settings), trainer, settings, report)
    last = trainer.history.epochs[-1] if trainer.history.epochs else {}
    facts = {name: last[name] for name in last if name.startswith(("accuracy_", "swap_"))}
    if test is not None:
        found = evaluate_pairs(loss, trainer.model, DataLoader(test, batch_size=256))
        facts |= {f"test_{name}": value for name, value in found.items()}
    return {**facts, "training_healthy": report["training_healthy"], "issues": "; ".join(report["issues"]) or "none"}


def _folder(settings: Settings) -> Path:
    return Path(settings["output_dir"]) / (settings["arm"] or "")


# -- faults: each is answered under a guard, and ruins the run without -------------------------------------------------


class Spoilt:
    """Images as they are, but for one pixel of one of them."""

    def __init__(self, images: pairs_data.Images, at: int) -> None:
        self._images, self._at = images, at

    @property
    def shape(self) -> Sequence[int]:
        """That of all images."""
        return self._images.shape

    def __getitem__(self, index: Tensor) -> Tensor:
        """One image."""
        found = self._images[index]
        if int(index) == self._at:
            found = found.clone()
            found[0, 0, 0] = math.nan
        return found


def _nan_pixel(parts: Parts, settings: Settings) -> Parts:
    """One image that many pairs show has one pixel of NaN."""
    data = parts.train_loader.dataset
    shown = int(torch.cat([data.asked.first, data.asked.second]).bincount().argmax())
    images = Spoilt(data.images, shown)
    return replace(parts, train_loader=_loader(pairs_data.PairSet(images, data.asked), settings))


def _high_rate(parts: Parts, settings: Settings) -> Parts:
    """The rate of the last stage is ten, in every group."""
    *before, last = parts.stages
    return replace(parts, stages=(*before, replace(last, learning_rate=HIGH_RATE, lr_factors={})))


def _bit_flip(parts: Parts, settings: Settings) -> Parts:
    """One weight is overwritten from outside, as by a bit that flips."""
    last, total = parts.stages[-1], parts.stages[-1].epochs * len(parts.train_loader)

    def flip(trainer: Trainer) -> None:
        if parts.before_step is not None:
            parts.before_step(trainer)
        rig, model = trainer.rig, trainer.model
        assert rig is not None
        assert isinstance(model, PairFusion)
        if rig.stage.name == last.name and trainer.course.step == int(FLIP_AT * total):
            with torch.no_grad():
                model.head.weight[0, 0] = FLIPPED

    return replace(parts, before_step=flip)


RECIPE = Recipe(
    name="pairs",
    summary="two images and a question, answered First, Second or Similar, with swap consistency",
    score="accuracy",
    build=build,
    options=(
        Option(
            name="data",
            default="digits",
            aliases=("data_dir", "dataset_path"),
            help="Your folder: pairs.csv (image_a, image_b, question, answer) and pictures, or pairs.npz; or digits or "
            "emoji, which ship with trimtab.",
        ),
        Option(name="image_size", default=64, help="The side your pictures are brought to.", least=8),
        Option(name="workers", default=0, help="Processes that decode your pictures.", least=0),
        Option(name="output_dir", default=None, kind=str, help="Where to write weights, history, report, checkpoints."),
        Option(name="num_pairs", default=6_400, help="How many pairs are drawn to train on.", least=1),
        Option(name="epochs", default=EPOCHS, help="Passes over the pairs in the documented stage.", least=1),
        Option(name="pretrain_epochs", default=3, help="Passes before it, at a rate of their own; 0: none.", least=0),
        Option(name="pretrain_lr", default=2e-3, help="The rate of these."),
        Option(name="max_steps", default=None, kind=int, help="Optimizer steps at most, in all.", least=1),
        Option(name="batch_size", default=BATCH_SIZE, help="Pairs per step.", least=2),
        Option(name="learning_rate", default=ADAPTER_LR, help="The rate of words, fusion and head."),
        Option(name="projector_lr", default=PROJECTOR_LR, help="The rate of the projector."),
        Option(name="weight_decay", default=WEIGHT_DECAY, help="Weight decay.", least=0),
        Option(name="w_sim", default=W_SIM, help="The weight of Similar in the loss."),
        Option(name="patience", default=PATIENCE, help="Epochs without improvement before it stops; 0: never."),
        Option(name="clip_grad_norm", default=GRADIENT_CLIP_NORM, help="The largest gradient norm; 0: off.", least=0),
        Option(name="amp_dtype", default="none", help="Mixed precision.", choices=("bf16", "fp16", "none")),
        Option(name="grad_log_interval", default=10, help="The [GRAD] line every this many steps; 0: never.", least=0),
        Option(name="gpu_log_interval", default=100, help="A line about memory every this many steps.", least=0),
        Option(name="cudnn_benchmark", default=False, help="Let cuDNN choose algorithms by their speed."),
        Option(name="compile", default=False, help="Compile the fusion blocks, where there is a compiler."),
        Option(name="deterministic", default=False, help="Only algorithms that give the same bits every time."),
        Option(name="debug", default=False, help="Say more: each parameter, and the [GRAD] line of every step."),
        Option(name="dry_run", default=False, help="Build and check everything, train nothing."),
        Option(name="width", default=64, help="Width of the model."),
        Option(name="layers", default=2, help="Fusion blocks.", least=1),
        Option(name="heads", default=4, help="Attention heads.", least=1),
    ),
    quick={"num_pairs": 1_600, "pretrain_epochs": 4, "epochs": 1},
    faults=(
        Fault(name="nan-pixel", summary="one image has a pixel of NaN", inject=_nan_pixel),
        Fault(name="lr-10", summary=f"the learning rate of the last stage is {HIGH_RATE:g}", inject=_high_rate),
        Fault(
            name="bit-flip",
            summary=f"half-way through the last stage a weight becomes {FLIPPED:g}",
            inject=_bit_flip,
        ),
    ),
)
