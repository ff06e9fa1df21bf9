"""Builds an optimizer and loads it with state, but never takes a step."""

import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
print(optimizer)
with torch.no_grad():
    print(model(torch.ones(1, 4)).shape)
