"""The training that is examined where none is named: a small classifier of handwritten digits."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


def build() -> dict[str, object]:
    """A sound training: convolutions with BatchNorm and Dropout on 8x8 digits."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Unflatten(1, (1, 8)),
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(128, 10),
        )
    x, y = load_digits()
    images = (torch.from_numpy(x).float() / 16.0).reshape(-1, 8, 8)
    data = TensorDataset(images, torch.from_numpy(y).long())
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
        "loader": DataLoader(data, batch_size=32, shuffle=True, generator=generator),
        "loss_fn": nn.CrossEntropyLoss(),
    }
