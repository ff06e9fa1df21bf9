"""Uses trimtab by itself already."""

import torch
from task import batches, ending
from torch import nn

import trimtab

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with trimtab.Guard(model, optimizer, mode="observe" if "observe" in __file__ else "advise", run_dir=False) as guard:
    for x, y in batches(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        guard.step(loss)
print(guard.findings, guard.rejected, len(trimtab.__version__) > 0)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
ending(model)
