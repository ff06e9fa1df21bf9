"""Somebody tries his code on noise: nothing can be learned from it, and nothing is wrong with the wiring."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 3, 16, 16), torch.randint(0, 10, (256,)))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": nn.CrossEntropyLoss()}
