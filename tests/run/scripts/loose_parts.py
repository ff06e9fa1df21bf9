"""Encoder, norm and head are separate variables; one optimizer moves them all, and nothing holds them together."""

import itertools

import torch
from task import batches, ending
from torch import nn

encoder = nn.Linear(8, 16)
norm = nn.BatchNorm1d(16)
head = nn.Linear(16, 1)
optimizer = torch.optim.Adam(itertools.chain(encoder.parameters(), norm.parameters(), head.parameters()), lr=1e-2)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(head(torch.relu(norm(encoder(x)))), y).backward()
    optimizer.step()
ending(encoder, norm, head)
