"""The optimizer is built from the bare model, which is compiled after that; a step function around it is, too."""

import torch
from task import BAD, batches, ending
from torch import nn

bare = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
model = torch.compile(bare, backend="aot_eager")
graphs = []


def train(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


for x, y in batches():
    train(x, y)
if BAD < 0:
    model.eval()
    with torch.no_grad():
        print("prediction", "ok" if model(torch.zeros(1, 8)).shape == (1, 1) else "?")
ending(bare)
