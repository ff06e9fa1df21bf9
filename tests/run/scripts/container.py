"""Modules in a ModuleDict whose own forward is never called, with a BatchNorm that no optimizer moves."""

import torch
from task import batches, ending
from torch import nn

nets = nn.ModuleDict({"encoder": nn.Linear(8, 16), "norm": nn.BatchNorm1d(16, affine=False), "head": nn.Linear(16, 1)})
optimizer = torch.optim.Adam(nets.parameters(), lr=1e-2)
for x, y in batches():
    optimizer.zero_grad()
    hidden = torch.relu(nets["norm"](nets["encoder"](x)))
    nn.functional.mse_loss(nets["head"](hidden), y).backward()
    optimizer.step()
ending(nets)
