"""torch.autograd.grad, with p.grad set by hand; and a method of the model that is not forward."""

import torch
from task import batches, ending
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def compute_loss(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for x, y in batches():
    params = list(model.parameters())
    loss = model.compute_loss(x, y)
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g
    optimizer.step()
ending(model)
