"""Two thousand very small steps; a hundred are enough for a bad one."""

import torch
from task import BAD, batch, ending
from torch import nn

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(2000 if BAD < 0 else 100):
    x, y = batch(i, size=4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
ending(model)
