"""Lazy layers, materialised by a dry run before the optimizer is built, under a meta-device skeleton."""

import torch
from task import batches, ending
from torch import nn

with torch.device("meta"):
    skeleton = nn.Linear(8, 8)
print(skeleton.weight.device, sum(p.numel() for p in skeleton.parameters()))
model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))
model(torch.zeros(2, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
ending(model, skeleton.to_empty(device="cpu").requires_grad_(False).weight.zero_())
