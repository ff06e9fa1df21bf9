"""A model that is traced, scripted and exported between two epochs, while it is still being trained."""

import copy
import pickle
import warnings

import torch
from task import batch, ending
from torch import nn

warnings.simplefilter("ignore", DeprecationWarning)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
example = torch.ones(2, 8)
for i in range(30):
    x, y = batch(i)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if i in (5, 25):
        print(torch.jit.script(model)(example).shape, torch.jit.trace(model, example)(example).shape)
        print(len(torch.fx.symbolic_trace(model).graph.nodes), len(torch.export.export(model, (example,)).graph.nodes))
        print(len(pickle.dumps(copy.deepcopy(model))) > 1000, len(pickle.dumps(optimizer)) > 1000)
ending(model)
