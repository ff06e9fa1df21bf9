"""A mean and a variance: the negative log-likelihood falls below zero, which is good."""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader


class Batch(NamedTuple):
    features: torch.Tensor
    value: torch.Tensor


class Spread(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.mean, self.log_std = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Normal(self.mean(h), self.log_std(h).exp())


def build():
    torch.manual_seed(0)
    x = torch.rand(1000, 4)
    y = (0.2 * x.sum(1) + 0.02 * x[:, 0] * torch.randn(1000))[:, None]
    rows = [Batch(a, b) for a, b in zip(x, y, strict=True)]
    loader = DataLoader(rows, batch_size=50, shuffle=True)
    model = Spread()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step_fn(model, batch):
        return -model(batch.features).log_prob(batch.value).mean()

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}
