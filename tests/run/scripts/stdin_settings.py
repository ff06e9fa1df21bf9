"""Reads its settings from standard input, line by line, with input()."""

import json

import torch
from task import batches, ending
from torch import nn

settings = json.loads(input())
width = int(input("width? "))
model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
optimizer = getattr(torch.optim, settings.pop("name"))(model.parameters(), **settings)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.huber_loss(model(x), y).backward()
    optimizer.step()
ending(model)
