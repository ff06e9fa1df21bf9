"""One sample per batch, as large models force it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images[:200], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    y = torch.tensor(labels[:200], dtype=torch.long)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(x, y), batch_size=1, shuffle=True)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": nn.CrossEntropyLoss()}
