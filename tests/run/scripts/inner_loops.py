"""As in meta-learning: a fresh copy of the model and a fresh optimizer in every inner loop, seventy of them."""

import copy

import torch
from task import batch, ending
from torch import nn

meta = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
outer = torch.optim.SGD(meta.parameters(), lr=0.1)
for i in range(70):
    learner = copy.deepcopy(meta)
    inner = torch.optim.SGD(learner.parameters(), lr=0.02)
    x, y = batch(i)
    for _ in range(2):
        inner.zero_grad()
        nn.functional.mse_loss(learner(x), y).backward()
        inner.step()
    outer.zero_grad()
    for p, q in zip(meta.parameters(), learner.parameters(), strict=True):
        p.grad = p.detach() - q.detach()
    outer.step()
ending(meta)
