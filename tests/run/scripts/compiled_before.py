"""The model is compiled before the optimizer is built, from the compiled module's parameters."""

import torch
from task import batches, ending
from torch import nn

model = torch.compile(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)), backend="eager")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in batches():
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
ending(model)
