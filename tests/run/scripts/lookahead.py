"""Lookahead: no optimizer itself, it holds one and every five steps pulls slow weights along."""

import torch
from task import batches, ending
from torch import nn


class Lookahead:
    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in optimizer.param_groups]

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for slow, group in zip(self.slow, self.optimizer.param_groups, strict=True):
                for s, p in zip(slow, group["params"], strict=True):
                    s.add_(p - s, alpha=self.alpha)
                    p.copy_(s)
        return loss


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=1e-2))
for x, y in batches():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
ending(model, optimizer.slow)
