"""Transfer learning: a frozen backbone, left in training mode as so often, under a new head with its own optimizer."""

import torch
from task import batches, ending
from torch import nn

backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
for p in backbone.parameters():
    p.requires_grad = False
head = nn.Linear(16, 1)
optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(head(backbone(x)), y).backward()
    optimizer.step()
ending(backbone, head)
