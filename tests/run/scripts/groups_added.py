"""A parameter group joins later (gradual unfreezing), and state of an earlier optimizer is loaded."""

import torch
from task import batch, ending
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model[0].requires_grad_(False)
optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-2)
for i in range(30):
    if i == 10:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
    if i == 15:
        state = optimizer.state_dict()
        optimizer = torch.optim.Adam([{"params": model[2].parameters()}, {"params": model[0].parameters()}])
        optimizer.load_state_dict(state)
    x, y = batch(i)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
print([g["lr"] for g in optimizer.param_groups])
ending(model, [s["exp_avg"] for s in optimizer.state.values()])
