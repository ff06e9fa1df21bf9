"""Teaches a backbone to tell textures apart before it has to find objects: the stage before the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.train.metrics import classification_metrics
from trimtab.train.progress import Progress
from trimtab.train.recipes.segment_data import texture_crops
from trimtab.train.recipes.segment_model import Backbone, TextureClassifier
from trimtab.train.rig import Surroundings
from trimtab.train.settings import TrainConfig
from trimtab.train.trainer import Trainer

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
