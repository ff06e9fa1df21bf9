"""Spectral and weight normalisation (buffers that move in forward), pruning, and a teacher in evaluation mode."""

import copy

import torch
from task import batches, ending
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

model = nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.ReLU(), weight_norm(nn.Linear(16, 16)), nn.Linear(16, 1))
prune.random_unstructured(model[3], "weight", amount=0.3)
teacher = copy.deepcopy(nn.Sequential(nn.Linear(8, 1), nn.BatchNorm1d(1))).eval()
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
for x, y in batches():
    with torch.inference_mode():
        wanted = teacher(torch.nan_to_num(x))
    optimizer.zero_grad()
    out = model(x)
    (nn.functional.mse_loss(out, y) + 0.1 * nn.functional.mse_loss(out, wanted.clone())).backward()
    optimizer.step()
ending(model)
