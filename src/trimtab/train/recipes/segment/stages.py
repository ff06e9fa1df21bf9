"""The stages of the segmentation: which weights it begins with, what is frozen, and how fast each part learns.

The stage before the first teaches a backbone to tell textures apart before it has to find objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.compat import checkpoint_pair as documented
from trimtab.core.errors import CheckpointError, InputError
from trimtab.core.presets import get_preset
from trimtab.train.evaluation import classification_metrics
from trimtab.train.progress import Progress
from trimtab.train.recipe import Settings
from trimtab.train.recipes.segment.data import texture_crops
from trimtab.train.recipes.segment.model import Backbone, TextureClassifier
from trimtab.train.resuming import BEST
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import Rig, Stage, Surroundings
from trimtab.train.trainer import Trainer

LR = 0.02
"""The rate of stage 1 where none is given."""
AUTO = "auto"
HEAD, TOP, ALL = "head", "top", "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was decided: the rate of stage 1, the stages, and the checkpoint whose weights it begins with."""

    rate: float
    stages: tuple[Stage, ...]
    weights: Path | None


def plan_of(settings: Settings) -> Plan:
    """The stages that the settings ask for.

    Stage 1 trains the head at `lr`; stage 2 the head at 0.5 and the backbone at 0.05 of it, or at `stage2_lr` and a
    tenth of that. `--resume best` (or the path of a checkpoint that holds weights alone) starts stage 2 with those
    weights; `lr` is then what the documented command means by it: the rate of the head in stage 2 itself, not halved
    once more. `--resume auto` continues the same training, and every rate means what it meant before.

    Example:
        >>> flags = {"lr": 0.00025, "stage2_lr": None, "epochs": 140, "stage1_epochs": 30, "skip_stage1": False}
        >>> flags |= {"resume": None, "resume_from": None, "progressive_unfreeze": False, "checkpoint_dir": None}
        >>> flags["stage2_batch_size"] = None
        >>> first, second = plan_of(flags).stages
        >>> first.epochs, second.epochs, second.learning_rate, second.factor_of("backbone.levels.0.0.conv.weight")
        (30, 110, 0.000125, 0.1)
        >>> _, second = plan_of(flags | {"resume": "best", "checkpoint_dir": Path("c"), "lr": 0.000125}).stages
        >>> second.learning_rate
        0.000125
    """
    weights = _weights(settings)
    again = weights is not None and settings["resume"] is not None
    base = get_preset("camoxpert").hints["stage2"]
    rate = LR if settings["lr"] is None else float(settings["lr"])
    first, total = settings["stage1_epochs"], settings["epochs"]
    if not 0 <= first < total:
        raise InputError(f"stage1_epochs is {first} of {total} epochs; expected 0 or more, and fewer than all of them")
    head_rate = rate if again and settings["lr"] is not None else base["head_lr_factor"] * rate
    if settings["stage2_lr"] is not None:
        head_rate = float(settings["stage2_lr"])
    if head_rate <= 0 or rate <= 0:
        raise InputError(f"lr is {rate:g} and that of stage 2 {head_rate:g}; expected numbers above 0")
    gently = {
        "learning_rate": head_rate,
        "lr_factors": {"": 1.0, "backbone": base["backbone_lr_factor"] / base["head_lr_factor"]},
        "scaler": get_preset("camoxpert").hints["scaler"],
        "batch_size": settings["stage2_batch_size"],
    }
    skip = settings["skip_stage1"] or again
    stages = [Stage(name=HEAD, epochs=0 if skip else first, frozen=("backbone",))]
    left = total - first
    if settings["progressive_unfreeze"] and left > 1:
        stages.append(Stage(name=TOP, epochs=left // 2, frozen=("backbone.levels.0", "backbone.levels.1"), **gently))
        left -= left // 2
    return Plan(rate=rate, stages=(*stages, Stage(name=ALL, epochs=left, **gently)), weights=weights)


def _weights(settings: Settings) -> Path | None:
    """The checkpoint to take only weights from; None without one, or if the trainer resumes."""
    resume, from_ = settings["resume"], settings["resume_from"]
    folder = settings["checkpoint_dir"]
    if resume is not None and from_ is not None:
        raise InputError(f"--resume is {str(resume)!r} and --resume-from {str(from_)!r}; give one of them")
    wanted = resume if resume is not None else from_
    if wanted is None or str(wanted) == AUTO:
        return None
    if str(wanted) == "best":
        if folder is None:
            raise InputError("'best' is best_model in the folder of checkpoints; give it: --checkpoint-dir")
        return Path(folder) / BEST
    path = Path(wanted)
    return path if from_ is not None or _weights_alone(path) else None


def _weights_alone(path: Path) -> bool:
    try:
        return "optimizer_state_dict" not in documented.read_checkpoint(path)
    except (CheckpointError, OSError):
        return False  # a folder of checkpoints, or none at all: the trainer reports what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Prints the rates of each stage at its beginning, and keeps the highest rates used."""

    say: Callable[[str], object] | None
    peaks: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, trainer: Trainer) -> None:
        """Note the rates of a step, cuts by the guard included."""
        rig = trainer.rig
        assert rig is not None
        parts = _parts(trainer.model, rig.optimizer)
        if rig.stage.name not in self.peaks:
            self.peaks[rig.stage.name] = dict.fromkeys(parts, 0.0)
            self._announce(trainer, rig, parts)
        peaks = self.peaks[rig.stage.name]
        for part, rate in zip(parts, rig.stability.corrector.rates, strict=True):
            peaks[part] = max(peaks[part], rate)

    def rounded(self) -> dict[str, dict[str, float]]:
        """The highest rate of each part in each stage, for people."""
        return {name: {part: float(f"{rate:.4g}") for part, rate in of.items()} for name, of in self.peaks.items()}

    def _announce(self, trainer: Trainer, rig: Rig, parts: list[str]) -> None:
        names = [stage.name for stage in trainer.stages]
        if self.say is not None:
            rates = ", ".join(f"{part} {rate:g}" for part, rate in zip(parts, rig.schedule.base_lrs, strict=True))
            frozen = f", {', '.join(rig.stage.frozen)} frozen" if rig.stage.frozen else ""
            place = f"Stage {names.index(rig.stage.name) + 1}/{len(names)} ({rig.stage.name})"
            self.say(f"{place}: {rig.stage.epochs} epochs{frozen}; peak learning rates: {rates}")


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The part of the model that each group of the optimizer holds."""
    part_of = {id(parameter): name.partition(".")[0] for name, parameter in model.named_parameters()}
    return [part_of[id(group["params"][0])] for group in optimizer.param_groups]


NUM_CROPS, NUM_HELD, BATCH, RATE = 480, 96, 32, 3e-3
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What makes one pre-training differ from another."""

    channels: tuple[int, ...]
    side: int
    epochs: int
    seed: int
    device: str


_DONE: dict[Wanted, tuple[dict[str, Tensor], float]] = {}
"""Backbones of this process: the arms of a comparison begin with the same one, and it is made once."""


def pretrain(backbone: Backbone, wanted: Wanted, say: Say | None) -> float:
    """Put pre-trained weights into the backbone; returns the accuracy on held-out crops. Draws no random numbers."""
    if wanted not in _DONE:
        if say is not None:
            say(f"Stage 0 (pretrain): the backbone learns to tell textures apart, {wanted.epochs} epochs")
        with torch.random.fork_rng():
            torch.manual_seed(wanted.seed)
            fresh = Backbone(wanted.channels)
            accuracy = _train(fresh, wanted, say)
        _DONE[wanted] = {name: one.cpu() for name, one in fresh.state_dict().items()}, accuracy
    state, accuracy = _DONE[wanted]
    backbone.load_state_dict(state)
    return accuracy


def _train(backbone: Backbone, wanted: Wanted, say: Say | None) -> float:
    x, y = (torch.from_numpy(one) for one in texture_crops(NUM_CROPS + NUM_HELD, wanted.side, wanted.seed))
    rows = TensorDataset(x[:NUM_CROPS], y[:NUM_CROPS])
    order = torch.Generator().manual_seed(wanted.seed)
    trainer = Trainer(
        TextureClassifier(backbone, int(y.max()) + 1),
        nn.functional.cross_entropy,
        TrainConfig(
            learning_rate=RATE,
            num_epochs=wanted.epochs,
            scheduler_type="onecycle",
            pct_start=0.3,
            device=wanted.device,
            seed=wanted.seed,
        ),
        metrics=lambda outputs, targets: {"Accuracy": classification_metrics(outputs, targets)["accuracy"]},
        around=Surroundings(run_dir=False, say=say, progress=None if say is None else Progress(say)),
    )
    held = DataLoader(TensorDataset(x[NUM_CROPS:], y[NUM_CROPS:]), batch_size=BATCH)
    history = trainer.train(DataLoader(rows, BATCH, shuffle=True, generator=order), held)
    return float(history.column("Accuracy")[-1])
