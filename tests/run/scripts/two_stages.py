"""First the head alone, then everything, with a new optimizer; the body has BatchNorm that is never frozen."""

import torch
from task import batches, ending
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x))


def stage(model, optimizer, num):
    for x, y in batches(num):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


model = Net()
for p in model.body.parameters():
    p.requires_grad = False
stage(model, torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2), 25)
print("finite after the head alone:", all(torch.isfinite(t).all() for t in model.state_dict().values()))
for p in model.parameters():
    p.requires_grad = True
stage(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), 25)
ending(model)
