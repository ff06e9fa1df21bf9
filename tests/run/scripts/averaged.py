"""Two averages of the weights beside the training: a deep copy with decay, and SWA with its own schedule."""

import copy

import torch
from task import batches, ending
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
ema = copy.deepcopy(model).requires_grad_(False).eval()
swa, swa_schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
best = None
for i, (x, y) in enumerate(batches()):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for ours, theirs in zip(ema.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 0.1)
    if i == 12:
        best = copy.deepcopy(model)
    if i > 15:
        swa.update_parameters(model)
        swa_schedule.step()
update_bn([x for x, _ in batches(4)], swa)
print("learning rate", optimizer.param_groups[0]["lr"])
ending(model, ema, swa, best)
