"""Two losses on one graph, with retain_graph, and a gradient penalty by double backward."""

import torch
from task import batches, ending
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for x, y in batches():
    optimizer.zero_grad()
    x.requires_grad_(True)
    out = model(x)
    nn.functional.mse_loss(out[:, :1], y).backward(retain_graph=True)
    (0.1 * nn.functional.mse_loss(out[:, 1:], -y)).backward(retain_graph=True)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (0.01 * (grad.norm(dim=1) - 1).square().mean()).backward()
    optimizer.step()
ending(model)
