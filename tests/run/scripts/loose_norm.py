"""Inputs are normalised by a module without parameters that belongs to no model."""

import torch
from task import batches, ending
from torch import nn

normalise = nn.BatchNorm1d(8, affine=False)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(normalise(x)), y).backward()
    optimizer.step()
ending(model, normalise)
