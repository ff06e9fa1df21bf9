"""A GradScaler with accumulation: the scaled loss is divided, the batches left over at the end step once more."""

import torch
from task import batches, ending
from torch import nn

ACCUMULATE = 4
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
waiting = 0
for x, y in batches(46, classes=3):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    (scaler.scale(loss) / ACCUMULATE).backward()
    waiting += 1
    if waiting == ACCUMULATE:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        waiting = 0
if waiting:
    scaler.step(optimizer)
    scaler.update()
print("scale", scaler.get_scale(), "left over", waiting)
ending(model)
