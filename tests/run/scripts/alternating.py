"""Two optimizers over the same parameters, taking turns."""

import itertools

import torch
from task import batches, ending
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
both = [torch.optim.SGD(model.parameters(), lr=0.05), torch.optim.RMSprop(model.parameters(), lr=1e-3)]
for (x, y), optimizer in zip(batches(), itertools.cycle(both), strict=False):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
ending(model)
