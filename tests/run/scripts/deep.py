"""A recursive model, forty modules deep, that calls itself under a low recursion limit."""

import sys

import torch
from task import batches, ending
from torch import nn

sys.setrecursionlimit(400)


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.inner = Deep(depth - 1) if depth else None

    def forward(self, x):
        x = x + 0.1 * torch.tanh(self.layer(x))
        return x if self.inner is None else self.inner(x)


model = Deep(40)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x)[:, :1], y).backward()
    optimizer.step()
ending(model)
