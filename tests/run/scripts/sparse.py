"""Embeddings with sparse gradients under SparseAdam, beside a dense optimizer."""

import torch
from task import batches, ending
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, ids, x):
        return self.head(self.table(ids) + x)


net = Net()
optimizers = [torch.optim.SparseAdam(net.table.parameters(), lr=1e-2), torch.optim.Adam(net.head.parameters(), lr=1e-2)]
source = torch.Generator().manual_seed(7)
for x, y in batches():
    loss = nn.functional.mse_loss(net(torch.randint(50, (len(x),), generator=source), x), y)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
ending(net)
