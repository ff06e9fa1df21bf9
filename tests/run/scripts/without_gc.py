"""Switches the garbage collector off; named parameters, and a learning rate that is a tensor."""

import gc

import torch
from task import batches, ending
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
gc.disable()
optimizer = torch.optim.Adam(model.named_parameters(), lr=torch.tensor(1e-2))
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
ending(model)
