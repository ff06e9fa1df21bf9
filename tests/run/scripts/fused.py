"""Fused and foreach kernels, each for a model of its own."""

import torch
from task import batches, ending
from torch import nn

models, optimizers = [], []
for kind, options in [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"foreach": False, "amsgrad": True}),
]:
    models.append(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
    optimizers.append(kind(models[-1].parameters(), lr=1e-2, **options))
for x, y in batches():
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
ending(models)
