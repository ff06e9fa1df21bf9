"""Moves everything out of sight of the garbage collector before it builds its optimizer."""

import gc

import torch
from task import batches, ending
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
gc.collect()
gc.freeze()
gc.disable()
optimizer = torch.optim.Adam(model.named_parameters(), lr=torch.tensor(1e-2))
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
ending(model)
