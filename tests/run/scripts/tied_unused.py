"""Tied weights, a layer that is never used, a frozen one, a model in a list, a loss module with parameters."""

import torch
from task import batches, ending
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8)
        self.down.weight = self.up.weight
        self.never = nn.Linear(4, 4)
        self.frozen = nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x):
        return self.frozen(x + self.down(torch.relu(self.up(x))))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, prediction, target):
        return (prediction - target).square().mean() * torch.exp(-self.log_variance) + self.log_variance


parts = [Tied(), Scaled()]
optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters() if p.requires_grad], lr=1e-3)
for x, y in batches():
    optimizer.zero_grad()
    parts[1](parts[0](x), y).backward()
    optimizer.step()
ending(parts)
