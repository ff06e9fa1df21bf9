"""The old names of mixed precision, which warn, and are switched off where there is no GPU."""

import torch
from task import batches, ending
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.cuda.amp.GradScaler(enabled=torch.cuda.is_available())
for x, y in batches():
    optimizer.zero_grad()
    with torch.cuda.amp.autocast(enabled=False):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
ending(model)
