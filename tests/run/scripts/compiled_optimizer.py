"""The optimizer's step is compiled, as PyTorch's own tutorial does it."""

import warnings

import torch
from task import batches, ending
from torch import nn

warnings.simplefilter("ignore")  # of the compiler's own
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@torch.compile(backend="eager", fullgraph=False)
def step():
    optimizer.step()


for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    step()
ending(model)
