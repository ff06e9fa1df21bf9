"""Forward, loss, backward: the forward is a compiled function that closes over the model."""

import torch
from task import batches, ending
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
seen = []


def counting(graph, inputs):
    seen.append(len(graph.graph.nodes))
    return graph.forward


@torch.compile(backend=counting)
def loss_of(x, y):
    return nn.functional.mse_loss(model(x), y)


for x, y in batches():
    optimizer.zero_grad()
    loss_of(x, y).backward()
    optimizer.step()
print("graphs", len(seen))
ending(model)
