"""Training that fails by an error of its own, at the place that its argument names."""

import sys
import threading
import traceback

import torch
from task import batches, ending
from torch import nn

where = sys.argv[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        if where == "forward" and x.shape[0] != 16:
            raise ValueError(f"batch of {x.shape[0]}")
        return self.layer(x)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", enabled=where == "scaler")
for x, y in batches():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
ending(model)


def fail():
    if where == "forward":
        model(x[:3])
    if where == "shape":
        model(x[:, :3])
    if where == "backward":
        loss.backward()
    if where == "build":
        torch.optim.SGD(model.parameters(), lr=-1.0)
    if where == "clip":
        model.layer.weight.grad[0] = float("inf")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    if where == "scaler":
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
    if where == "closure":
        optimizer.step(lambda: loss.backward())
    if where == "printed":
        try:
            loss.backward()
        except RuntimeError:
            traceback.print_exc()


if where == "thread":
    where = "backward"
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
else:
    fail()
