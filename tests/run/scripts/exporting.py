"""After training: script, trace, fx, export and torch.compile of the trained model, and its source."""

import inspect
import warnings

import torch
from task import BAD, batches, ending
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x):
        return self.b(torch.relu(self.norm(self.a(x))))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
if BAD < 0:
    model.eval()
    example = torch.ones(2, 8)
    warnings.simplefilter("ignore", DeprecationWarning)
    print(inspect.getsource(Net).splitlines()[0], inspect.signature(type(optimizer).__init__).parameters["lr"])
    print(torch.fx.symbolic_trace(model).code.strip())
    torch.jit.script(model).save("scripted.pt")
    print(torch.jit.trace(model, example)(example).shape, torch.jit.load("scripted.pt")(example).shape)
    exported = torch.export.export(model, (example,))
    print(len(exported.graph.nodes), torch.compile(model, backend="eager", fullgraph=True)(example).shape)
ending(model)
