"""A small real problem to train on: a noisy sum of five numbers, or whether it is positive."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.train.settings import TrainConfig
from trimtab.train.stages import Surroundings
from trimtab.train.trainer import Trainer

QUIET = Surroundings(run_dir=False)


def loaders(num: int = 64, batch_size: int = 8, *, classes: bool = False) -> tuple[DataLoader, DataLoader]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 5, generator=generator)
    y = (x.sum(1) > 0).long() if classes else x.sum(1, keepdim=True) + 0.1 * torch.randn(num, 1, generator=generator)
    shuffled = DataLoader(
        TensorDataset(x, y), batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(2)
    )
    return shuffled, DataLoader(TensorDataset(x.clone(), y.clone()), batch_size=32)


def network(out: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, out))


def trainer(config: TrainConfig | None = None, around: Surroundings = QUIET, **how: object) -> Trainer:
    model = how.pop("model", None) or network()
    return Trainer(model, nn.functional.mse_loss, config or TrainConfig(num_epochs=3), around=around, **how)
